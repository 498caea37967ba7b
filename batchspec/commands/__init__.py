"""The subcommands of `batchspec`, one module each, named as the command; `cli.py` has the list.

Parts of commands:
  picked_rows.py           which rows `export` writes; trainer_rows.py: its forms for trainers
  planning.py              what `plan` computes; plan_text.py: its text
  training.py              what `train` does
  decode_again.py          rows decoded again, for `verify`; verify_kv.py: `--kv`; verify_logprobs.py: log-probabilities
  probe.py                 `doctor --probe`
  ranks.py                 cluster.tensor_parallel=auto, before a run
  reference.py             help of all keys
`bench`:
  bench_arguments.py       its command line
  workloads.py, shapes.py  models and prompts
  bench_engines.py         configurations; bench_variants.py: which take turns; bench_phases.py: progress
  bench_ranks.py           `--tensor-parallel`; bench_follower.py: the other processes
  bench_rounds.py          `--rounds`
  bench_host.py            `--host`; stand_in_device.py: a device that answers at once
  bench_job.py             `--job-layer`; bench_job_stand_ins.py: an engine that answers at once
  bench_schemas.py         `--schemas`
  profile.py               where the time of a round goes
"""
