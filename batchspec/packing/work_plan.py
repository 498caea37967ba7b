"""The plan of what a run does with each output row of a shard. Decoding and isolated retries execute it.

A new or resumed job computes every row (job/runner/compute_all.py). A retry computes some rows anew and carries the others over
(job/runner/retry_plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from batchspec.data.dataset.reader import InputShard
from batchspec.records import Completion, Request

PlanRows = Callable[[InputShard, Iterator[Request | Completion]], Iterator[Request | Completion | None]]
"""`WorkPlan.rows`."""


TOKEN_BYTES = 100
"""Estimated bytes of memory for each token of an uncommitted row: ids and text, in a completion and in tables."""
COPIES = 3
"""Number of copies of all other values: in a completion, in a table and in its file."""


@dataclass(frozen=True, slots=True)
class AdmittedShard:
    """A shard and the results of admitting its rows, in this process one by one, or earlier in a worker process."""

    shard: InputShard
    entries: Iterator[Request | Completion]
    """As from `Admission.admit`."""


class AdmittedShards(Iterator[AdmittedShard]):
    """Shards that are admitted in this process, in order. Subclasses read some ahead."""

    def __init__(self, shards: Iterator[AdmittedShard]) -> None:
        self._shards = shards

    def __next__(self) -> AdmittedShard:
        return next(self._shards)

    def is_ready(self) -> bool:
        """Whether `next` would return without waiting for another thread or process. Starts the work on the next shard."""
        return True


AdmitShards = Callable[[Iterator[InputShard]], AdmittedShards]
"""Admits shards. Nothing is read before the first call of a method of the result."""


def all_rows(shard: InputShard, admitted: Iterator[Request | Completion]) -> Iterator[Request | Completion]:
    """`WorkPlan.rows` of a plan that computes everything."""
    return admitted


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedShard:
    """A shard whose output rows are all finished or carried over."""

    shard: InputShard
    completions: list[Completion]
    """The output rows that are not carried over, in the order in which they finished."""
    num_carried: int = 0
    """Number of output rows that a retry keeps unchanged."""

    @property
    def num_bytes(self) -> float:
        """Estimated bytes of its rows until they are committed; infinite if a retry keeps rows, whose sizes are unknown."""
        if self.num_carried:
            return math.inf
        ids = (ids for done in self.completions for ids in (done.prompt_ids, done.token_ids) if ids is not None)
        tops = (done.top_logprobs or done.prompt_top_logprobs for done in self.completions)
        top_bytes = sum(COPIES * (top[0].nbytes + top[1].nbytes) for top in tops if top is not None)
        values_bytes = sum(COPIES * one.state_values.nbytes for one in self.completions if one.state_values is not None)
        return float(self.shard.table.nbytes + TOKEN_BYTES * sum(map(len, ids)) + top_bytes + values_bytes)


class WorkPlan(Protocol):
    """Which rows of a shard are computed."""

    def rows(
        self, shard: InputShard, admitted: Iterator[Request | Completion]
    ) -> Iterator[Request | Completion | None]:
        """For each output row, in input order: a request to decode (with saved tokens to continue from, if any), a completion
        that needs no decoding (a bad row), or None for a row that is carried over unchanged.

        shard     whole, or a slice of one
        admitted  what admission makes of its rows, with the answers that are saved of refused ones (`Journaled.with_finished`)
        """

    def carries_over(self, shard: int) -> bool:
        """Whether rows of this shard that get no completion are carried over from the present output."""
