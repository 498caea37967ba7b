"""How kernels and threads are chosen for a machine.

policy.py       every choice that can change the last bits of a result: tiles, cuts along K, splits of attention
table.py        the fastest way to compute each matrix product, and the tuner that measures it
exchange.py     the algorithm of an exchange between GPUs
cards.py        cards by name, for `--card`
cpu_threads.py  the number of threads on a CPU that other processes use too
"""
