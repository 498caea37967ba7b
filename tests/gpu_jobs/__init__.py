"""Random whole jobs on a GPU (or, in float64, on a CPU) that combine features; the tokens must be those of the plainest run.

    python -m tests.gpu_jobs 0 200 --seconds 400

models.py   the models, heads and adapters, made once in a folder
rows.py     what the rows ask for
cases.py    a number -> rows and keys of its group (what the job is) and the case's own keys (how it is run)
plain.py    the plainest run of a group
doors.py    runs a case: warm engine, job in this process, `generate`, or commands that are killed and resumed
scoring.py  prompts that are scored
compare.py  where two outputs of the same rows differ
workers.py  processes that run cases until the time is over; a dead or hanging one is replaced
"""
