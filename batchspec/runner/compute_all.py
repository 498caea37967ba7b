"""The plan of a new or resumed job: every row of every shard is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from batchspec.dataset.reader import InputShard
from batchspec.packing.work_plan import Commit, DecodedShard, RowWriter, all_rows
from batchspec.records import Completion, Request
from batchspec.runstate.output_folder import OutputFolder
from batchspec.runstate.shard_writer import WrittenFile


class ComputeAll:
    """The `WorkPlan` of a job that is not a retry."""

    def __init__(self, output: OutputFolder) -> None:
        self._output = output

    def rows(self, shard: InputShard, admitted: Iterator[Request | Completion]) -> Iterator[Request | Completion]:
        """As `WorkPlan.rows`; no row is carried over."""
        return all_rows(shard, admitted)

    def carries_over(self, shard: int) -> bool:
        """Never: the output has no row of the shard."""
        return False

    def begin_commit(self, work: RowWriter, done: DecodedShard) -> Commit:
        """As `WorkPlan.begin_commit`."""
        return begin_new_file(self._output, work, done)


def begin_new_file(output: OutputFolder, work: RowWriter, done: DecodedShard) -> Commit:
    """`WorkPlan.begin_commit` of a shard that keeps no old rows: `work` writes its file, and this process publishes it."""
    index = done.shard.index
    write = work.begin_file(done.shard, done.completions, output.unpublished(index))

    def commit(check: Callable[[], None]) -> None:
        def checked() -> WrittenFile:
            made = write()
            try:
                check()
            except BaseException:
                with suppress(OSError):
                    made.path.unlink(missing_ok=True)
                raise
            return made

        output.publish(index, checked)

    return commit
