"""Begins a retry: finds the shards of a complete job that have a row which the command asks to compute again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import polars as pl

from batchspec.console.text import counted
from batchspec.data.runstate.extensions import Extension
from batchspec.data.runstate.generations import Change, Generation
from batchspec.data.runstate.manifest import differing
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning
from batchspec.errors import OutputError
from batchspec.job.prepare import Job
from batchspec.job.runner.new_extension import check_unchanged, facts_of_job

CAP, DETECTION = "decode.max_new_tokens", "decode.repetition_detection"
RETRY_MAY_CHANGE = {"length": (CAP,), "repetition": (DETECTION,), "error": (), "none": ()}
"""Keys of the fingerprint that this kind of retry may change."""
TRUNCATED = (pl.col("status") == "truncated") & (pl.col("finish_reason") == "length")
TO_RETRY = {
    "error": (pl.col("status") == "error") & pl.col("error").struct.field("retryable"),
    "length": TRUNCATED,
    "repetition": pl.col("finish_reason") == "repetition",
}


def new_retry(job: Job, output: OutputFolder) -> Generation | None:
    """The retry that the job's command asks for; None if it was begun before, or if no row needs it and it changes no setting.

    Raises OutputError if there is no job, if it or the retry before this one is not complete, if decode.max_new_tokens is not
    larger than before, and if decode.repetition_detection would end rows again.
    """
    kind = job.config.resume.retry
    if kind == "none":
        return None
    if not output.is_job():
        raise OutputError(f"{output.path}: no job was run there that resume={kind} could retry; check output.dir")
    changes, manifest = output.latest_changes(), output.manifest
    compared = facts_of_job(job)
    check_unchanged(output, compared, RETRY_MAY_CHANGE[kind])
    if kind == "repetition" and json.loads(compared[DETECTION]) is not None:
        off = f"{DETECTION}.max_pattern_size=0"
        raise OutputError(f"{output.path}: resume=repetition with {DETECTION} on would end the same rows again; set {off}")
    past = [change for change in changes if isinstance(change, Generation)]
    config = asdict(job.config)
    config["resume"]["retry"] = "none"
    fingerprint = dict(manifest.fingerprint) | {key: compared[key] for key in (CAP, DETECTION)}
    wanted = Generation(
        number=len(changes) + 1, retry=kind, began=output.command.names, fingerprint=fingerprint, config=config, shards=()
    )
    if _was_begun(wanted, changes, output):
        if fingerprint != manifest.fingerprint:
            raise OutputError(
                f"{output.path}: the retry with {wanted} was done, and the one with {past[-1]} came after it; "
                f"run the command with {CAP}={manifest.fingerprint[CAP]}"
            )
        return None
    old, new = (json.loads(known[CAP]) for known in (manifest.fingerprint, fingerprint))
    if missing := output.missing():
        last = past and past[-1] is changes[-1]  # otherwise an extension, or the job itself, is not complete
        as_it_was = f", {DETECTION} as it was" if kind == "repetition" else ""
        before = f"with {past[-1]}" if last else f"with {CAP}={old}{as_it_was} and without resume={kind}"
        raise OutputError(f"{output.path}: {len(missing)} shards are not done; run the command {before} to its end, then retry")
    if kind == "length" and (new < old or (new == old and _num_cut_off_at(output, old))):
        raise OutputError(
            f"{output.path}: resume=length {CAP}={new} gives no row more tokens: rows were cut off at {old}; "
            f"run the command with a larger {CAP}"
        )
    shards = _shards_with(output, kind) if kind != "length" or new > old else ()
    # Without a row to retry, what it changes is recorded all the same: later commands have the changed setting.
    return replace(wanted, shards=shards) if shards or fingerprint != manifest.fingerprint else None


def retry_advice(job: Job, output: OutputFolder) -> str:
    """For the message about another job: the retry that continues its truncated rows, if the command differs from it in a larger
    decode.max_new_tokens alone; else empty."""
    compared = facts_of_job(job)
    old, new = (json.loads(known[CAP]) for known in (output.manifest.fingerprint, compared))
    if differing(output.manifest.fingerprint, compared) != {CAP} or not 0 < old < new:
        return ""
    if output.missing():
        return f"end it with {CAP}={old}, then run with resume=length {CAP}={new}; or "
    if not (count := _num_cut_off_at(output, old)):
        return f"none of its rows is truncated at {old} tokens, so that there is nothing to continue; "
    return f"resume=length continues its {counted(count, 'truncated row')}; or "


def _was_begun(wanted: Generation, changes: Sequence[Change], output: OutputFolder) -> bool:
    """Whether the retry needs no beginning: it is not concluded yet, or was done before.

    resume=length and resume=repetition are done once for each limit; rows of later extensions have their settings from the start.
    resume=error is done once for each command, and has not seen the rows of a later extension. A command without a name, which a
    run that was interrupted during the push tells to be given again, goes on with the latest retry until that is concluded.
    """
    extended = max((change.number for change in changes if isinstance(change, Extension)), default=0)
    same = [one for one in changes if isinstance(one, Generation) and one.identity == wanted.identity]
    if wanted.retry != "error":
        return bool(same)
    same = [one for one in same if one.number > extended]
    is_latest = bool(same) and same[-1] is changes[-1]
    return any(map(output.command.began, same)) or (is_latest and (bool(output.missing()) or not output.is_concluded()))


def _shards_with(output: OutputFolder, kind: str) -> tuple[int, ...]:
    """Shards that may hold a row to retry."""
    rows = output.scan().filter(TO_RETRY[kind]).select("row_index")
    with scanning(output.path):
        found = rows.collect()["row_index"].unique().to_list()
    return tuple(sorted({*map(output.manifest.layout.shard_of, found)}))


def _num_cut_off_at(output: OutputFolder, cap: int) -> int:
    """Number of completions that were cut off at this limit; those with a smaller limit of their own do not count."""
    rows = output.scan().filter(TRUNCATED & (pl.col("usage").struct.field("completion_tokens") == cap)).select(pl.len())
    with scanning(output.path):
        return int(rows.collect().item())
