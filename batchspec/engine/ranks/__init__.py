"""Several ranks that compute one model in lockstep.

  lead.py       the leader sends what it does and compares what the ranks have read
  messages.py   what it sends
"""
