"""The plan of a new or resumed job: every row of every shard is computed."""

from __future__ import annotations

from collections.abc import Iterator

from batchspec.data.dataset.reader import InputShard
from batchspec.packing.work_plan import DecodedShard, all_rows
from batchspec.records import Completion, Request


class ComputeAll:
    """The `WorkPlan` of a job that is not a retry."""

    def rows(self, shard: InputShard, admitted: Iterator[Request | Completion]) -> Iterator[Request | Completion]:
        """What admission makes of the rows: all requests are decoded."""
        return all_rows(shard, admitted)

    def carries_over(self, shard: int) -> bool:
        """Never: the output has no row of the shard."""
        return False

    def num_replaced_errors(self, shard: int) -> int:
        """0: the output has no row of the shard."""
        return 0

    def take_old_shard(self, done: DecodedShard) -> None:
        """None: no row is carried over."""
