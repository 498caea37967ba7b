"""The requests of claimed shards in decoding order: a window of shards at a time, the longest of a window first."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

from batchspec.data.dataset.reader import InputShard
from batchspec.packing.order import order_requests
from batchspec.packing.work_plan import AdmitShards, AdmittedShard, AdmittedShards
from batchspec.records import Request

WINDOW_SHARDS = 4
"""A window holds at least this many shards. Requests are ordered by length inside a window."""
WINDOW_SLOTS = 2
"""A window holds at least this many input rows for each slot of the batch."""
EARLY_S = 5.0
"""Seconds before the present window is used up at which admission of the next one begins: a few rows with each request handed
out. Admitting 2,000 chats at once would keep the GPU waiting for half a second. It does not wait for shards that worker processes
admit, and it does not begin earlier, because other runs may still claim the next shards."""
LATE_S, REST_S = 0.3, 0.005
"""Seconds that the engine waits for a whole window. Then it gets what is admitted, part by part: a row with an image of a
megabyte takes milliseconds to be read and sent. Until the next shard is there it goes on with what it has, and asks again, after
a rest if it has nothing to do."""

PlanShard = Callable[[AdmittedShard], Iterator[list[Request]]]
"""Yields the requests of a shard: for each output row a list of none or one."""


def window_shards(slots: int, shard_rows: int) -> int:
    """Number of shards whose requests are ordered together."""
    return max(WINDOW_SHARDS, -(-WINDOW_SLOTS * slots // shard_rows))


class _Window:
    """The requests of one window, admitted a share at a time.

    num_rows      maximum number of its input rows
    busy, clock   as of `OrderedRequests`
    """

    def __init__(
        self, shards: AdmittedShards, planned: PlanShard, num_rows: int, busy: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._shards, self._planned, self._num_rows, self._busy, self._clock = shards, planned, num_rows, busy, clock
        self._requests: list[Request] = []
        """Those that were not taken."""
        self._takes = self._took = False
        """Whether `take` admits now; whether it has given a part."""
        self._asked_at: float | None = None
        """When `take` was called first."""
        self.is_whole = False
        """Whether all rows are admitted."""
        self._steps = self._admitted()

    def admit_share(self, num_shares: int) -> None:
        """Admit a `num_shares`th of the remaining rows, or fewer if that would mean waiting for a worker process."""
        self._takes = False
        for took in itertools.islice(self._steps, None if num_shares == 1 else -(-self._num_rows // num_shares)):
            if not took:
                return
            self._num_rows -= 1

    @property
    def is_late(self) -> bool:
        """Whether `take` has given a part and others come."""
        return self._took and not self.is_whole

    @property
    def num_ready(self) -> int:
        """Number of requests of the window, once all its rows are admitted; 0 before."""
        return len(self._requests) if self.is_whole else 0

    def take(self) -> list[Request] | None:
        """Admit the rest, and return all requests of the window; or, once it is late (LATE_S), a part that needs no waiting.

        None: there is none at present, because it is late, or after each shard without a request: a run may read shards of error
        rows for hours, and may be asked to end meanwhile.
        """
        self._takes = True
        if self._asked_at is None:
            self._asked_at = self._clock()
        if not all(self._steps) and not self._requests:
            return None
        found, self._requests, self._took = self._requests, [], True
        return found

    def _may_wait(self) -> bool:
        """Whether admission goes on if the next shard has to be waited for."""
        if not self._takes or self._asked_at is None:
            return False
        return not (self._requests or self._took) or self._clock() - self._asked_at < LATE_S

    def _admitted(self) -> Iterator[bool]:
        """Yields True for each output row that was admitted, and False whenever the next one would have to be waited for, or
        `take` is to return."""
        while True:
            while not (self._shards.is_ready() or self._may_wait()):
                if self._takes and not (self._requests or self._busy()):
                    time.sleep(REST_S)
                yield False
            admitted = next(self._shards, None)
            if admitted is None:
                self.is_whole = True
                return
            for requests in self._planned(admitted):
                self._requests += requests
                yield True
            if self._takes and not self._requests:
                yield False


class OrderedRequests:
    """A `RequestStream` that takes shards a window at a time and gives their requests longest first.

    admit       admits the rows of shards
    planned     decides which of them are decoded
    predicted   returns a request with its present predicted output length
    busy        whether a request of a shard that `planned` was given is not finished
    num_shards  number of shards in `shards`
    shard_rows  input rows of a shard; the last shard may have fewer
    slots       number of slots of the batch

    Longest first helps if a window holds more rows than the batch: for 800 rows of 8K with known lengths and 88 slots, windows of
    64 rows take 5,454 rounds and windows of 176 rows take 4,853. The remainder of the input is merged into the last window:
    otherwise its longest requests would become a tail that leaves most slots empty. For the same reason each part of a late
    window joins those of its requests that were not handed out.
    """

    def __init__(
        self, shards: Iterator[InputShard], admit: AdmitShards, planned: PlanShard, predicted: Callable[[Request], Request], *,
        busy: Callable[[], bool], num_shards: int, shard_rows: int, slots: int, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards, self._admit, self._planned, self._predicted = shards, admit, planned, predicted
        self._busy, self._clock = busy, clock
        self._num_shards, self._shard_rows, self._slots = num_shards, shard_rows, slots
        self._window = window_shards(slots, shard_rows)
        self._num_windows = max(1, num_shards // self._window)
        self._left: deque[Request] = deque()
        """Requests of the present window that were not handed out."""
        self._number = 0
        """Number of windows whose requests were put into `_left`: the number of the next one."""
        self._coming = self._begin(0)
        self._handed_out, self._filled_at = 0, 0.0
        self.num_ready, self.ended = 0, False

    def next_ready(self) -> Request | None:
        """The next request. It waits for the next window, or for a shard of it without any request, after which it is None; not
        for a shard of a window that is late."""
        if self._left and self._ends_soon() and not self._coming.is_late:
            self._coming.admit_share(max(1, len(self._left)))
        while not self._left or self._coming.is_late:
            if self._number == self._num_windows:
                self.ended = True
                return None
            if (requests := self._coming.take()) is None:
                break
            if requests:
                self._left = deque(order_requests([*self._left, *requests]))
            if self._coming.is_whole:
                self._number += 1
                self._coming = self._begin(self._number)
        if not self._left:
            return None
        request = self._left.popleft()
        self._handed_out += 1
        self.num_ready = len(self._left) or self._coming.num_ready
        # Predict again: rows that finished since the window was admitted improve the prediction.
        return self._predicted(request)

    def _ends_soon(self) -> bool:
        """Whether the rest of the window will be handed out within EARLY_S, at the pace since the slots were filled."""
        if self._handed_out <= self._slots:
            self._filled_at = self._clock()
            return False
        return len(self._left) * (self._clock() - self._filled_at) < EARLY_S * (self._handed_out - self._slots)

    def _begin(self, number: int) -> _Window:
        """A window whose shards are not read yet; the one after the last window is empty."""
        if number >= self._num_windows:
            return self._window_of(0, 0)
        if number == self._num_windows - 1:
            return self._window_of(None, self._num_shards - number * self._window)
        return self._window_of(self._window, self._window)

    def _window_of(self, most: int | None, num_shards: int) -> _Window:
        """A window of the next `num_shards` shards. most: None for all that come, if they should be more."""
        shards, num_rows = self._admit(itertools.islice(self._shards, most)), num_shards * self._shard_rows
        return _Window(shards, self._planned, num_rows, self._busy, self._clock)
