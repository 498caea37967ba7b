"""Processes that compute one model together: how they start and join, exchange tensors and end.

group.py           how a process joins its group; seat.py: its place in it, without torch
rank_processes.py  the processes, as their parent has them; rank_ends.py: how they ended; silent_ranks.py: which do not run at all
collectives.py     exchanges between the ranks; peer.py: between GPUs of one machine, within CUDA graphs
channel.py         the leader's messages to the other ranks, in shared memory; wire.py: how messages are encoded
"""
