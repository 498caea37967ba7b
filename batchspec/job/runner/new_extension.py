"""Begins an extension: the rows that the command's input has and the job in output.dir does not have yet (resume=extend)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict

from batchspec.console.text import counted
from batchspec.data.runstate.extensions import EXTENSION_MAY_CHANGE, Extension, obstacle, shard_rows_of
from batchspec.data.runstate.manifest import Manifest, compared_facts, differing
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import OutputError
from batchspec.job.prepare import Job
from batchspec.job.runner.identity import job_fingerprint


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
    compared = facts_of_job(job)
    check_unchanged(output, compared, EXTENSION_MAY_CHANGE)
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


def facts_of_job(job: Job) -> dict[str, str]:
    """What is compared with the job in the folder. Reads the model's files again."""
    return compared_facts(job_fingerprint(job), job.source.num_rows, job.config.output.shard_rows)


def check_unchanged(output: OutputFolder, compared: Mapping[str, str], may_differ: Collection[str]) -> None:
    """Raise OutputError if a change that another run began since the folder was checked is one that this command does not know:
    it would be undone.

    compared  `facts_of_job` of this command
    """
    if differ := differing(output.manifest.fingerprint, compared) - {*may_differ}:
        raise OutputError(
            f"{output.path}: another run changed the job while this one began ({', '.join(sorted(differ))}); run the command "
            "again, which says how to go on"
        )


def check_added_columns(job: Job, output: OutputFolder) -> None:
    """Raise OutputError, with the column's name, if new files change the columns of the output: its fingerprint has no names."""
    key = "output.schema"
    if not (job.config.resume.extend and output.is_job()) or output.manifest.fingerprint.get(key) == job_fingerprint(job)[key]:
        return
    _check_rows(job, output)
    both = (job.source.alone(len(output.manifest.files)).schema, job.source.schema)
    old, new = (job.admission.schema_of(each, job.columns, job.config.output) for each in both)
    if changed := [field.name for field in new if field.name not in old.names or old.field(field.name) != field]:
        raise OutputError(
            f"{output.path}: with the new files column {changed[0]!r} of the output has another type (messages has more fields "
            "if some have tool calls); run the new files as a job of their own in another output.dir"
        )


def _check_rows(job: Job, output: OutputFolder) -> None:
    if why := obstacle(output.manifest, job.source):
        raise OutputError(f"{output.path}: resume=extend only adds rows after those of the job: {why}")


def advice(job: Job, manifest: Manifest) -> str:
    """For the message about another job: keys with which the command would go on with that job; empty if there are none."""
    differ = differing(manifest.fingerprint, facts_of_job(job))
    if differ == {"output.shard_rows"}:
        return f"run the command with output.shard_rows={manifest.fingerprint['output.shard_rows']} to go on with it; or "
    if not differ <= {*EXTENSION_MAY_CHANGE} or obstacle(manifest, job.source):
        return ""
    added = job.source.num_rows - manifest.num_rows
    what = f"adds {counted(added, 'row')} to this job" if added else "accepts this input, which has the same rows"
    return f"resume=extend {what}; or "
