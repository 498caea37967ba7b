"""`batchspec bench`: speeds and costs, measured. Nothing else imports this package.

command.py     the command; arguments.py: its command line; acceptance.py: `--accept`
workloads.py   models and prompts; schemas.py: `--schemas`
engines.py     configurations; variants.py: which take turns
rounds.py      `--rounds`: single rounds
profile.py     where the time of a round goes
image_preparation.py  `python -m batchspec.bench.image_preparation`: pages decoded and resized in a second
ranks.py       `--tensor-parallel`; follower.py: the other processes
"""
