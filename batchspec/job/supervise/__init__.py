"""Interruptions of a run: time limits, hangs, crashes. Changes when a kind of interruption is handled differently.

slurm.py         a task of Slurm: its identity, its time limit, how it requeues itself
deadline.py      the time limit of the batch system: which rows still begin before it
watchdog.py      a run that hangs ends itself, in rounds and while it loads
leases.py        claims are taken and released; a crash makes its shards suspect
nearby_shards.py the order in which a run tries to claim shards
poison_rows.py   rows that crash the process are found by isolated retries
"""
