"""The checks of a run on what it will write, which follow those of the job (`job/prepare.py`): `run` and `plan` make them
alike."""

from __future__ import annotations

from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.job.prepare import Job
from batchspec.job.report.answers import check_answers_file
from batchspec.job.report.push import check_target_key
from batchspec.job.runner.identity import job_fingerprint
from batchspec.job.runner.job_run import FoundRun, open_run


def checked_run(job: Job, attempt: str | None = None) -> FoundRun:
    """The run that this command asks for, after every check of what it will write. Writes nothing.

    attempt  the run's id; None: a new one
    Raises as `open_run` and `check_target`; OutputError for a file of output.openai that the job may not write.
    """
    run = open_run(job, attempt)
    check_answers_file(job.config, is_new=run.begins_job)
    check_target(run.job)
    return run


def check_target(job: Job) -> None:
    """Ask the hub whether the push at the end of the job would be refused, if there is one. Raises as the push would."""
    config = job.config.output
    if config.push_to_hub is None:
        return
    of_job = "" if config.dir is None else OutputFolder(config.dir).id_of_job(
        fingerprint=job_fingerprint(job), num_rows=job.source.num_rows, shard_rows=config.shard_rows, overwrite=config.overwrite
    )
    check_target_key(config, of_job)
