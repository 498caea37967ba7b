"""What can end a run or go wrong with it. Changes when a kind of interruption is handled differently.

signals.py       SIGTERM, Ctrl-C: finish the round, save, end
deadline.py      the time limit of the batch system: which rows are still begun
watchdog.py      a run that hangs ends itself
leases.py        claims are taken and released; a crash makes its shards suspect
poison_rows.py   rows that crash the process are found by isolated retries
"""
