"""The stream of requests to the engine: shards are admitted one window at a time, and given back when their last row is done."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from batchspec.dataset.reader import InputShard
from batchspec.packing.order import order_requests
from batchspec.packing.ready_requests import ReadyRequests, RequestCompiler
from batchspec.packing.work_plan import AdmitShards, AdmittedShard, AdmittedShards, DecodedShard, PlanRows, all_rows
from batchspec.records import Completion, Request
from batchspec.runstate.journal import Journaled

WINDOW_SHARDS = 4
"""A window holds at least this many shards. Requests are ordered by length inside a window."""
WINDOW_SLOTS = 2
"""A window holds at least this many input rows for each slot of the batch."""
AHEAD = 64
"""Maximum number of requests, or the number of slots if larger, that wait for their automata at a time."""
EARLY_S = 5.0
"""Seconds before the present window is used up at which admission of the next one begins: a few rows with each request handed
out. Admitting 2,000 chats at once would keep the GPU waiting for half a second. It does not wait for shards that worker processes
admit, and it does not begin earlier, because other runs may still claim the next shards."""


def window_shards(slots: int, shard_rows: int) -> int:
    """Number of shards whose requests are ordered together."""
    return max(WINDOW_SHARDS, -(-WINDOW_SLOTS * slots // shard_rows))


@dataclass(slots=True)
class _OpenShard:
    shard: InputShard
    num_outputs: int = 0
    num_carried: int = 0
    completions: list[Completion] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        return len(self.completions) + self.num_carried

    @property
    def is_done(self) -> bool:
        return self.num_done == self.num_outputs


class _Window:
    """The requests of one window, of which a part may be admitted.

    planned   yields the requests of a shard: for each output row a list of none or one
    num_rows  maximum number of input rows
    """

    def __init__(
        self, shards: AdmittedShards, planned: Callable[[AdmittedShard], Iterator[list[Request]]], num_rows: int
    ) -> None:
        self._shards, self._planned, self._num_rows = shards, planned, num_rows
        self._requests: list[Request] = []
        self._waits = False
        self._whole = False
        """Whether all rows are admitted."""
        self._steps = self._admitted()

    def admit_share(self, num_shares: int) -> None:
        """Admit a `num_shares`th of the remaining rows, or fewer if that would mean waiting for a worker process."""
        for took in itertools.islice(self._steps, None if num_shares == 1 else -(-self._num_rows // num_shares)):
            if not took:
                return
            self._num_rows -= 1

    @property
    def num_ready(self) -> int:
        """Number of requests of the window, once all its rows are admitted; 0 before."""
        return len(self._requests) if self._whole else 0

    def admit_all(self) -> list[Request]:
        """Admit the rest, and return all requests of the window."""
        self._waits = True
        for _ in self._steps:
            pass
        return self._requests

    def _admitted(self) -> Iterator[bool]:
        """Yields True for each output row that was admitted, and False whenever the next one would have to be waited for."""
        while True:
            while not (self._waits or self._shards.is_ready()):
                yield False
            admitted = next(self._shards, None)
            if admitted is None:
                self._whole = True
                return
            for requests in self._planned(admitted):
                self._requests += requests
                yield True


class Feed:
    """Takes shards a window at a time, hands out their requests longest first, and tracks the unfinished rows of each shard.

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

    Longest first helps if a window holds more rows than the batch: for 800 rows of 8K with known lengths and 88 slots, windows of
    64 rows take 5,454 rounds and windows of 176 rows take 4,853. The remainder of the input is merged into the last window:
    otherwise its longest requests would become a tail that leaves most slots empty.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards, self._admit, self._rows, self._predicted, self._clock = shards, admit, rows, predicted, clock
        self._num_shards, self._shard_rows, self._slots = num_shards, shard_rows, slots
        self._window = window_shards(slots, shard_rows)
        self._num_windows = max(1, num_shards // self._window)
        self._journaled = journaled or Journaled()
        self._open: dict[int, _OpenShard] = {}
        self._done: list[int] = []
        """Open shards whose rows are all finished."""
        self._handed_out, self._filled_at = 0, 0.0
        self._compiling, self._busy, self._on_refused = compiling, busy, refused
        self._num_unfinished = 0
        """Number of requests that were handed out and have not finished. Only counted with `compiling`."""
        self._num_ready = 0

    def requests(self) -> Iterator[Request | None]:
        """Yield requests in decoding order: window by window, the longest of a window first. Requests whose automata are not
        compiled yet come later; None: no request is ready at present.
        """
        return self._in_order() if self._compiling is None else self._compiled(self._compiling)

    @property
    def num_ready(self) -> int:
        """Number of admitted requests that can be handed out without waiting. 0 with `compiling`: which request is next depends
        on which automata are compiled by then."""
        return self._num_ready if self._compiling is None else 0

    def _compiled(self, compiling: RequestCompiler) -> Iterator[Request | None]:
        ahead, busy = max(AHEAD, self._slots), self._busy or self._has_unfinished
        for request in ReadyRequests(self._in_order(), compiling, refused=self._refuse, busy=busy, ahead=ahead):
            self._num_unfinished += request is not None
            yield request

    def _has_unfinished(self) -> bool:
        return self._num_unfinished > 0

    def _refuse(self, completion: Completion) -> None:
        self._finish(completion)
        self._on_refused(completion)

    def _in_order(self) -> Iterator[Request]:
        coming = self._coming(0)
        for window in range(1, self._num_windows + 1):
            requests = order_requests(coming.admit_all())
            coming = self._coming(window)
            for left, request in zip(reversed(range(len(requests))), requests, strict=True):
                self._num_ready = left or coming.num_ready
                # Predict again: rows that finished since the window was admitted improve the prediction.
                yield self._predicted(request)
                if self._ends_soon(left):
                    coming.admit_share(max(1, left))

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
        """The next window, of which no shard has been read."""
        shards = self._window if window < self._num_windows - 1 else None if window < self._num_windows else 0
        return _Window(self._admit(itertools.islice(self._shards, shards)), self._planned, self._num_rows(window))

    def _planned(self, admitted: AdmittedShard) -> Iterator[list[Request]]:
        """Yield for each output row of a shard a list of none or one request."""
        opened = _OpenShard(admitted.shard)
        for planned in self._rows(admitted.shard, admitted.entries):
            entry = None if planned is None else self._journaled.known(planned)
            opened.num_outputs += 1
            opened.num_carried += entry is None
            if isinstance(entry, Completion):
                opened.completions.append(entry)
            yield [self._predicted(entry)] if isinstance(entry, Request) else []
        self._open[admitted.shard.index] = opened
        if opened.is_done:
            self._done.append(admitted.shard.index)

    def add(self, completion: Completion) -> None:
        """Add the completion of a request of an open shard."""
        self._num_unfinished -= 1
        self._finish(completion)

    def _finish(self, completion: Completion) -> None:
        opened = self._open[completion.shard]
        opened.completions.append(completion)
        if opened.is_done:
            self._done.append(completion.shard)

    @property
    def open_shards(self) -> list[tuple[int, int]]:
        """Shards that lack completions, each with the number of output rows that are done."""
        return [(index, opened.num_done) for index, opened in self._open.items()]

    def complete(self) -> Iterator[DecodedShard]:
        """Yield each shard once, when all its rows are finished."""
        while self._done:
            done = self._open.pop(self._done.pop(0))
            yield DecodedShard(shard=done.shard, completions=done.completions, num_carried=done.num_carried)
