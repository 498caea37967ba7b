"""The stream of requests to the engine: shards are admitted a window at a time, and handed back when their last row is done."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from batchspec.dataset.reader import InputShard
from batchspec.packing.awaited import Awaited, Compiling
from batchspec.packing.order import order_requests
from batchspec.packing.work_plan import AdmitShards, AdmittedShard, AdmittedShards, DecodedShard, PlanRows, all_rows
from batchspec.records import Completion, Request
from batchspec.runstate.journal import Journaled

WINDOW_SHARDS = 4
"""A window holds at least this many shards. Requests are ordered by length inside a window."""
WINDOW_SLOTS = 2
"""A window holds at least this many input rows for each slot of the batch."""
AHEAD = 64
"""Requests, or as many as there are slots, that may wait for their automata at a time."""
EARLY_S = 5.0
"""Admission of the next window begins this long before the present one is used up: a few rows with each request handed out.
Admitting 2,000 chats at once would keep the GPU waiting for half a second; shards at workers are not waited for. It does not
begin earlier, because other runs may still claim the next shards."""


@dataclass(slots=True)
class _OpenShard:
    shard: InputShard
    num_outputs: int = 0
    num_carried: int = 0
    completions: list[Completion] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        return len(self.completions) + self.num_carried


class _Window:
    """The requests of one window, admitted as far as was asked for.

    planned   the requests of a shard, a list of no or one for each output row
    num_rows  maximum number of input rows
    """

    def __init__(
        self, shards: AdmittedShards, planned: Callable[[AdmittedShard], Iterator[list[Request]]], num_rows: int
    ) -> None:
        self._shards, self._planned, self._num_rows = shards, planned, num_rows
        self._requests: list[Request] = []
        self._waits = False
        self._steps = self._admitted()

    def admit_share(self, num_shares: int) -> None:
        """Admit one of so many equal shares of the rows that are left, or less where that would have to wait for a worker."""
        for took in itertools.islice(self._steps, -(-self._num_rows // num_shares)):
            if not took:
                return
            self._num_rows -= 1

    def admit_all(self) -> list[Request]:
        """All requests of the window."""
        self._waits = True
        for _ in self._steps:
            pass
        return self._requests

    def _admitted(self) -> Iterator[bool]:
        """True for each output row that was taken; False while the next one is not there, unless it is waited for."""
        while True:
            while not (self._waits or self._shards.is_ready()):
                yield False
            admitted = next(self._shards, None)
            if admitted is None:
                return
            for requests in self._planned(admitted):
                self._requests += requests
                yield True


class Feed:
    """Takes shards a window at a time, hands out their requests longest first, and tracks the unfinished rows of each shard.

    admit       admits the rows of shards
    rows        gives what is done with each output row of a shard; default: all are decoded
    predicted   returns a request with its present predicted output length
    num_shards  number of shards in `shards`
    shard_rows  input rows of a shard; the last shard may have fewer
    slots       number of slots of the batch
    journaled   saved work of earlier runs: finished rows are not decoded again, the others continue from their saved tokens
    compiling   makes requests with constraints ready for the engine; None: no row has one
    busy        whether the engine has unfinished requests; default: as many as were handed out and not added
    refused     is told of the rows that `compiling` refuses

    Longest first pays when a window holds more rows than the batch: for 800 rows of 8K whose lengths are known, through 88 slots,
    windows of 64 rows take 5,454 rounds and windows of 176 rows take 4,853. The remainder of the input is merged into the last
    window: otherwise its longest requests would become a tail that leaves most slots empty.
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
        compiling: Compiling | None = None,
        busy: Callable[[], bool] | None = None,
        refused: Callable[[Completion], None] = lambda refused: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards, self._admit, self._rows, self._predicted, self._clock = shards, admit, rows, predicted, clock
        self._num_shards, self._shard_rows, self._slots = num_shards, shard_rows, slots
        self._window = max(WINDOW_SHARDS, -(-WINDOW_SLOTS * slots // shard_rows))
        self._num_windows = max(1, num_shards // self._window)
        self._journaled = journaled or Journaled()
        self._open: dict[int, _OpenShard] = {}
        self._handed_out, self._filled_at = 0, 0.0
        self._compiling, self._busy, self._tell_refused = compiling, busy or self._has_unfinished, refused
        self._num_unfinished = 0
        self.num_ready = 0
        """Requests that are admitted and in order: they are handed out without waiting for anything."""

    def requests(self) -> Iterator[Request | None]:
        """Requests in decoding order: window by window, the longest of a window first. Those whose automata are not compiled yet
        come later; None: at present there is no other.
        """
        found: Iterator[Request | None] = self._in_order()
        if self._compiling is not None:
            ahead = max(AHEAD, self._slots)
            found = Awaited(self._in_order(), self._compiling, refused=self._refuse, busy=self._busy, ahead=ahead)
        for request in found:
            self._num_unfinished += request is not None
            yield request

    def _has_unfinished(self) -> bool:
        return self._num_unfinished > 0

    def _refuse(self, completion: Completion) -> None:
        self._open[completion.shard].completions.append(completion)
        self._tell_refused(completion)

    def _in_order(self) -> Iterator[Request]:
        coming = self._coming(0)
        for window in range(1, self._num_windows + 1):
            requests = order_requests(coming.admit_all())
            coming = self._coming(window)
            self.num_ready = len(requests)
            for number, request in enumerate(requests, 1):
                self.num_ready -= 1
                # Predict again: rows that finished since the window was admitted improve the prediction.
                yield self._predicted(request)
                left = len(requests) - number
                if self._ends_soon(left):
                    coming.admit_share(left + 1)

    def _ends_soon(self, left: int) -> bool:
        """Whether the `left` remaining requests will be handed out within EARLY_S, at the pace since the slots were filled."""
        self._handed_out += 1
        if self._handed_out <= self._slots:
            self._filled_at = self._clock()
            return False
        return left * (self._clock() - self._filled_at) < EARLY_S * (self._handed_out - self._slots)

    def _num_rows(self, window: int) -> int:
        """Maximum number of input rows of a window."""
        if window >= self._num_windows:
            return 0
        shards = self._window if window < self._num_windows - 1 else self._num_shards - window * self._window
        return shards * self._shard_rows

    def _coming(self, window: int) -> _Window:
        """An empty window: none of its shards has been read yet."""
        shards = self._window if window < self._num_windows - 1 else None if window < self._num_windows else 0
        return _Window(self._admit(itertools.islice(self._shards, shards)), self._planned, self._num_rows(window))

    def _planned(self, admitted: AdmittedShard) -> Iterator[list[Request]]:
        """For each output row of a shard a list of no or one request."""
        opened = _OpenShard(admitted.shard)
        for planned in self._rows(admitted.shard, admitted.entries):
            entry = None if planned is None else self._journaled.known(planned)
            opened.num_outputs += 1
            opened.num_carried += entry is None
            if isinstance(entry, Completion):
                opened.completions.append(entry)
            yield [self._predicted(entry)] if isinstance(entry, Request) else []
        self._open[admitted.shard.index] = opened

    def add(self, completion: Completion) -> None:
        """A request of an open shard has finished."""
        self._num_unfinished -= 1
        self._open[completion.shard].completions.append(completion)

    @property
    def open_shards(self) -> list[tuple[int, int]]:
        """Shards that lack completions, each with the number of output rows that it has already."""
        return [(index, opened.num_done) for index, opened in self._open.items()]

    def complete(self) -> Iterator[DecodedShard]:
        """Shards whose rows are all finished; each is yielded once."""
        for index in [index for index, opened in self._open.items() if opened.num_done == opened.num_outputs]:
            done = self._open.pop(index)
            yield DecodedShard(shard=done.shard, completions=done.completions, num_carried=done.num_carried)
