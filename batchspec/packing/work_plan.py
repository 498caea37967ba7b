"""What a run does with each output row of a shard: the plan that decoding, isolated retries and commits execute.

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
    """A shard of which no output row is outstanding."""

    shard: InputShard
    completions: list[Completion]
    """Every output row that is not carried over, in the order in which they finished."""
    num_carried: int = 0
    """Output rows that stay as the output has them (in a retry)."""


class WorkPlan(Protocol):
    """Which rows of a shard are computed, and how the shard's file is published."""

    def rows(self, shard: InputShard) -> Iterator[Request | Completion | None]:
        """For each output row, in input order: a request to decode (with the tokens that it goes on from), a completion that
        needs no decoding (a bad row), or None for a row that is carried over as the output has it.

        shard  whole, or a slice of one
        """

    def carries_over(self, shard: int) -> bool:
        """Whether rows of this shard that get no completion keep what the output has."""

    def commit(self, shard: int, completions: Sequence[Completion], table: pa.Table | None) -> None:
        """Publish the shard's file once: the completions and the rows carried over.

        completions  one for every row that is not carried over
        table        the same as output rows; None where there are none
        Raises what `OutputFolder.commit` raises.
        """
