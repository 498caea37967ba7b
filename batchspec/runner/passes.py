"""One pass over shards of the input: rows through the engine, shards with all their completions out, tables of those."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import closing

import pyarrow as pa

from batchspec.dataset.reader import InputShard
from batchspec.dataset.writer import build_table
from batchspec.engine.engine import Engine
from batchspec.packing.feed import Feed
from batchspec.prepare import Job
from batchspec.records import Completion
from batchspec.runner.reporter import Reporter
from batchspec.runner.retries import Rebuild, carried
from batchspec.runstate.journal import Journal, Journaled
from batchspec.runstate.shards import OutputFolder

JOURNAL_S = 60.0
"""Seconds of finished rows that a killed run may lose."""


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
        slots=engine.batch.num_slots,
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


def tabled(
    job: Job, output: OutputFolder, decoded: Iterable[tuple[InputShard, list[Completion]]]
) -> Iterator[tuple[InputShard, list[Completion], pa.Table | None]]:
    """The same, each with the table of its new rows; None where a retry leaves all of them as they are."""
    for shard, completions in decoded:
        fresh = [completion for completion in completions if not carried(completion)]
        yield shard, fresh, shard_table(job, shard, fresh, output.attempt) if fresh else None


def commit(job: Job, output: OutputFolder, shard: InputShard, fresh: list[Completion], table: pa.Table | None) -> None:
    """One file a shard; in a retry it takes the place of the old one, and of the rows that stay.

    Raises InputError where the shard's input is not what was read any more.
    """
    job.source.check(shard.first_row, shard.first_row + shard.table.num_rows)
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
