"""run_job: read -> admit -> plan -> decode -> write. The page to read first.

job = open_job(config)          every check; nothing is written before all have passed
output = open_output(job)       the output folder, new or resumed
for shard, completions in decode_job(job, ...):
    output.commit(...)          one file a shard, exactly once
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, replace

import pyarrow as pa

from batchspec import slurm
from batchspec.config import RunConfig
from batchspec.deadline import Deadline
from batchspec.decode.engine import Engine, EngineTotals
from batchspec.errors import Interrupted, TooManyErrors
from batchspec.fitted import FittedEngine, MakeEngine, Shortage
from batchspec.io.attempts import Attempts
from batchspec.io.claims import BEAT_S, Claims
from batchspec.io.commits import commit_beside
from batchspec.io.generations import Generation
from batchspec.io.journal import Journal, Journaled
from batchspec.io.progress import Beacon
from batchspec.io.reader import InputShard, Source
from batchspec.io.shards import OutputFolder
from batchspec.io.writer import build_table
from batchspec.packing.feed import Feed
from batchspec.prepare import Job, job_fingerprint, make_engine, open_job, recorded_facts, survey_first
from batchspec.rebuild import MAY_DIFFER, Rebuild, carried, new_retry
from batchspec.records import Completion, Request
from batchspec.report.card import dataset_card
from batchspec.report.page import NEEDS_EXTRA, can_draw, write_report
from batchspec.report.progress import Progress
from batchspec.report.stats import job_stats
from batchspec.report.summary import RunSummary
from batchspec.report.timeline import Timeline
from batchspec.signals import Asked, ending
from batchspec.suspects import decode_suspects, leaving, unsuspected
from batchspec.watchdog import Watchdog

JOURNAL_S = 60.0
"""Seconds of finished rows that a killed run may lose."""


def run_job(config: RunConfig, source: Source | None = None) -> None:
    """Run a job to its end, or go on with it where an earlier run of the same command stopped.

    `source` replaces the dataset at input.path.
    """
    job = open_job(config, source)
    output = check_output(job)
    retry = new_retry(job, output)
    finished = output.finished() if output.is_job() and not config.output.overwrite else set()
    complete = retry is None and output.is_job() and len(finished) == output.num_shards
    if complete:
        nothing = "" if config.resume.retry == "none" else f"; nothing left for resume.retry={config.resume.retry}"
        say(f"{output.path}: already complete: {job.source.num_rows} rows in {output.num_shards} shards{nothing}")
    else:
        compute(job, output, finished, retry=retry)
        if others := output.missing():
            say(f"{output.path}: this run's part is done; other runs work on {len(others)} of {output.num_shards} shards")
            return
        say(f"{output.path}: done, {job.source.num_rows} rows in {output.num_shards} shards")
    stats = job_stats(output.path)
    if not (complete and output.has_card()):  # a run may have died between the last commit and the card
        output.journal().delete()
        output.claims().delete()
        output.attempts().delete()
        output.finish(dataset_card(output.manifest, stats))
        if can_draw():
            write_report(output, stats=stats)
            say(f"{output.path}/report.html: the job in pictures")
        else:
            say(NEEDS_EXTRA.format(out=output.path))
    check_errors(job, stats.by_status.get("error", 0))
    say(f"look at it:  batchspec stats {output.path}")
    say(f"             python -c \"import polars; print(polars.read_parquet('{output.path}/data'))\"")


def compute(
    job: Job, output: OutputFolder, finished: set[int], make: MakeEngine = make_engine, retry: Generation | None = None
) -> None:
    """Decode and commit every shard that is not `finished` and that no other run works on, and say how fast.

    `make` is called when every check has passed. `retry` begins then, and its shards alone are computed.
    Raises Interrupted at a signal that asks for the end: finished rows and the tokens of the others are in the journal then.
    """
    began = time.perf_counter()
    seen = survey_first(job)
    first_time = not output.is_job() or job.config.output.overwrite
    if retry is not None:
        finished = finished - set(retry.shards)
    done_rows, num_tokens = len(finished) * job.shard_rows, 0
    again = retry is not None or (not first_time and output.generation is not None)
    num_errors = job_stats(output.path).by_status.get("error", 0) if finished and not again else 0
    check_errors(job, num_errors)
    journaled = Journaled() if first_time or retry is not None else output.journal().read(finished)
    done = seen.num_outputs(done_rows) + len(journaled.completions)
    with Progress(seen.num_outputs(job.source.num_rows), done=done) as progress:
        loading = time.perf_counter()
        fitted = FittedEngine(job, seen, progress, make)
        start_up_s = time.perf_counter() - loading
        create_output(job, output, retry)  # nothing can be refused from here on
        if again:
            progress.phase(f"{len(output.missing())} of {output.num_shards} shards are written anew; the other rows stay")
            job = rebuilding(job, output)
        elif finished:
            progress.phase(f"{len(finished)} of {output.num_shards} shards are committed already; the rest is computed")
        claims, attempts, journal = output.claims(), output.attempts(), output.journal()
        watchdog = Watchdog(watchdog_s(job), journal.flush)
        deadline = job_deadline(job, fitted.stop)
        slots = fitted.engine.batch.slots
        with (
            Beacon(output.progress(), progress.facts, slots=slots),
            closing(Timeline(output.log_timeline, slots=slots)) as timeline,
            ending(fitted.stop) as asked,
            leaving(claims, attempts),
            watchdog.watching(),
        ):
            try:
                while (others := unclaimed(output, claims, asked)) is not None:
                    reporter = Reporter(
                        progress, seen.mean_output, fitted.engine.totals, timeline, claims, watchdog.beat, deadline
                    )
                    decoded = decode_claimed(job, fitted.engine, reporter, journal, journaled, claims, attempts, others)
                    commits = commit_beside(tabled(job, output, decoded), lambda done: commit(job, output, *done))
                    with Shortage() as short, closing(commits):
                        for shard, completions, _ in commits:
                            journal.forget(shard.index)
                            claims.forget(shard.index)
                            watchdog.beat()
                            num_tokens += sum(len(done.token_ids) for done in completions if done.token_ids is not None)
                            bad = sum(completion.status == "error" for completion in completions)
                            num_errors += bad
                            progress.update(shards=1, errors=bad)
                            check_errors(job, num_errors)
                    watchdog.pause()
                    if deadline.reached and not asked.name:
                        asked.name = "time limit"
                    if short.said:
                        journal.flush(fitted.engine.unfinished())
                        fitted.shrink(short.said)
                        journaled = journal.read(output.finished())
            except KeyboardInterrupt:  # the second one: the engine's rows are as they are
                saved = journal.flush()
            else:
                saved = journal.flush(fitted.engine.unfinished()) if asked.name else 0
            if asked.name is not None and output.missing():
                count = f"{len(output.finished())} of {output.num_shards} shards are committed, {saved} more rows are saved"
                raise Interrupted(f"{asked.name}: {count}; run the same command again to go on")
    totals = fitted.engine.totals
    summary = RunSummary(
        seconds=time.perf_counter() - began - start_up_s,
        start_up_s=start_up_s,
        tokens=num_tokens,
        rounds=totals.rounds,
        row_rounds=totals.row_rounds,
        accepted=totals.accepted,
        set_back=totals.set_back,
    )
    say(summary.line())
    output.log_run(summary.facts())


def job_deadline(job: Job, stop: Callable[[], None]) -> Deadline:
    """When Slurm ends this job; never where there is no Slurm."""
    task, config = slurm.this_task(), job.config
    return Deadline(
        lambda: None if task is None else slurm.time_left_s(task),
        config.cluster.signal_s,
        keeps_tokens=config.output.logprobs is None,
        stop=stop,
    )


def unclaimed(output: OutputFolder, claims: Claims, asked: Asked) -> set[int] | None:
    """Shards that a pass over the input leaves out; None where the run is over.

    With nothing left but shards of other runs it waits as long as it takes to tell whether those still live: the shards of one
    that died are taken up, the others are left to their runs.
    """
    waited_from = time.monotonic()
    while not asked.name and (missing := output.missing()):
        held = claims.held(missing)
        if missing - held:
            return held | set(range(output.num_shards)) - missing
        if time.monotonic() - waited_from > claims.stale_s + BEAT_S:
            return None
        time.sleep(1.0)
    return None


def watchdog_s(job: Job) -> float:
    """Seconds without a round after which the run counts as hung; 0 is never."""
    own = job.config.cluster.watchdog_s
    return own if own is not None else 600.0 if job.device.type == "cuda" else 3600.0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


def decode_claimed(
    job: Job,
    engine: Engine,
    reporter: Reporter,
    journal: Journal,
    journaled: Journaled,
    claims: Claims,
    attempts: Attempts,
    others: set[int],
) -> Iterator[tuple[InputShard, list[Completion]]]:
    """One pass over the shards that are neither done nor another run's (`others`); those that a run died with come last."""

    def mine(shards: Iterator[InputShard]) -> Iterator[InputShard]:
        for shard in unsuspected(reporter.deadline.shards(shards), claims, attempts):
            if claims.inherited:
                claims.inherited = False
                journal.refresh(journaled)
            yield shard

    yield from decode_job(job, engine, reporter, journal, journaled, take=mine, skip=others | attempts.suspected())
    suspects = attempts.suspected() - others
    if suspects and not engine.stopping:
        say(f"{len(suspects)} shards were in work when a run died: their rows are computed apart")
        shards = job.source.shards(job.shard_rows, set(range(-(-job.source.num_rows // job.shard_rows))) - suspects)
        taken = (shard for shard in reporter.deadline.shards(shards) if claims.take(shard.index))
        decoded = decode_suspects(job, engine, taken, attempts, journal, journaled, finished=reporter.finished)
        yield from map(reporter.admitted, decoded)


def decode_job(
    job: Job,
    engine: Engine,
    reporter: Reporter,
    journal: Journal | None = None,
    journaled: Journaled | None = None,
    *,
    take: Callable[[Iterator[InputShard]], Iterator[InputShard]] = iter,
    skip: Container[int] = (),
) -> Iterator[tuple[InputShard, list[Completion]]]:
    """Every shard that is not in `skip` with its completions, as soon as its last row is done.

    journal    gets every row as it ends; the caller says which shards are committed
    journaled  what earlier runs did of these shards
    take       leaves out shards as they are read: what another run has
    """
    num_shards = sum(index not in skip for index in range(-(-job.source.num_rows // job.shard_rows)))
    feed = Feed(
        take(job.source.shards(job.shard_rows, skip)),
        job.admission,
        num_shards=num_shards,
        shard_rows=job.shard_rows,
        slots=engine.batch.slots,
        journaled=journaled,
    )
    engine.on_round = reporter
    with closing(engine.run(reporter.watch(feed))) as completions:
        for completion in completions:
            job.admission.observe(completion)
            feed.add(completion)
            reporter.finished(completion)
            if journal is not None:
                journal.add(completion)
                journal.flush_every(JOURNAL_S)
            yield from map(reporter.admitted, feed.complete())
    yield from map(reporter.admitted, feed.complete())  # shards without one good row


class Reporter:
    """Hands the engine's running totals to the time line, and to the progress bar as what happened since the last call.

    The tokens still to come are the rows still to come at their mean output: at first the predicted one, which weighs as
    much as 8 finished rows.
    """

    def __init__(
        self,
        progress: Progress,
        predicted_output: float,
        totals: EngineTotals,
        timeline: Timeline | None = None,
        claims: Claims | None = None,
        beat: Callable[[], None] = lambda: None,
        deadline: Deadline | None = None,
    ) -> None:
        """`totals` are the engine's so far; `beat` is called whenever the run goes on; `deadline` is asked before every row."""
        self.deadline = deadline or Deadline(lambda: None, 0.0, keeps_tokens=True)
        self._progress, self._timeline, self._begun = progress, timeline, totals.tokens
        self._before = totals.tokens, totals.accepted, totals.row_rounds
        self._claims, self._beat = claims, beat
        self._rows, self._tokens, self._finished = 8, 8 * predicted_output, 0
        self._feed: Feed | None = None
        self.exhausted = False

    def watch(self, feed: Feed) -> Iterator[Request]:
        """The feed's requests; `exhausted` once there are no more."""
        self._feed = feed
        for request in self.deadline.requests(feed.requests()):
            self._beat()
            yield request
        self.exhausted = True

    def admitted(self, done: tuple[InputShard, list[Completion]]) -> tuple[InputShard, list[Completion]]:
        """The same shard; its bad rows, which no engine saw, are done."""
        bad = sum(completion.stats is None for completion in done[1])
        self._progress.update(completions=bad, open_shards=self._open_shards)
        return done

    @property
    def _open_shards(self) -> list[tuple[int, int]]:
        return self._feed.open_shards if self._feed is not None else []

    def finished(self, completion: Completion) -> None:
        count = 0 if completion.token_ids is None else len(completion.token_ids)
        self._rows, self._tokens, self._finished = self._rows + 1, self._tokens + count, self._finished + count
        self._progress.update(completions=1)
        self.deadline.observe(completion)

    def __call__(self, totals: EngineTotals) -> None:
        tokens, accepted, row_rounds = self._before
        self._progress.update(
            tokens=totals.tokens - tokens,
            accepted=totals.accepted - accepted,
            rounds=totals.row_rounds - row_rounds,
            live_rows=totals.live_rows,
            open_shards=self._open_shards,
            mean_output=self._tokens / self._rows,
            in_flight_tokens=max(0, totals.tokens - self._begun - self._finished),
        )
        self._beat()
        self.deadline.check()
        if self._claims is not None:
            self._claims.beat()
        if self._timeline is not None:
            self._timeline.observe(totals, exhausted=self.exhausted)
        self._before = totals.tokens, totals.accepted, totals.row_rounds


def check_errors(job: Job, num_errors: int) -> None:
    """Raises TooManyErrors when more rows than input.max_error_fraction turned out bad."""
    fraction, rows = job.config.input.max_error_fraction, job.source.num_rows
    if num_errors > fraction * rows + 1e-9:  # 0.29 * 100 is a little less than 29
        raise TooManyErrors(
            f"{num_errors} of {rows} rows are error rows, more than input.max_error_fraction={fraction:g} allows; "
            "look at the `error` column of the output, then mend the input or raise the fraction"
        )


def tabled(
    job: Job, output: OutputFolder, decoded: Iterable[tuple[InputShard, list[Completion]]]
) -> Iterator[tuple[InputShard, list[Completion], pa.Table | None]]:
    """The same, each with the table of its new rows; None where a retry leaves all of them as they are."""
    for shard, completions in decoded:
        fresh = [completion for completion in completions if not carried(completion)]
        yield shard, fresh, shard_table(job, shard, fresh, output.attempt) if fresh else None


def rebuilding(job: Job, output: OutputFolder) -> Job:
    """The same job, whose admission lets only rows through that the output's latest retry is about."""
    return job if output.generation is None else replace(job, admission=Rebuild(job, output, output.generation))


def commit(job: Job, output: OutputFolder, shard: InputShard, fresh: list[Completion], table: pa.Table | None) -> None:
    """One file a shard; in a retry it takes the place of the old one, and of the rows that stay."""
    if isinstance(job.admission, Rebuild):
        job.admission.commit(shard, fresh, table)
    elif table is not None:
        output.commit(shard.index, table)


def shard_table(job: Job, shard: InputShard, completions: list[Completion], attempt: str) -> pa.Table:
    think = job.admission.think
    return build_table(
        shard,
        completions,
        columns=job.columns,
        input=job.config.input,
        output=job.config.output,
        attempt=attempt,
        think_tokens=(think.begin, think.end) if think else ("", ""),
    )
