"""run_job: read -> admit -> plan -> decode -> write. The module to read first.

open_job(config)        every check; nothing is written before all have passed                       prepare.py, dataset/, model/
check_output(job)       the output folder: new, or that of an earlier run of this job                 runstate/
check_target(job)       with output.push_to_hub: no other job's dataset has that name                 report/
new_retry(job, output)  the retry that resume.retry asks for, if any                                  runner/new_retry.py
new_extension(job, ..)  the rows that resume=extend adds to the job, if any                           runner/new_extension.py
compute(job, ...)       one run:
  survey_first(job)       read and admit the first rows                                               dataset/, packing/
  EngineWithFallback      choose the batch's shape, load the model, make the engine                     load.py, packing/, model/
  create_output(job, ..)  the manifest: from here on the folder is a job                              runstate/
  work_plan(job, ..)      which rows are computed and which are carried over                          runner/
  ShardRunner.run()       claim shards, decode them, commit each once, until none is left             runner/, supervise/
conclude(job, output)   the card and the report, once no shard is missing; the push to a hub           runner/, report/
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import asdict, replace

from batchspec import terminal
from batchspec.config.schema import RunConfig
from batchspec.dataset.reader import Source
from batchspec.distributed.group import Group
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import TooManyErrors
from batchspec.identity import job_fingerprint, recorded_facts
from batchspec.load import make_engine
from batchspec.packing.survey import Survey
from batchspec.prepare import Job, open_job, survey_first
from batchspec.report.answers import check_answers_file
from batchspec.report.progress_bar import ProgressBar
from batchspec.report.push import check_push_key, check_target_key
from batchspec.report.start_up import StartUp
from batchspec.report.stats import job_stats
from batchspec.report.summary import RunSummary
from batchspec.runner.compute_all import ComputeAll
from batchspec.runner.conclude import conclude
from batchspec.runner.kv_scales import keep_scales, with_saved_scales
from batchspec.runner.new_extension import advice, check_added_columns, new_extension, with_layout
from batchspec.runner.new_retry import MAY_DIFFER, new_retry, retry_advice
from batchspec.runner.oom_fallback import EngineWithFallback, MakeEngine
from batchspec.runner.retry_plan import RetryPlan
from batchspec.runner.run_shards import ShardRunner, check_errors
from batchspec.runner.shard_work import ShardWork
from batchspec.runner.shard_workers import ShardWorkers
from batchspec.runner.weight_sums import keep_sums, with_kept_sums
from batchspec.runstate.extensions import MAY_DIFFER as EXTENDED
from batchspec.runstate.extensions import Extension
from batchspec.runstate.generations import Change, Generation
from batchspec.runstate.heartbeats import HeartbeatWriter
from batchspec.runstate.journal import Journaled, saved_rows
from batchspec.runstate.output_folder import OutputFolder
from batchspec.supervise.signals import EndSignals
from batchspec.supervise.watchdog import Watchdog
from batchspec.text import counted

MOST_WORKERS = 4
"""Default number of processes that admit rows and make tables: enough for about 6,000 short chats a second."""


def run_job(
    config: RunConfig, source: Source | None = None, *, group: Group | None = None, watchdog: Watchdog | None = None
) -> None:
    """Run a job to its end, or continue it where an earlier run of the same command stopped.

    source    replaces the dataset at input.path
    group     the processes that compute the target together; this one leads them
    watchdog  watches this process; None: nothing ends a run that hangs
    """
    with EndSignals() as signals:
        _run(config, source, group, watchdog or Watchdog(0.0), signals)


def _run(
    config: RunConfig, source: Source | None, group: Group | None, watchdog: Watchdog, signals: EndSignals
) -> None:  # fmt: skip
    watchdog.begin_loading()
    start_up = StartUp()
    start_up.done("imports and configuration")
    check_push_key(config.output)
    job = open_job(config, source, group=group, is_new=is_new(config))
    output = check_output(job)
    check_answers_file(config, is_new=output.begins_job(config.output.overwrite))
    check_target(job)
    start_up.done("checks")
    change = new_retry(job, output) or new_extension(job, output)
    job = with_layout(job, output, change)
    if isinstance(change, Extension) and change.num_rows == output.manifest.num_rows:
        output.extend(change)  # another input.limit for the same rows, say: nothing is to be computed for it
        change = None
    resumes = not output.begins_job(config.output.overwrite)
    finished = output.finished() if resumes else set()
    complete = change is None and resumes and len(finished) == output.num_shards
    if complete:
        say(f"{output.path}: already complete: {size_of(job, output)}{nothing_to_retry(config)}")
    else:
        try:
            compute(job, output, finished, signals, change=change, start_up=start_up, watchdog=watchdog)
        except TooManyErrors:
            if output.missing():
                raise  # if it came after the last shard, the job is complete: write card and report first
        if others := output.missing():
            say(f"{output.path}: this run's part is done; other runs work on {len(others)} of {output.num_shards} shards")
            return
        if output.is_extended():
            output = OutputFolder(output.path)
            if output.missing():
                say(f"{output.path}: this run's rows are done; another command added rows since, and its runs go on with them")
                return
            job = replace(job, layout=output.manifest.layout)  # those runs have ended: this one writes the card of all rows
        say(f"{output.path}: done, {size_of(job, output)}")
    watchdog.close()
    conclude(job, output, signals, again=not complete)


def is_new(config: RunConfig) -> bool:
    """As `OutputFolder.begins_job`, for the output folder of this configuration, if it has one."""
    return config.output.dir is None or OutputFolder(config.output.dir).begins_job(config.output.overwrite)


def nothing_to_retry(config: RunConfig) -> str:
    """The end of the message about a complete job if resume.retry asks for a retry that was done before, or that no row needs, or
    resume.extend for rows that there are not.
    """
    if config.resume.retry == "length":
        cap = config.decode.max_new_tokens
        return f"; nothing left for resume=length decode.max_new_tokens={cap}: a row that is still cut off there needs more"
    if config.resume.extend:
        return "; the input has no row to add"
    return "" if config.resume.retry == "none" else f"; nothing left for resume={config.resume.retry}"


def compute(
    job: Job, output: OutputFolder, finished: set[int], signals: EndSignals, make: MakeEngine = make_engine,
    change: Change | None = None, start_up: StartUp | None = None, watchdog: Watchdog | None = None,
) -> None:  # fmt: skip
    """Decode and commit every shard that is not `finished` and that no other run works on; print and log the speed.

    signals   of this process; the rows are saved when one asks the run to end
    make      makes the engine; called when every check has passed
    change    the retry or extension that this run begins; of a retry, only its shards are computed
    start_up  the phases of the run so far
    watchdog  as for `run_job`
    Raises what `ShardRunner.run` raises.
    """
    with HeartbeatWriter(output.heartbeats()) as heartbeat:
        if not output.begins_job(job.config.output.overwrite):
            heartbeat.begin()  # a run that ends while it loads is told of too
        _compute(job, output, finished, signals, make, change, start_up or StartUp(), watchdog or Watchdog(0.0), heartbeat)


def _compute(
    job: Job, output: OutputFolder, finished: set[int], signals: EndSignals, make: MakeEngine, change: Change | None,
    start_up: StartUp, watchdog: Watchdog, heartbeat: HeartbeatWriter,
) -> None:  # fmt: skip
    began = time.perf_counter()
    seen = survey_first(job)
    start_up.done("survey")
    surveyed_s = start_up.reached_s
    retry = change if isinstance(change, Generation) else None
    if retry is not None:
        finished = finished - set(retry.shards)
    new_job = output.begins_job(job.config.output.overwrite)
    is_retry = retry is not None or (not new_job and bool(output.to_retry()))
    num_errors = job_stats(output.path).error_rows if finished and not is_retry else 0
    check_errors(job, num_errors)
    if not new_job:
        job = with_saved_scales(job, output)
    job = with_kept_sums(job, output, new_job=new_job)
    journaled = Journaled() if new_job or retry is not None else output.journal().read(finished)
    with progress_bar(job, seen, finished, journaled, start_up) as progress, closing(shard_work(job, output.attempt)) as work:
        holder = EngineWithFallback(job, seen, progress, make)
        start_up.done("engine")
        start_up_s = start_up.reached_s - surveyed_s
        create_output(job, output, change)  # no check can refuse the job from here on
        keep_scales(job, output, holder)
        keep_sums(job, output, holder, progress, has_rows=bool(finished or journaled.num_rows or is_retry))
        plan = work_plan(job, output, is_retry=is_retry)
        if is_retry:
            progress.phase(f"{len(output.missing())} of {output.num_shards} shards are written anew; the other rows stay")
        elif finished or journaled.num_rows:
            shards = f"{len(finished)} of {output.num_shards} shards are committed already"
            progress.phase(f"{shards}, {saved_rows(journaled)}; the rest is computed")
        heartbeat.begin(progress.facts, slots=holder.engine.batch.num_slots)
        ShardRunner(job, output, plan, work, holder, seen, progress, journaled, num_errors, watchdog, signals).run()
    seconds = time.perf_counter() - began - start_up_s
    report_speed(output, holder.engine.totals, start_up, seconds=seconds, start_up_s=start_up_s)


def shard_work(job: Job, attempt: str) -> ShardWork | ShardWorkers:
    """What admits rows and makes tables: input.num_workers processes, or this one."""
    work, num_workers = ShardWork.of(job, attempt), job.config.input.num_workers
    if num_workers is None:
        num_workers = 0 if job.device.type == "cpu" else min(MOST_WORKERS, len(os.sched_getaffinity(0)) // 2)
    return ShardWorkers(work, num_workers) if num_workers else work


def work_plan(job: Job, output: OutputFolder, *, is_retry: bool) -> ComputeAll | RetryPlan:
    """The plan of which rows of a shard are computed: all of them, or those of the present retry."""
    if is_retry and output.generation is not None:
        return RetryPlan(output, output.generation)
    return ComputeAll(output)


def report_speed(
    output: OutputFolder, totals: EngineTotals, start_up: StartUp, *, seconds: float, start_up_s: float
) -> None:  # fmt: skip
    """Print lines about the run that has ended and one about its start, and write them to the output folder's logs."""
    summary = RunSummary(
        seconds=seconds,
        start_up_s=start_up_s,
        tokens=totals.tokens,
        rounds=totals.rounds,
        row_rounds=totals.row_rounds,
        accepted=totals.accepted,
        preempted=totals.preempted,
        expert_correlation=totals.expert_correlation,
    )
    for line in summary.lines():
        say(line)
    if start_up.over:
        say(start_up.line())
    output.log_run({**summary.facts(), "start_up": start_up.facts()})


def size_of(job: Job, output: OutputFolder) -> str:
    """Rows and shards of a job that has begun."""
    return f"{counted(job.layout.num_rows, 'row')} in {counted(output.num_shards, 'shard')}"


def progress_bar(job: Job, seen: Survey, finished: set[int], journaled: Journaled, start_up: StartUp) -> ProgressBar:
    """A progress bar over the output rows of the whole job."""
    done = seen.num_outputs(job.layout.num_rows_of(finished)) + len(journaled.completions)
    return ProgressBar(seen.num_outputs(job.source.num_rows), done=done, start_up=start_up)


def say(line: str) -> None:
    terminal.say(line)


def check_output(job: Job) -> OutputFolder:
    """The output folder: absent, or that of this job. Writes nothing; raises OutputError when it holds another job."""
    config = job.config.output
    assert config.dir is not None
    output = OutputFolder(config.dir)
    check_added_columns(job, output)
    output.check(
        fingerprint=job_fingerprint(job),
        num_rows=job.source.num_rows,
        shard_rows=config.shard_rows,
        overwrite=config.overwrite,
        may_differ=EXTENDED if job.config.resume.extend else MAY_DIFFER[job.config.resume.retry],
        advice=lambda manifest: advice(job, manifest) or retry_advice(job, output),
    )
    return output


def check_target(job: Job) -> None:
    """Ask the hub whether the push at the end of the job would be refused, if there is one. Raises as `push_output`."""
    config = job.config.output
    if config.push_to_hub is None:
        return
    of_job = "" if config.dir is None else OutputFolder(config.dir).id_of_job(
        fingerprint=job_fingerprint(job), num_rows=job.source.num_rows, shard_rows=config.shard_rows, overwrite=config.overwrite
    )  # fmt: skip
    check_target_key(config, of_job)


def create_output(job: Job, output: OutputFolder, change: Change | None = None) -> None:
    """Make the folder and its manifest if they are missing; begin the retry or the extension."""
    if isinstance(change, Generation):
        output.retry(change)
    elif change is not None:
        output.extend(change)
    output.create(
        fingerprint=job_fingerprint(job),
        config=asdict(job.config),
        recorded=recorded_facts(job),
        num_rows=job.source.num_rows,
        shard_rows=job.config.output.shard_rows,
        files=job.source.files,
        overwrite=job.config.output.overwrite,
    )
