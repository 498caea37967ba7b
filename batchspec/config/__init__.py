"""The configuration: keys as dataclasses, their checks, and Hydra, which only compose.py calls.

schema.py         every key; draft_schema.py, decode_schema.py: those of drafters and of decoding
key.py            what is declared beside a key: range, choices, column of rows, other programs' names
row_options.py    the options that a row may set for itself
train_schema.py   those of `batchspec train`
typed.py          Hydra's configuration -> dataclasses; overrides.py: what users write -> what Hydra reads
checks.py         every check; draft_checks.py: of drafters; values.py: of single values
drafters.py       the drafters and the keys that each reads
draft_auto.py     draft=auto -> a drafter, once the model is known
no_effect.py      keys that other keys leave without effect
vllm_names.py     names of keys in other programs
compose.py        overrides in, checked RunConfig out
unread.py         keys that a call from Python does not read
reference.py      the reference of all keys
"""
