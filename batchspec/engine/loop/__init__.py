"""The loop: schedule, execute, process.

  engine.py         the loop; engine_run.py: one run, its state and its steps
  scheduler.py      decides every step; refills.py: what the requests that enter slots bring to a step, and how passes are cut
  executor.py       does what a step says, and owns the device's state
  follower.py       the loop of the other ranks of a group: they execute what the first one sends
  round_planner.py  the number of draft tokens of each round, by measured times and acceptance
  warm_up.py        compiles kernels and times prefill before the first row
  round_timer.py    the times of captured rounds; partial_rounds.py: which rounds that verify a part of their drafts are captured
  run_times.py      the time between the results of two rounds, and the fixed time of refills
  totals.py         adds each result to requests and totals
"""
