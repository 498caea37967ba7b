"""The warm engine: a model that stays loaded between calls, each with rows in memory.

engine.py         `batchspec.Engine`: loads once, generates, swaps weights
loading.py        the model of an engine: its checks without rows, its weights
ranks.py          an engine whose model several processes compute; rank_process.py: such a process; messages.py: their messages
weights.py        tensors in memory as files that these processes read
tasks.py          another task for one call, with the same weights
options.py        options as Python values; keys of a job that a call has no use for
call_arguments.py arguments of a call that it does not take
call.py           one call: rows -> requests -> completions -> frame
stream.py         the completions of a call as they end, for plain and asynchronous loops
conversations.py  completions of a turn become the next turn's requests
"""
