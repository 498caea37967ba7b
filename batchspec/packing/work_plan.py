"""The plan of what a run does with each output row of a shard. Decoding, isolated retries and commits execute it.

A new or resumed job computes every row (runner/compute_all.py). A retry computes some rows anew and carries the others over
(runner/retry_plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from batchspec.dataset.reader import InputShard
from batchspec.records import Completion, Request
from batchspec.runstate.shard_writer import UnpublishedFile, WrittenFile

Commit = Callable[[Callable[[], None]], None]
"""Publishes a shard; see `WorkPlan.begin_commit`."""
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
        return float(self.shard.table.nbytes + TOKEN_BYTES * sum(map(len, ids)) + top_bytes)


class RowWriter(Protocol):
    """Makes output rows from completions, in this process or in others."""

    def begin_table(self, shard: InputShard, completions: Sequence[Completion]) -> Callable[[], pa.Table]:
        """A function that returns the completions as output rows."""

    def begin_file(
        self, shard: InputShard, completions: Sequence[Completion], file: UnpublishedFile
    ) -> Callable[[], WrittenFile]:
        """A function that writes the same rows to `file`, verifies them and returns the written file. It may be called again to
        write the file anew. It raises what `UnpublishedFile.write` raises.

        Workers may write the file before the function is called. If it is never called, because the shard's input has changed,
        the file stays in the scratch folder until a later run removes it.
        """


class WorkPlan(Protocol):
    """Which rows of a shard are computed, and how the shard's file is published."""

    def rows(
        self, shard: InputShard, admitted: Iterator[Request | Completion]
    ) -> Iterator[Request | Completion | None]:  # fmt: skip
        """For each output row, in input order: a request to decode (with saved tokens to continue from, if any), a completion
        that needs no decoding (a bad row), or None for a row that is carried over unchanged.

        shard     whole, or a slice of one
        admitted  what admission makes of its rows
        """

    def carries_over(self, shard: int) -> bool:
        """Whether rows of this shard that get no completion are carried over from the present output."""

    def begin_commit(self, work: RowWriter, done: DecodedShard) -> Commit:
        """A function that publishes the shard's file once, with the completions and the rows carried over.

        done  has a completion for every row that is not carried over
        The function takes a check, which it calls after the rows are made and before it publishes them. If the check raises an
        error, no file is left. The function raises that error, and what `OutputFolder.publish` raises.
        """
