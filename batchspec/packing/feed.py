"""The stream of requests: shards admitted a window at a time, and what each of them still owes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from batchspec.io.reader import InputShard
from batchspec.packing.admit import Admission
from batchspec.packing.planner import order_requests
from batchspec.records import Completion, Request

WINDOW_SHARDS = 4
"""Shards in flight: requests are ordered inside a window of this many."""


class Feed:
    """Admits shards a window at a time, hands out their requests longest first, and knows what each shard still owes."""

    def __init__(self, shards: Iterator[InputShard], admission: Admission) -> None:
        self._shards, self._admission = shards, admission
        self._open: dict[int, tuple[InputShard, int, list[Completion]]] = {}

    def requests(self) -> Iterator[Request]:
        """Requests in decoding order. The next window is read when the last one's requests are all handed out."""
        while window := list(itertools.islice(self._shards, WINDOW_SHARDS)):
            requests: list[Request] = []
            for shard in window:
                entries = list(self._admission.admit(shard))
                self._open[shard.index] = (shard, len(entries), [e for e in entries if isinstance(e, Completion)])
                requests += [e for e in entries if isinstance(e, Request)]
            yield from order_requests(requests)

    def add(self, completion: Completion) -> None:
        self._open[completion.shard][2].append(completion)

    def complete(self) -> Iterator[tuple[InputShard, list[Completion]]]:
        """Shards whose every row is there; each comes once."""
        for index in [index for index, (_, count, done) in self._open.items() if len(done) == count]:
            shard, _, completions = self._open.pop(index)
            yield shard, completions
