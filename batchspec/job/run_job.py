"""run_job: read -> admit -> plan -> decode -> write. The module to read first.

read    open_job            every check of input and model; nothing is written before all pass   prepare.py
        checked_run         what the output folder holds of this job, and what this run does     runner/checked_run.py
admit   survey_first        the first rows become requests; the others do while rows are decoded prepare.py
plan    heartbeat.begin     the first file in the output folder                                  data/runstate/heartbeat_writer.py
        run.job_to_load     the job with what earlier runs kept: K/V scales, sums of the weights runner/job_run.py
        drafting_of         no drafts in a job that is too short for them                        load/short_jobs.py
        interlude_of        with the head that the job, or an earlier one, trained for its model runner/head/own_head.py
        EngineWithFallback  a `LoadedEngine`, and a smaller one once memory runs out             runner/oom_fallback.py
        run.begin           the manifest: from here on the folder is a job                       runner/job_run.py
decode  ShardRunner.run     claim shards, admit and decode their rows, commit each shard once    runner/run_shards.py
write   conclude            the card and the report, once no shard is missing; the push to a hub runner/conclude.py
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing

from batchspec.config.schema import RunConfig
from batchspec.console import terminal
from batchspec.data.dataset.job_rows import JobRows
from batchspec.data.dataset.reader import Source
from batchspec.data.runstate.heartbeat_writer import HeartbeatWriter
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.distributed.group import Group
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import TooManyErrors
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.load.memory import check_memory
from batchspec.job.load.short_jobs import drafting_of
from batchspec.job.prepare import open_job, survey_first
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.report.push import check_push_key
from batchspec.job.report.start_up import StartUp
from batchspec.job.report.summary import RunSummary
from batchspec.job.runner.checked_run import checked_run
from batchspec.job.runner.conclude import conclude
from batchspec.job.runner.head.own_head import interlude_of
from batchspec.job.runner.interlude import Interlude
from batchspec.job.runner.job_run import FoundRun
from batchspec.job.runner.oom_fallback import EngineWithFallback, LoadEngine
from batchspec.job.runner.run_shards import ShardRunner
from batchspec.job.runner.shard_workers import workers_of
from batchspec.job.supervise.watchdog import Watchdog
from batchspec.process.signals import EndSignals


def run_job(
    config: RunConfig, source: Source | JobRows | None = None, *, group: Group | None = None, watchdog: Watchdog | None = None,
    heartbeat: HeartbeatWriter | None = None,
) -> None:
    """Run a job to its end, or continue it where an earlier run of the same command stopped.

    source     replaces the dataset at input.path, or of input.from_job
    group      the processes that compute the target together; this one leads them
    watchdog   watches this process; None: nothing ends a run that hangs
    heartbeat  of this run since its start; None: it begins after the checks
    """
    with EndSignals() as signals:
        _run(config, source, group, watchdog or Watchdog(0.0), signals, heartbeat)


def _run(
    config: RunConfig, source: Source | JobRows | None, group: Group | None, watchdog: Watchdog, signals: EndSignals,
    heartbeat: HeartbeatWriter | None,
) -> None:
    watchdog.begin_loading()
    signals.interrupt("while the job was checked")
    start_up = StartUp()
    start_up.done("imports and configuration")
    check_push_key(config.output)
    run = checked_run(open_job(config, source, group=group), None if heartbeat is None else heartbeat.attempt)
    start_up.done("checks")
    if run.found_complete:
        run.begin_change()
    else:
        decode_missing(run, signals, start_up=start_up, watchdog=watchdog, heartbeat=heartbeat)
    end = run.end()
    terminal.say(f"{end.folder.path}: {end.outcome()}")
    if not end.left:
        watchdog.close()
        conclude(end.job, end.folder, signals, again=not end.was_complete)


def decode_missing(
    run: FoundRun, signals: EndSignals, load: LoadEngine = LoadedEngine.load, start_up: StartUp | None = None,
    watchdog: Watchdog | None = None, heartbeat: HeartbeatWriter | None = None,
) -> None:
    """Admit, plan and decode: commit every shard that is not finished and that no other run works on; print and log the speed.

    run        has rows to decode
    signals    of this process; the rows are saved when one asks the run to end
    load       loads the engine; called when every check has passed
    start_up   the phases of the run so far
    watchdog   watches this process; None: nothing ends a run that hangs
    heartbeat  of this run since its start; None: it begins here
    Raises what `ShardRunner.run` raises; TooManyErrors only if shards are missing.
    """
    start_up = start_up or StartUp()
    check_memory(run.job)  # before the first file is written
    with heartbeat or HeartbeatWriter(run.folder.heartbeats()) as heartbeat, signals.as_interrupted():
        heartbeat.begin()  # so that `status` knows of a run that ends while it loads
        began = time.perf_counter()
        survey = survey_first(run.job, run.finished)
        start_up.done("survey")
        surveyed_s = start_up.reached_s
        job = drafting_of(run.job_to_load(), survey)
        expected, done = survey.num_outputs(job.source.num_rows), run.num_done(survey)
        with (
            ProgressBar(expected, done=done, start_up=start_up) as progress,
            closing(workers_of(job, run.folder.attempt)) as work,
        ):
            signals.interrupt("while the model was loaded")
            interlude = interlude_of(job, survey, progress, run.saved, run.folder.heartbeats())
            engines = EngineWithFallback(interlude.as_now(job), survey, progress, load, interlude.without)
            start_up.done("engine")
            start_up_s = start_up.reached_s - surveyed_s
            begun = run.begin(interlude.as_now(job), engines, progress)
            heartbeat.begin(progress.facts, slots=engines.current.batch.num_slots)
            try:
                ShardRunner(begun, work, engines, survey, progress, watchdog or Watchdog(0.0), signals, interlude).run()
            except TooManyErrors:
                if run.folder.missing():
                    raise  # otherwise the job is complete: `conclude` writes card and report, and raises it again
        seconds = time.perf_counter() - began - start_up_s - interlude.idle_s
        engine = engines.current
        report_speed(
            run.folder, engine.totals, start_up, seconds=seconds, start_up_s=start_up_s,
            drafter=engines.loaded.job.config.draft.name, counts=job.admission.task.counts, calibration=engine.calibration(),
            interlude=interlude,
        )


def report_speed(
    folder: OutputFolder, totals: EngineTotals, start_up: StartUp, *, seconds: float, start_up_s: float, drafter: str,
    counts: str, calibration: Mapping[int, tuple[int, int, float]], interlude: Interlude,
) -> None:
    """Print lines about the run that has ended and one about its start, and write them to the output folder's logs."""
    summary = RunSummary(
        began_at=time.time() - seconds,
        seconds=round(seconds, 3),
        start_up_s=start_up_s,
        tokens=totals.tokens,
        counts=counts,
        rounds=totals.rounds,
        row_rounds=totals.row_rounds,
        accepted=totals.accepted,
        preempted=totals.preempted,
        expert_correlation=totals.expert_correlation,
        drafter=drafter,
        calibration=calibration,
    )
    for line in (*summary.lines(), interlude.line()):
        if line:
            terminal.say(line)
    if start_up.over:
        terminal.say(start_up.line())
    folder.log_run({**summary.facts(), "start_up": start_up.facts(), **interlude.facts()})
