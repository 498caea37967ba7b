"""The plan of a retry: which rows are computed again, from which tokens they continue, and which rows are carried over.

resume=error       computes rows again whose error may be temporary: a crash, but not a bad prompt
resume=length      computes rows that decode.max_new_tokens cut off, if it is larger now. They continue from their stored tokens,
                   with which a run with the larger limit would have begun too; rows without stored tokens are computed from the
                   start
resume=repetition  computes rows that decode.repetition_detection ended, in the same way; it is off now

Every other row is carried over: the new file of its shard holds the old row.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchspec.data.dataset.reader import InputShard
from batchspec.data.dataset.schema import DIGEST
from batchspec.data.runstate.generations import Generation
from batchspec.data.runstate.journal import check_images
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.engine.features.thinking import num_closing_tokens
from batchspec.packing.work_plan import DecodedShard
from batchspec.records import Completion, Request, Snapshot

READ = (
    "row_index", "sample_index", "status", "finish_reason", "error", "usage", "token_ids", "prompt_ids", "logprobs",
    "spec_decode", "perf", DIGEST,
)
"""Columns of the output that determine what happens to a row."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OldShard:
    """A shard's file as a retry found it."""

    table: pa.Table
    version: str
    """The version of this file in the store, see `OutputFolder.recommit`."""


class RetryPlan:
    """The `WorkPlan` of one retry."""

    def __init__(self, output: OutputFolder, generation: Generation) -> None:
        self._output, self._kind = output, generation.retry
        self._committed = output.committed()
        self._old: dict[int, OldShard] = {}
        self._num_replaced_errors: dict[int, int] = {}

    def carries_over(self, shard: int) -> bool:
        """Whether the output has the shard's old rows; False if its file was deleted: then all rows are computed."""
        return shard in self._committed

    def take_old_shard(self, done: DecodedShard) -> OldShard | None:
        """The shard's file as this retry found it, for its commit; None if no row is carried over. The plan forgets the file."""
        shard = done.shard.index
        if not self.carries_over(shard):
            return None
        old = self._old_shard(shard)
        del self._old[shard]
        self._num_replaced_errors[shard] = _num_errors_among(old.table, done.completions)
        return old

    def num_replaced_errors(self, shard: int) -> int:
        """Number of error rows in the old file that the commit of the shard replaces."""
        return self._num_replaced_errors.get(shard, 0)

    def _old_shard(self, shard: int) -> OldShard:
        if shard not in self._old:
            self._old[shard] = OldShard(*self._output.written(shard))
        return self._old[shard]

    def rows(
        self, shard: InputShard, admitted: Iterator[Request | Completion]
    ) -> Iterator[Request | Completion | None]:
        if not self.carries_over(shard.index):
            yield from admitted
            return
        old = self._old_rows(shard)
        for entry in admitted:
            yield self._planned(entry, old.get((entry.row_index, entry.sample_index)))

    def _old_rows(self, shard: InputShard) -> dict[tuple[int, int], Row]:
        """Output rows of these input rows, by row and sample."""
        first, last = shard.first_row, shard.first_row + shard.table.num_rows - 1
        table = self._old_shard(shard.index).table
        row_index = table["row_index"]
        table = table.filter(pc.and_(pc.greater_equal(row_index, first), pc.less_equal(row_index, last)))
        rows = table.select([name for name in READ if name in table.column_names]).to_pylist()
        return {(row["row_index"], row["sample_index"]): row for row in rows}

    def _planned(self, entry: Request | Completion, row: Row | None) -> Request | Completion | None:
        """The plan for one output row; None carries it over. entry: an answer only if this retry finished it before it was
        interrupted, and the row is refused now (`Journaled.with_finished`)."""
        if row is None:  # the old row of sample 0 is the error of all samples
            return entry
        if self._kind == "error":
            anew = row["status"] == "error" and bool(row["error"]["retryable"])
        elif row["finish_reason"] != self._kind:
            anew = False
        elif isinstance(entry, Completion):
            anew = entry.error is None
        else:
            # A row that was cut off and has no room for more tokens is kept; one that repeated itself there was cut off now.
            anew = self._kind == "repetition" or entry.device_limit > _num_tokens(row)
        if not anew:
            return None
        if isinstance(entry, Request) and (self._kind != "error" or row.get("token_ids")):
            # Also if no tokens are stored: the row's other samples are kept, and they are answers to the old images. An error
            # row without tokens may be one because of its images, which have been replaced.
            # In the output of a job without images, a column of this name was copied from the input.
            check_images(entry, row.get(DIGEST) if "image_tokens" in row["usage"] else None)
        return replace(entry, resumed=_snapshot(entry, row)) if isinstance(entry, Request) else entry


def _num_errors_among(old: pa.Table, completions: Collection[Completion]) -> int:
    errors = old.filter(pc.equal(old["status"], "error"))
    failed = zip(errors["row_index"].to_pylist(), errors["sample_index"].to_pylist(), strict=True)
    return len(set(failed) & {(done.row_index, done.sample_index) for done in completions})


def _num_tokens(row: Row) -> int:
    return int(row["usage"]["completion_tokens"])


def _snapshot(request: Request, row: Row) -> Snapshot | None:
    """The row as a snapshot to continue from; None if it has no tokens or another prompt (input.on_overlong=truncate)."""
    tokens, prompt, usage = row.get("token_ids"), row.get("prompt_ids"), row["usage"]
    if not tokens or row.get("logprobs") is not None or usage["prompt_tokens"] != len(request.prompt_ids):
        return None
    if prompt is not None and prompt != request.prompt_ids.tolist():
        return None
    spec, perf = row["spec_decode"], row["perf"]
    if spec is None:  # nothing drafted: each token was forced, or came from its own prefill or round, which may be discarded
        num_forced, rounds = num_closing_tokens(request, tokens), perf["rounds"] or 0
        num_own = len(tokens) - num_forced
        num_discarded = max(0, rounds + 1 - num_own) if rounds or num_own else 0  # with at least one prefill
        counts: dict[str, Any] = {
            "num_prefills": num_own + num_discarded - rounds, "accepted": (rounds,), "drafted": (rounds,),
            "num_discarded": num_discarded, "num_forced": num_forced,
        }
    else:
        at_least = [spec["num_spec_steps"], *spec["drafted_per_position"], 0]
        counts = {
            "num_prefills": spec["num_prefills"],
            "accepted": tuple(spec["acceptance_histogram"]),
            "drafted": tuple(more - fewer for more, fewer in itertools.pairwise(at_least)),
            "num_discarded": spec["num_discarded_tokens"],
            "num_forced": spec["num_forced_tokens"],
        }
    return Snapshot(
        row_index=request.row_index,
        sample_index=request.sample_index,
        shard=request.shard,
        tokens=tuple(tokens),
        cached_tokens=usage["cached_tokens"],
        prefill_s=perf["prefill_s"] or 0.0,
        decode_s=perf["decode_s"] or 0.0,
        **counts,
    )
