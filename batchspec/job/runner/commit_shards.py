"""Commits decoded shards, each from its completions to its file in data/, while the next ones are decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc

from batchspec.data.runstate.output_folder import CheckInput, OutputFolder
from batchspec.job.runner.retry_plan import OldShard
from batchspec.job.runner.shard_work import ShardWork
from batchspec.job.runner.shard_workers import ShardWorkers
from batchspec.packing.work_plan import DecodedShard
from batchspec.records import Completion

WAITING, MOST_WAITING = 2, 32
"""Maximum number of shards that are being committed or wait for it, for large and for small shards; decoding waits at the limit.
The rows of several shards are ordered together (`packing/order.py`), so four or more shards end almost at the same time: with a
limit of two the engine would wait for commits."""
SMALL_BYTES = 100 << 20
"""Shards count as small while all uncommitted ones together take no more memory than this."""


class PendingCommit(ABC):
    """A decoded shard that is to be committed.

    The file of a new shard is written under a temporary name, fsynced and verified by reading it back: by a worker process as
    soon as one is free, without workers when its turn comes. Then the shard's input is checked to be still what was read, and
    the file gets its final name, once. A shard of a retry needs its old rows too: workers make only the table of the new rows;
    after the check this process merges both, writes and verifies the file, and replaces the old one if that has not changed
    meanwhile; without a new row the old file stays. If writing, verifying or the check fails, the temporary file is deleted, and
    the shard stays as it was: without a file, or in a retry with the old one. If publishing fails, the final name has what it
    had before or the whole new file, never a part of one. A kill may leave the temporary file, which a later run deletes. The
    next run takes the rows of a failed commit from the journal, or computes them again.
    """

    @abstractmethod
    def publish(self, check: CheckInput) -> None:
        """Publish the shard's file, once; nothing is published if another run was first.

        Raises what `check` raises; StorageError if writing fails; OutputError if the folder holds another job by now.
        """


class NewFile(PendingCommit):
    """The commit of a shard that has no rows in the output yet. A worker process begins to write its file at once."""

    def __init__(self, output: OutputFolder, work: ShardWork | ShardWorkers, done: DecodedShard) -> None:
        self._output, self._index = output, done.shard.index
        self._file = work.begin_file(done.shard, done.completions, output.unpublished(self._index))

    def publish(self, check: CheckInput) -> None:
        self._output.publish(self._index, self._file, check)


class MergedFile(PendingCommit):
    """The commit of a retry's shard: its new rows, and the old versions of all others. Without a new row the old file stays.

    A worker process begins to make the table of the new rows at once.
    """

    def __init__(self, output: OutputFolder, work: ShardWork | ShardWorkers, done: DecodedShard, old: OldShard) -> None:
        self._output, self._done, self._old = output, done, old
        self._new = work.begin_table(done.shard, done.completions) if done.completions else None

    def publish(self, check: CheckInput) -> None:
        done, new = self._done, None if self._new is None else self._new.make()
        check(done.shard.first_row, done.shard.first_row + done.shard.table.num_rows)
        table = None if new is None else merged(self._old.table, done.completions, new)
        self._output.recommit(done.shard.index, table, self._old.version)


class ShardCommitter:
    """Commits decoded shards in order."""

    def __init__(
        self,
        output: OutputFolder,
        work: ShardWork | ShardWorkers,
        take_old_shard: Callable[[DecodedShard], OldShard | None],
        check_input: CheckInput,
    ) -> None:
        """
        work            makes tables and files
        take_old_shard  gives the file that a retry merges with the new rows; None: the shard is new. Called once for each shard
        check_input     `Source.check`, which raises InputError
        """
        self._output, self._work = output, work
        self._take_old_shard, self._check_input = take_old_shard, check_input

    def commit(self, decoded: Iterable[DecodedShard]) -> Generator[DecodedShard]:
        """Yield every shard, in order, after its commit. A thread commits one at a time while the next ones are decoded:
        compressing, reading back and publishing one takes a second or more.

        What `check_input` raises, and what `OutputFolder.publish` raises, is raised here, after the last shard at the latest.
        However the generator is left, commits that have begun are complete then.
        """
        under_way: deque[tuple[DecodedShard, Future[None], float]] = deque()

        def first() -> DecodedShard:
            done, future, _ = under_way.popleft()
            future.result()
            return done

        def too_many() -> bool:
            are_small = sum(num_bytes for _, _, num_bytes in under_way) <= SMALL_BYTES
            return len(under_way) > (MOST_WAITING if are_small else WAITING)

        with ThreadPoolExecutor(1, thread_name_prefix="commit") as pool:
            for done in decoded:
                under_way.append((done, pool.submit(self._pending(done).publish, self._check_input), done.num_bytes))
                while too_many() or (under_way and under_way[0][1].done()):
                    yield first()
            while under_way:
                yield first()

    def _pending(self, done: DecodedShard) -> PendingCommit:
        old = self._take_old_shard(done)
        if old is None:
            return NewFile(self._output, self._work, done)
        return MergedFile(self._output, self._work, done, old)


def merged(old: pa.Table, completions: Sequence[Completion], new: pa.Table) -> pa.Table:
    """The new rows, which are those of the completions, and the old versions of all others, in input order."""
    anew = {(done.row_index, done.sample_index) for done in completions}
    keys = zip(old["row_index"].to_pylist(), old["sample_index"].to_pylist(), strict=True)
    kept = old.filter(pa.array([key not in anew for key in keys], pa.bool_()))
    table = pa.concat_tables([kept, new.replace_schema_metadata(None)])
    return table.take(pc.sort_indices(table, [("row_index", "ascending"), ("sample_index", "ascending")]))
