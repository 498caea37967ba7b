"""run_job: read -> admit -> plan -> decode -> write. The page to read first.

job = open_job(config)             every check; nothing is written before all have passed
output = check_output(job)         the output folder: new, or that of a run of the same job
compute(job, output, ...)          an engine, and this run's part of the shards: claimed, decoded, committed once (`work/part.py`)
output.finish(...)                 the card and the report, once no shard is missing
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from batchspec import terminal
from batchspec.config.schema import RunConfig
from batchspec.dataset.reader import Source
from batchspec.errors import TooManyErrors
from batchspec.packing.survey import Survey
from batchspec.prepare import Job, job_fingerprint, make_engine, open_job, recorded_facts, survey_first
from batchspec.report.card import dataset_card
from batchspec.report.page import NEEDS_EXTRA, can_draw, write_report
from batchspec.report.progress import Progress
from batchspec.report.stats import JobStats, job_stats
from batchspec.report.summary import RunSummary
from batchspec.runner.adaptation import Adaptation
from batchspec.runner.fitted import FittedEngine, MakeEngine
from batchspec.runner.part import Part, check_errors
from batchspec.runner.retries import MAY_DIFFER, Rebuild, new_retry
from batchspec.runstate.generations import Generation
from batchspec.runstate.journal import Journaled, saved_rows
from batchspec.runstate.shards import OutputFolder


def run_job(config: RunConfig, source: Source | None = None) -> None:
    """Run a job to its end, or go on with it where an earlier run of the same command stopped.

    `source` replaces the dataset at input.path.
    """
    job = open_job(config, source)
    output = check_output(job)
    retry = new_retry(job, output)
    goes_on = output.is_job() and not output.begins_anew(config.output.overwrite)
    finished = output.finished() if goes_on else set()
    complete = retry is None and goes_on and len(finished) == output.num_shards
    if complete:
        say(f"{output.path}: already complete: {job.source.num_rows} rows in {output.num_shards} shards{nothing_left(config)}")
    else:
        try:
            compute(job, output, finished, retry=retry)
        except TooManyErrors:
            if output.missing():
                raise  # with the last shard the job is complete all the same: its card and report come first
        if others := output.missing():
            say(f"{output.path}: this run's part is done; other runs work on {len(others)} of {output.num_shards} shards")
            return
        say(f"{output.path}: done, {job.source.num_rows} rows in {output.num_shards} shards")
    stats = finish(output, again=not complete)
    errors = stats.by_status.get("error", 0)
    if errors:
        say(f"{output.path}: {errors} error row{'s' * (errors > 1)}; the column `error` says why")
    check_errors(job, stats.error_rows, all_failed=errors == stats.completions)
    say(f"look at it:  batchspec stats {output.path}")
    say(f"             python -c \"import polars; print(polars.read_parquet('{output.path}/data'))\"")


def nothing_left(config: RunConfig) -> str:
    """What a complete job says to a retry that was done, or that no row needs."""
    if config.resume.retry == "length":
        cap = config.decode.max_new_tokens
        return f"; nothing left for resume=length decode.max_new_tokens={cap}: a row that is still cut off there needs more"
    return "" if config.resume.retry == "none" else f"; nothing left for resume={config.resume.retry}"


def finish(output: OutputFolder, *, again: bool) -> JobStats:
    """Card and report of a job without a missing shard, where they are not there or `again`; what its rows are."""
    stats = job_stats(output.path)
    output.tidy()  # a run may have died since the last commit, or have gone on after another one had completed the job
    if again or not output.has_card():
        output.finish(dataset_card(output.manifest, stats))
        if can_draw():
            write_report(output, stats=stats)
            say(f"{output.path}/report.html: the job in pictures")
        else:
            say(NEEDS_EXTRA.format(out=output.path))
    return stats


def compute(
    job: Job, output: OutputFolder, finished: set[int], make: MakeEngine = make_engine, retry: Generation | None = None
) -> None:
    """Decode and commit every shard that is not `finished` and that no other run works on, and say how fast.

    `make` is called when every check has passed. `retry` begins then, and its shards alone are computed.
    Raises what `Part.run` raises.
    """
    began = time.perf_counter()
    seen = survey_first(job)
    if retry is not None:
        finished = finished - set(retry.shards)
    first_time = not output.is_job() or output.begins_anew(job.config.output.overwrite)
    again = retry is not None or (not first_time and output.generation is not None)
    num_errors = job_stats(output.path).error_rows if finished and not again else 0
    check_errors(job, num_errors)
    journaled = Journaled() if first_time or retry is not None else output.journal().read(finished)
    with bar(job, seen, finished, journaled) as progress:
        loading = time.perf_counter()
        fitted = FittedEngine(job, seen, progress, make)
        adaptation = Adaptation(job, output, progress)
        adaptation.serve(fitted.engine)
        start_up_s = time.perf_counter() - loading
        create_output(job, output, retry)  # nothing can be refused from here on
        if again and output.generation is not None:
            progress.phase(f"{len(output.missing())} of {output.num_shards} shards are written anew; the other rows stay")
            job = replace(job, admission=Rebuild(job, output, output.generation))
        elif finished or journaled.num_rows:
            saved = saved_rows(journaled.num_rows, journaled.snapshots.values())
            progress.phase(f"{len(finished)} of {output.num_shards} shards are committed already, {saved}; the rest is computed")
        part = Part(job, output, fitted, seen, progress, journaled, num_errors, adaptation)
        part.run()
    totals = fitted.engine.totals
    summary = RunSummary(
        seconds=time.perf_counter() - began - start_up_s,
        start_up_s=start_up_s,
        tokens=totals.tokens,
        rounds=totals.rounds,
        row_rounds=totals.row_rounds,
        accepted=totals.accepted,
        preempted=totals.preempted,
    )
    say(summary.line())
    output.log_run(summary.facts())


def bar(job: Job, seen: Survey, finished: set[int], journaled: Journaled) -> Progress:
    """The progress bar over the output rows of the whole job."""
    done = seen.num_outputs(len(finished) * job.shard_rows) + len(journaled.completions)
    return Progress(seen.num_outputs(job.source.num_rows), done=done)


def say(line: str) -> None:
    terminal.say(line)


def check_output(job: Job) -> OutputFolder:
    """The output folder: not there yet, or that of the job being resumed. Raises OutputError for another job's; makes nothing."""
    config = job.config.output
    assert config.dir is not None
    output = OutputFolder(config.dir)
    rows = job.source.num_rows
    output.check(
        fingerprint=job_fingerprint(job),
        num_rows=rows,
        shard_rows=config.shard_rows,
        overwrite=config.overwrite,
        may_differ=MAY_DIFFER[job.config.resume.retry],
    )
    return output


def create_output(job: Job, output: OutputFolder, retry: Generation | None = None) -> None:
    """Make the folder and its manifest where they are not there; begin the retry."""
    if retry is not None:
        output.retry(retry)
    output.create(
        fingerprint=job_fingerprint(job),
        config=asdict(job.config),
        recorded=recorded_facts(job),
        num_rows=job.source.num_rows,
        shard_rows=job.config.output.shard_rows,
        files=job.source.files,
        overwrite=job.config.output.overwrite,
    )
