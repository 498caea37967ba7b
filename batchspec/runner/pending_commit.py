"""The commit of a decoded shard, from its completions to its file in data/.

The file of a new shard is written under a temporary name, fsynced and verified by reading it back: by a worker process as soon as
one is free, without workers when `publish` begins. `publish` then checks that the shard's input is still what was read, and gives
the file its final name, once. A shard of a retry needs its old rows too: workers make only the table of the new rows; after the
check this process merges both, writes and verifies the file, and replaces the old one if that has not changed meanwhile. If
writing, verifying or the check fails, the temporary file is deleted, and the shard stays as it was: without a file, or in a retry
with the old one. If publishing fails, the final name has what it had before or the whole new file, never a part of one. A kill
may leave the temporary file, which a later run deletes. The next run takes the rows of a failed commit from the journal, or
computes them again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from batchspec.packing.work_plan import DecodedShard
from batchspec.records import Completion
from batchspec.runner.shard_work import ShardWork
from batchspec.runner.shard_workers import ShardWorkers
from batchspec.runstate.output_folder import OutputFolder
from batchspec.runstate.shard_writer import WrittenFile

CheckInput = Callable[[int, int], None]
"""`Source.check`: raises InputError if an input file with rows from the first number up to the second has changed."""


class PendingCommit(ABC):
    """A decoded shard that is to be committed."""

    def __init__(self, output: OutputFolder, done: DecodedShard) -> None:
        self.done = done
        self._output, self._index = output, done.shard.index

    @abstractmethod
    def publish(self, check: CheckInput) -> None:
        """Publish the shard's file, once; nothing happens if another run was first. Raises what `check` raises, and as
        `OutputFolder.publish`.
        """

    def _check(self, check: CheckInput) -> None:
        first = self.done.shard.first_row
        check(first, first + self.done.shard.table.num_rows)


class NewFile(PendingCommit):
    """The commit of a shard that has no rows in the output yet. Worker processes begin to write its file at once."""

    def __init__(self, output: OutputFolder, work: ShardWork | ShardWorkers, done: DecodedShard) -> None:
        super().__init__(output, done)
        self._write = work.begin_file(done.shard, done.completions, output.unpublished(self._index))

    def publish(self, check: CheckInput) -> None:
        """As `PendingCommit.publish`."""
        self._output.publish(self._index, partial(self._checked_file, check))

    def _checked_file(self, check: CheckInput) -> WrittenFile:
        made = self._write()
        try:
            self._check(check)
        except BaseException:
            with suppress(OSError):
                made.path.unlink(missing_ok=True)
            raise
        return made


@dataclass(frozen=True, slots=True)
class OldShard:
    """A shard's file as a retry found it."""

    table: pa.Table
    version: str
    """The version of this file in the store, see `OutputFolder.recommit`."""


class MergedFile(PendingCommit):
    """The commit of a retry's shard: its new rows, and the old versions of all others. Without a new row the old file stays."""

    def __init__(self, output: OutputFolder, work: ShardWork | ShardWorkers, done: DecodedShard, old: OldShard) -> None:
        super().__init__(output, done)
        self._old = old
        self._new = work.begin_table(done.shard, done.completions) if done.completions else None

    def publish(self, check: CheckInput) -> None:
        """As `PendingCommit.publish`."""
        new = None if self._new is None else self._new()
        self._check(check)
        table = None if new is None else merged(self._old.table, self.done.completions, new)
        self._output.recommit(self._index, table, self._old.version)


def merged(old: pa.Table, completions: Sequence[Completion], new: pa.Table) -> pa.Table:
    """The new rows, which are those of the completions, and the old versions of all others, in input order."""
    anew = {(done.row_index, done.sample_index) for done in completions}
    keys = zip(old["row_index"].to_pylist(), old["sample_index"].to_pylist(), strict=True)
    kept = old.filter(pa.array([key not in anew for key in keys], pa.bool_()))
    table = pa.concat_tables([kept, new.replace_schema_metadata(None)])
    return table.take(pc.sort_indices(table, [("row_index", "ascending"), ("sample_index", "ascending")]))
