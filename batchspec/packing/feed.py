"""The stream of requests: shards admitted a window at a time, and what each of them still owes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from batchspec.dataset.reader import InputShard
from batchspec.packing.admit import Admission
from batchspec.packing.planner import order_requests
from batchspec.records import Completion, Request
from batchspec.runstate.journal import Journaled

WINDOW_SHARDS = 4
"""Shards in flight at least: requests are ordered inside a window of this many."""
WINDOW_SLOTS = 2
"""Input rows of a window at least, for each slot of the batch."""
EARLY_S = 5.0
"""How long before a window ends the next one begins to be admitted, a few rows with each request that is handed out. Admitted at
once, 2,000 chats would keep the card waiting for half a second. No earlier: until then other runs may take its shards."""


class Feed:
    """Admits shards a window at a time, hands out their requests longest first, and knows what each shard still owes.

    num_shards  that `shards` will give
    shard_rows  input rows of each, the last one aside
    slots       of the batch that the requests run through
    journaled   what earlier runs did: finished rows are not asked for again, the others go on where they were

    Longest first pays where a window holds more rows than the batch: in 800 rows of 8K whose lengths are known, through 88
    slots, windows of 64 rows take 5,454 rounds, of 176 rows 4,853. What is left behind the last whole window belongs to it:
    a short last window would begin anew with long rows, and they would end alone.
    """

    def __init__(
        self,
        shards: Iterator[InputShard],
        admission: Admission,
        *,
        num_shards: int,
        shard_rows: int,
        slots: int,
        journaled: Journaled | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards, self._admission, self._clock = shards, admission, clock
        self._num_shards, self._shard_rows, self._slots = num_shards, shard_rows, slots
        self._window = max(WINDOW_SHARDS, -(-WINDOW_SLOTS * slots // shard_rows))
        self._num_windows = max(1, num_shards // self._window)
        self._journaled = journaled or Journaled()
        self._open: dict[int, tuple[InputShard, int, list[Completion]]] = {}
        self._handed_out, self._filled_at = 0, 0.0

    def requests(self) -> Iterator[Request]:
        """Requests in decoding order: those of a window longest first."""
        coming = self._admitted(0)
        for window in range(1, self._num_windows + 1):
            requests = order_requests(list(itertools.chain.from_iterable(coming)))
            coming, ahead, rows = self._admitted(window), list[list[Request]](), self._num_rows(window)
            for place, request in enumerate(requests, 1):
                # Rows that ended since the window was read say more about output lengths than was known then.
                yield self._admission.predicted(request)
                left = len(requests) - place
                if self._ends_soon(left):
                    some = list(itertools.islice(coming, -(-rows // (left + 1))))
                    rows -= len(some)
                    ahead += some
            coming = itertools.chain(ahead, coming)

    def _ends_soon(self, left: int) -> bool:
        """Whether `left` requests more go out within EARLY_S, by the pace of all behind the first ones, which fill the slots."""
        self._handed_out += 1
        if self._handed_out <= self._slots:
            self._filled_at = self._clock()
            return False
        return left * (self._clock() - self._filled_at) < EARLY_S * (self._handed_out - self._slots)

    def _num_rows(self, window: int) -> int:
        """Input rows that a window has at most."""
        if window >= self._num_windows:
            return 0
        shards = self._window if window < self._num_windows - 1 else self._num_shards - window * self._window
        return shards * self._shard_rows

    def _admitted(self, window: int) -> Iterator[list[Request]]:
        """The requests of each input row of a window, admitted when they are asked for."""
        if window >= self._num_windows:
            return
        for shard in itertools.islice(self._shards, None if window == self._num_windows - 1 else self._window):
            entries = []
            for entry in map(self._journaled.known, self._admission.admit(shard)):
                entries.append(entry)
                yield [entry] if isinstance(entry, Request) else []
            self._open[shard.index] = (shard, len(entries), [e for e in entries if isinstance(e, Completion)])

    def add(self, completion: Completion) -> None:
        self._open[completion.shard][2].append(completion)

    @property
    def open_shards(self) -> list[tuple[int, int]]:
        """Shards that still owe completions, and how many are there already."""
        return [(index, len(done)) for index, (_, _, done) in self._open.items()]

    def complete(self) -> Iterator[tuple[InputShard, list[Completion]]]:
        """Shards whose every row is there; each comes once."""
        for index in [index for index, (_, count, done) in self._open.items() if len(done) == count]:
            shard, _, completions = self._open.pop(index)
            yield shard, completions
