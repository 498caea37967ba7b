"""Decodes shards: rows go through the engine; each shard is yielded after its last row."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import closing
from functools import partial

from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.journal import Journal, Journaled
from batchspec.engine.loop.engine import Engine
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.runner.run_monitor import RunMonitor
from batchspec.job.runner.shard_work import ShardWork
from batchspec.job.runner.shard_workers import ShardWorkers
from batchspec.job.supervise.nearby_shards import ReadShards
from batchspec.packing.feed import Feed
from batchspec.packing.work_plan import DecodedShard, PlanRows, all_rows

JOURNAL_S = 60.0
"""Seconds between two segments of the journal: a killed run loses at most the rows that finished in this time, and in the time
that the store takes to write a segment."""


def decode_shards(
    loaded: LoadedEngine[Engine],
    monitor: RunMonitor,
    work: ShardWork | ShardWorkers,
    *,
    rows: PlanRows = all_rows,
    journal: Journal | None = None,
    journaled: Journaled | None = None,
    claim: Callable[[ReadShards], Iterator[InputShard]] | None = None,
    skip: Container[int] = (),
) -> Iterator[DecodedShard]:
    """One pass over the input: yields every shard that is not in `skip`, as soon as its last row is done.

    work       admits the rows
    rows       what is done with each output row; default: all are decoded
    journal    gets every row as it finishes; the caller removes the rows of shards that are committed
    journaled  saved work of earlier runs on these shards
    claim      reads those of the shards that are this run's, in an order of its own; default: all, in order
    """
    job = loaded.job
    read: ReadShards = partial(job.source.shards, job.layout)
    coming = [index for index in range(job.layout.num_shards) if index not in skip]
    feed = Feed(
        read(skip) if claim is None else claim(read),
        work.admitted,
        rows=rows,
        predicted=job.admission.predicted,
        num_shards=len(coming),
        shard_rows=job.layout.most_rows(coming),
        slots=loaded.batch.num_slots,
        journaled=journaled,
        compiling=job.admission.compiling,
        once=job.config.output.dedup,
    )
    with closing(loaded.steps(monitor.requests_in_time(feed), on_round=monitor.after_round)) as steps:
        for step in steps:
            for completion in step:
                feed.add(completion)
                monitor.finished(completion)
                if journal is not None:
                    journal.add(completion)
            if journal is not None:
                journal.flush_every(JOURNAL_S)
            monitor.after_step()
            yield from map(monitor.count_shard, feed.complete())  # also after a step that only read shards without a good row
    monitor.ended()
