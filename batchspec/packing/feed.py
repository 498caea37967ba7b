"""The stream of requests: shards admitted a window at a time, and what each of them still owes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from batchspec.io.journal import Journaled
from batchspec.io.reader import InputShard
from batchspec.packing.admit import Admission
from batchspec.packing.planner import order_requests
from batchspec.records import Completion, Request

WINDOW_SHARDS = 4
"""Shards in flight at least: requests are ordered inside a window of this many."""
WINDOW_SLOTS = 2
"""Input rows of a window at least, for each slot of the batch."""


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
    ) -> None:
        self._shards, self._admission = shards, admission
        self._window = max(WINDOW_SHARDS, -(-WINDOW_SLOTS * slots // shard_rows))
        self._num_windows = max(1, num_shards // self._window)
        self._journaled = journaled or Journaled()
        self._open: dict[int, tuple[InputShard, int, list[Completion]]] = {}

    def requests(self) -> Iterator[Request]:
        """Requests in decoding order. The next window is read when the last one's requests are all handed out."""
        for window in range(self._num_windows):
            last = window == self._num_windows - 1
            # Rows that ended since the window was read say more about output lengths than was known then.
            yield from map(self._admission.predicted, order_requests(self._admitted(None if last else self._window)))

    def _admitted(self, count: int | None) -> list[Request]:
        requests: list[Request] = []
        for shard in itertools.islice(self._shards, count):
            entries = [self._journaled.known(entry) for entry in self._admission.admit(shard)]
            self._open[shard.index] = (shard, len(entries), [e for e in entries if isinstance(e, Completion)])
            requests += [e for e in entries if isinstance(e, Request)]
        return requests

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
