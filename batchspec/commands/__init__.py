"""The subcommands of `batchspec`, one module each, named as the command; `cli.py` has the list.

Parts of commands:
  picked_rows.py           which rows `export` writes; trainer_rows.py: its forms for trainers
  planning.py              what `plan` computes; plan_output.py: what a run would find in output.dir
  plan_text.py             how it is printed; plan_json.py: `--json`; card_text.py: lines about a card (`--card`)
  decode_again.py          rows decoded again, for `verify`; verify_kv.py: `--kv`; verify_logprobs.py: log-probabilities
  families_table.py        the table that `families` prints
  ranks.py                 cluster.tensor_parallel=auto, before a run
  reference.py             help of all keys
"""
