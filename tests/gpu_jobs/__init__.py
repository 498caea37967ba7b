"""Differential fuzzing of whole jobs: random combinations of features must give the tokens of a reference run without
drafts, preemption and shared pages: on a GPU in bf16 with decode.deterministic and in float64, on a CPU in float64.

    python -m tests.gpu_jobs 0 200 --seconds 400
    python -m tests.gpu_jobs 0 50 --ranks 2

With --ranks 2 two GPUs, or on a CPU two processes, compute the model of each case in float64; the reference run has one. Cases
that a job refuses are counted by what it says, and are no failures; a run that compares no row fails.

models.py         the models, heads and adapters, made once in a folder
rows.py           random rows: prompts, images, limits, sampling, stops, constraints, adapters
cases.py          number of a case -> its group (model, rows, keys of decoding) and its own keys (drafter, slots, pages)
plain.py          the reference run of a group
entry_points.py   runs a case through an entry point: warm engine, job in this process, `generate`, or commands
                  that are killed and resumed
scoring.py        prompts that are scored (decode.score=prompts)
compare.py        the first difference of each row between two outputs
workers.py        processes that run cases until the time is over; one that dies or hangs is replaced
"""
