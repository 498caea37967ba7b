"""The plan of a new or resumed job: every row of every shard is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from batchspec.dataset.reader import InputShard
from batchspec.packing.work_plan import all_rows
from batchspec.records import Completion, Request
from batchspec.runstate.output_folder import OutputFolder


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

    def commit(self, shard: int, completions: Sequence[Completion], table: pa.Table | None) -> None:
        """As `WorkPlan.commit`."""
        if table is not None:
            self._output.commit(shard, table)
