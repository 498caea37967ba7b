"""run_job: read -> admit -> plan -> decode -> write. The page to read first.

job = open_job(config)          every check; nothing is written before all have passed
output = open_output(job)       the output folder, new or resumed
for shard, completions in decode_job(job, ...):
    output.commit(...)          one file a shard, exactly once
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import closing
from dataclasses import asdict, replace

import pyarrow as pa

from batchspec.config import RunConfig
from batchspec.decode.engine import Engine, EngineTotals
from batchspec.errors import Interrupted, TooManyErrors
from batchspec.io.claims import BEAT_S, STALE_S, Claims
from batchspec.io.journal import Journal, Journaled
from batchspec.io.reader import InputShard, Source
from batchspec.io.shards import OutputFolder
from batchspec.io.writer import build_table
from batchspec.packing.feed import Feed
from batchspec.packing.survey import Survey
from batchspec.prepare import Job, job_fingerprint, make_engine, open_job, recorded_facts, survey_first
from batchspec.records import Completion, Request
from batchspec.report.card import dataset_card
from batchspec.report.page import NEEDS_EXTRA, can_draw, write_report
from batchspec.report.progress import Progress
from batchspec.report.stats import job_stats
from batchspec.report.summary import RunSummary
from batchspec.report.timeline import Timeline
from batchspec.signals import Asked, ending

JOURNAL_S = 60.0
"""Seconds of finished rows that a killed run may lose."""


def run_job(config: RunConfig, source: Source | None = None) -> None:
    """Run a job to its end, or go on with it where an earlier run of the same command stopped.

    `source` replaces the dataset at input.path.
    """
    job = open_job(config, source)
    output = check_output(job)
    committed = output.committed() if output.is_job() and not config.output.overwrite else set()
    complete = output.is_job() and len(committed) == output.num_shards
    if complete:
        say(f"{output.path}: already complete: {job.source.num_rows} rows in {output.num_shards} shards")
    else:
        compute(job, output, committed)
        if others := output.missing():
            say(f"{output.path}: this run's part is done; other runs work on {len(others)} of {output.num_shards} shards")
            return
        say(f"{output.path}: done, {job.source.num_rows} rows in {output.num_shards} shards")
    stats = job_stats(output.path)
    if not (complete and output.has_card()):  # a run may have died between the last commit and the card
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
    job: Job, output: OutputFolder, committed: set[int], make: Callable[[Job, Survey, Progress], Engine] = make_engine
) -> None:
    """Decode and commit every shard that is not committed yet and that no other run works on, and say how fast.

    `make` is called when every check has passed.
    Raises Interrupted at a signal that asks for the end: finished rows and the tokens of the others are in the journal then.
    """
    began = time.perf_counter()
    seen = survey_first(job)
    done_rows, num_tokens = len(committed) * job.shard_rows, 0
    num_errors = job_stats(output.path).by_status.get("error", 0) if committed else 0
    check_errors(job, num_errors)
    journal = output.journal()
    journaled = journal.read(committed) if output.is_job() and not job.config.output.overwrite else Journaled()
    done = seen.num_outputs(done_rows) + len(journaled.completions)
    with Progress(seen.num_outputs(job.source.num_rows), done=done) as progress:
        loading = time.perf_counter()
        engine = make(job, seen, progress)
        start_up_s = time.perf_counter() - loading
        create_output(job, output)  # nothing can be refused from here on
        if committed:
            progress.phase(f"{len(committed)} of {output.num_shards} shards are committed already; the rest is computed")
        claims = output.claims()
        with closing(Timeline(output.log_timeline, slots=engine.batch.slots)) as timeline, ending(engine.stop) as asked:
            try:
                while (others := unclaimed(output, claims, asked)) is not None:
                    decoded = decode_job(
                        job, engine, seen, progress, journal, journaled, timeline=timeline, claims=claims, skip=others
                    )
                    for shard, completions in decoded:
                        output.commit(shard.index, shard_table(job, shard, completions, output.attempt))
                        journal.forget(shard.index)
                        claims.forget(shard.index)
                        num_tokens += sum(len(done.token_ids) for done in completions if done.token_ids is not None)
                        num_errors += sum(completion.status == "error" for completion in completions)
                        check_errors(job, num_errors)
            except KeyboardInterrupt:  # the second one: the engine's rows are as they are
                saved = journal.flush()
            else:
                saved = journal.flush(engine.unfinished()) if asked.name else 0
        if asked.name is not None and output.missing():
            count = f"{len(output.committed())} of {output.num_shards} shards are committed, {saved} more rows are saved"
            raise Interrupted(f"{asked.name}: {count}; run the same command again to go on")
    if not output.missing():
        journal.delete()
        claims.delete()
    totals = engine.totals
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


def unclaimed(output: OutputFolder, claims: Claims, asked: Asked) -> set[int] | None:
    """Shards that a pass over the input leaves out; None where the run is over.

    With nothing left but shards of other runs it waits as long as it takes to tell whether those still live: the shards of one
    that died are taken up, the others are left to their runs.
    """
    waited_from = time.monotonic()
    while not asked.name and (missing := output.missing()):
        held = claims.held()
        if missing - held:
            return held | set(range(output.num_shards)) - missing
        if time.monotonic() - waited_from > STALE_S + BEAT_S:
            return None
        time.sleep(1.0)
    return None


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_output(job: Job) -> OutputFolder:
    """The output folder: not there yet, or that of the job being resumed. Raises OutputError for another job's; makes nothing."""
    config = job.config.output
    assert config.dir is not None
    output = OutputFolder(config.dir)
    rows = job.source.num_rows
    output.check(fingerprint=job_fingerprint(job), num_rows=rows, shard_rows=config.shard_rows, overwrite=config.overwrite)
    return output


def create_output(job: Job, output: OutputFolder) -> None:
    """Make the folder and its manifest where they are not there."""
    output.create(
        fingerprint=job_fingerprint(job),
        config=asdict(job.config),
        recorded=recorded_facts(job),
        num_rows=job.source.num_rows,
        shard_rows=job.config.output.shard_rows,
        files=job.source.files,
        overwrite=job.config.output.overwrite,
    )


def decode_job(
    job: Job,
    engine: Engine,
    seen: Survey,
    progress: Progress,
    journal: Journal | None = None,
    journaled: Journaled | None = None,
    *,
    timeline: Timeline | None = None,
    claims: Claims | None = None,
    skip: Container[int] = (),
) -> Iterator[tuple[InputShard, list[Completion]]]:
    """Every shard that is not in `skip` with its completions, as soon as its last row is done.

    journal    gets every row as it ends; the caller says which shards are committed
    journaled  what earlier runs did of these shards
    timeline   samples the engine's totals
    claims     asked for every shard as it is read: what another run has is left to it
    """
    num_shards = sum(index not in skip for index in range(-(-job.source.num_rows // job.shard_rows)))
    shards = job.source.shards(job.shard_rows, skip)
    feed = Feed(
        shards if claims is None else (shard for shard in shards if claims.take(shard.index)),
        job.admission,
        num_shards=num_shards,
        shard_rows=job.shard_rows,
        slots=engine.batch.slots,
        journaled=journaled,
    )
    reporter = Reporter(progress, seen.mean_output, timeline, claims)
    engine.on_round = reporter

    def complete() -> Iterator[tuple[InputShard, list[Completion]]]:
        for shard, completions in feed.complete():
            progress.update(completions=sum(completion.stats is None for completion in completions))
            yield shard, completions

    with closing(engine.run(reporter.watch(feed.requests()))) as completions:
        for completion in completions:
            job.admission.observe(completion)
            feed.add(completion)
            reporter.finished(completion)
            if journal is not None:
                journal.add(completion)
                journal.flush_every(JOURNAL_S)
            yield from complete()
    yield from complete()  # shards without one good row


class Reporter:
    """Hands the engine's running totals to the time line, and to the progress bar as what happened since the last call.

    The tokens still to come are the rows still to come at their mean output: at first the predicted one, which weighs as
    much as 8 finished rows.
    """

    def __init__(
        self, progress: Progress, predicted_output: float, timeline: Timeline | None = None, claims: Claims | None = None
    ) -> None:
        self._progress, self._timeline, self._before = progress, timeline, EngineTotals()
        self._claims = claims
        self._rows, self._tokens, self._finished = 8, 8 * predicted_output, 0
        self.exhausted = False

    def watch(self, requests: Iterator[Request]) -> Iterator[Request]:
        """The same requests; `exhausted` once there are no more."""
        yield from requests
        self.exhausted = True

    def finished(self, completion: Completion) -> None:
        count = 0 if completion.token_ids is None else len(completion.token_ids)
        self._rows, self._tokens, self._finished = self._rows + 1, self._tokens + count, self._finished + count
        self._progress.update(completions=1)

    def __call__(self, totals: EngineTotals) -> None:
        progress = self._progress
        left = (progress.total - progress.done) * self._tokens / self._rows
        in_flight = totals.tokens - self._finished
        progress.update(
            tokens=totals.tokens - self._before.tokens,
            accepted=totals.accepted - self._before.accepted,
            rounds=totals.row_rounds - self._before.row_rounds,
            live_rows=totals.live_rows,
            remaining_tokens=max(0, round(left - in_flight)),
        )
        if self._claims is not None:
            self._claims.beat()
        if self._timeline is not None:
            self._timeline.observe(totals, exhausted=self.exhausted)
        self._before = replace(totals)


def check_errors(job: Job, num_errors: int) -> None:
    """Raises TooManyErrors when more rows than input.max_error_fraction turned out bad."""
    fraction, rows = job.config.input.max_error_fraction, job.source.num_rows
    if num_errors > fraction * rows + 1e-9:  # 0.29 * 100 is a little less than 29
        raise TooManyErrors(
            f"{num_errors} of {rows} rows are error rows, more than input.max_error_fraction={fraction:g} allows; "
            "look at the `error` column of the output, then mend the input or raise the fraction"
        )


def shard_table(job: Job, shard: InputShard, completions: list[Completion], attempt: str) -> pa.Table:
    return build_table(shard, completions, columns=job.columns, input=job.config.input, output=job.config.output, attempt=attempt)
