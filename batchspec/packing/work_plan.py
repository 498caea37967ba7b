"""The plan of what a run does with each output row of a shard. Decoding, isolated retries and commits execute it.

A new or resumed job computes every row (runner/compute_all.py). A retry computes some rows anew and carries the others over
(runner/retry_plan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from batchspec.dataset.reader import InputShard
from batchspec.records import Completion, Request

PlanRows = Callable[[InputShard], Iterator[Request | Completion | None]]
"""`WorkPlan.rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedShard:
    """A shard whose output rows are all finished or carried over."""

    shard: InputShard
    completions: list[Completion]
    """The output rows that are not carried over, in the order in which they finished."""
    num_carried: int = 0
    """Number of output rows that a retry keeps unchanged."""


class WorkPlan(Protocol):
    """Which rows of a shard are computed, and how the shard's file is published."""

    def rows(self, shard: InputShard) -> Iterator[Request | Completion | None]:
        """For each output row, in input order: a request to decode (with saved tokens to continue from, if any), a completion
        that needs no decoding (a bad row), or None for a row that is carried over unchanged.

        shard  whole, or a slice of one
        """

    def carries_over(self, shard: int) -> bool:
        """Whether rows of this shard that get no completion are carried over from the present output."""

    def commit(self, shard: int, completions: Sequence[Completion], table: pa.Table | None) -> None:
        """Publish the shard's file once: the completions and the rows carried over.

        completions  one for every row that is not carried over
        table        the same as output rows; None if there are none
        Raises what `OutputFolder.commit` raises.
        """
