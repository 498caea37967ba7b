"""Begins an extension: the rows that the command's input has and the job in output.dir does not have yet (resume=extend)."""

from __future__ import annotations

from dataclasses import asdict, replace

from batchspec.errors import OutputError
from batchspec.identity import job_fingerprint
from batchspec.prepare import Job
from batchspec.runstate.extensions import MAY_DIFFER, Extension, obstacle, shard_rows_of
from batchspec.runstate.generations import Change
from batchspec.runstate.manifest import Manifest, compared_facts, differing
from batchspec.runstate.output_folder import OutputFolder
from batchspec.text import counted


def new_extension(job: Job, output: OutputFolder) -> Extension | None:
    """The extension that the job's command asks for; None if the job has all its rows.

    Raises OutputError if there is no job, and if its rows are not the first rows of the command's input.
    """
    if not job.config.resume.extend:
        return None
    if not output.is_job():
        raise OutputError(
            f"{output.path}: no job was run there that resume=extend could extend; check output.dir, or leave resume=extend out "
            "to begin one"
        )
    past, manifest = output.latest_changes(), output.manifest
    compared = _compared(job)
    differ = differing(manifest.fingerprint, compared)
    if not differ:
        return None
    _check_rows(job, output)
    if differ == {"output.shard_rows"}:
        default = "" if job.config.output.shard_rows else ", the default,"
        raise OutputError(
            f"{output.path}: the input has no row that the job lacks, and output.shard_rows={compared['output.shard_rows']}"
            f"{default} only applies to added rows; run the command with "
            f"output.shard_rows={manifest.fingerprint['output.shard_rows']}"
        )
    config = asdict(job.config)
    config["resume"]["extend"] = False
    return Extension(
        number=len(past) + 1,
        fingerprint=compared,
        config=config,
        num_rows=job.source.num_rows,
        shard_rows=shard_rows_of(manifest, compared, job.source.num_rows),
        files=tuple(job.source.files),
        job=manifest.job,
    )


def _compared(job: Job) -> dict[str, str]:
    return compared_facts(job_fingerprint(job), job.source.num_rows, job.config.output.shard_rows)


def check_added_columns(job: Job, output: OutputFolder) -> None:
    """Raise OutputError, with the column's name, if new files change the columns of the output: its fingerprint has no names."""
    if job.config.resume.extend and output.is_job():
        key = "output.schema"
        if output.manifest.fingerprint.get(key) != job_fingerprint(job)[key]:
            _check_rows(job, output)


def _check_rows(job: Job, output: OutputFolder) -> None:
    if why := obstacle(output.manifest, job.source):
        raise OutputError(f"{output.path}: resume=extend only adds rows after those of the job: {why}")


def advice(job: Job, manifest: Manifest) -> str:
    """For the message about another job: keys with which the command would go on with that job; empty if there are none."""
    differ = differing(manifest.fingerprint, _compared(job))
    if differ == {"output.shard_rows"}:
        return f"run the command with output.shard_rows={manifest.fingerprint['output.shard_rows']} to go on with it; or "
    if not differ <= {*MAY_DIFFER} or obstacle(manifest, job.source):
        return ""
    added = job.source.num_rows - manifest.num_rows
    what = f"adds {counted(added, 'row')} to this job" if added else "accepts this input, which has the same rows"
    return f"resume=extend {what}; or "


def with_layout(job: Job, output: OutputFolder, change: Change | None = None) -> Job:
    """The job with the shards of its output folder, those of an extension that this run begins included."""
    if output.begins_job(job.config.output.overwrite):
        return job
    manifest = output.manifest if change is None else change.of(output.manifest)
    return replace(job, layout=manifest.layout)
