"""One job, from its configuration to its last shard.

run_job.py     read -> admit -> plan -> decode -> write: the page to read first
prepare.py     input, model, tokenizer and drafter of a job, checked
images.py      which jobs read images, and what is refused with them
load/          the engine of a checked job: its memory, its weights
runner/        one run's part of the job
supervise/     deadline, watchdog, rows that crash a run, Slurm
report/        pages about a job
thumbnails.py  small pictures of images, for the report
"""
