"""From claimed shards to the stream of requests, and from their completions back to shards that are complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.journal import Journaled
from batchspec.packing.equal_rows import EqualRows
from batchspec.packing.open_shards import OpenShards
from batchspec.packing.ordered_requests import OrderedRequests
from batchspec.packing.ready_requests import ReadyRequests, RequestCompiler
from batchspec.packing.work_plan import AdmitShards, DecodedShard, PlanRows, all_rows
from batchspec.records import Completion, Request
from batchspec.request_stream import RequestStream

AHEAD = 64
"""Maximum number of requests, or the number of slots if larger, that wait for their automata at a time."""


class Feed:
    """Joins the stages from claimed shards to `requests`, and gives back each shard when its rows are finished.

    admit       admits the rows of shards
    rows        decides what is done with each output row of a shard; default: all are decoded
    predicted   returns a request with its present predicted output length
    num_shards  number of shards in `shards`
    shard_rows  input rows of a shard; the last shard may have fewer
    slots       number of slots of the batch
    journaled   saved work of earlier runs: finished rows are not decoded again, others continue from their saved tokens
    compiling   compiles the automata of requests with constraints; None: no row has one
    busy        whether the engine has unfinished requests; default: whether requests were handed out that were not added
    refused     called with the rows that `compiling` refuses
    once        compute equal greedy rows once (`equal_rows.py`)
    """

    def __init__(
        self,
        shards: Iterator[InputShard],
        admit: AdmitShards,
        *,
        rows: PlanRows = all_rows,
        predicted: Callable[[Request], Request],
        num_shards: int,
        shard_rows: int,
        slots: int,
        journaled: Journaled | None = None,
        compiling: RequestCompiler | None = None,
        busy: Callable[[], bool] | None = None,
        refused: Callable[[Completion], None] = lambda refused: None,
        once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards = opened = OpenShards(rows, predicted, journaled or Journaled())
        ordered = OrderedRequests(
            shards, admit, opened.planned, predicted, busy=lambda: opened.num_unfinished > 0, num_shards=num_shards,
            shard_rows=shard_rows, slots=slots, clock=clock,
        )

        def refuse(completion: Completion) -> None:
            self._add(completion)
            refused(completion)

        self._compiled: ReadyRequests | None = None
        self._equal = EqualRows(ordered, opened.add) if once else None
        self.requests: RequestStream = self._equal or ordered
        """All requests in decoding order, but one whose automaton is not compiled yet comes later, and of equal greedy ones the
        first alone comes."""
        if compiling is not None:
            self._compiled = ReadyRequests(self.requests, compiling, refused=refuse, busy=busy, ahead=max(AHEAD, slots))
            self.requests = self._compiled

    def add(self, completion: Completion) -> None:
        """Add the completion of a request that was handed out."""
        if self._compiled is not None:
            self._compiled.finished()
        self._add(completion)

    def _add(self, completion: Completion) -> None:
        for done in [completion, *(() if self._equal is None else self._equal.copies(completion))]:
            self._shards.add(done)

    @property
    def open_shards(self) -> list[tuple[int, int]]:
        """Shards that lack completions, each with the number of output rows that are done."""
        return self._shards.progress()

    def complete(self) -> Iterator[DecodedShard]:
        """Yield each shard once, when all its rows are finished."""
        return self._shards.complete()
