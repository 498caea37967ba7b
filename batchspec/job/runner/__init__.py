"""One run of a job: from an opened job to committed shards. Changes when the course of a run changes.

identity.py            what identifies a job: everything that changes its results
checked_run.py         the checks of a run before its rows, on what it will write
job_run.py             what the output folder holds of the job, and what this run does there
new_retry.py           the retry that resume.retry asks for: its shards
new_extension.py       the rows that resume=extend adds to the job
compute_all.py         the plan of a job: every row is computed
retry_plan.py          the plan of a retry: which rows are computed anew, which are carried over
run_shards.py          claim, decode and commit shards until none is left (`ShardRunner`)
decode_shards.py       one pass: rows through the engine, whole shards out
commit_shards.py       each shard's file is written, verified, checked and published while the next shards are decoded
shard_work.py          admission before decoding, the output table after it
shard_workers.py       the same in worker processes, with shards read ahead
shard_worker.py        such a process, and what is sent between the processes
oom_fallback.py        the run's engine, and a smaller one when memory runs out
interlude.py           what a run does between two passes; head/: it trains a head, or changes to one
run_monitor.py         what is reported after each round
kv_scales.py           the scales of an FP8 K/V cache, the same for all runs of a job
weight_sums.py         whether all runs of a job load the same weights
rank.py                a process of a group that computes one model: it leads or follows
follower.py            a process that computes a part of the model for the process that runs all this
conclude.py            what follows the last row: card, report, push
"""
