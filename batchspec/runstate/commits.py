"""Commits beside the decoding: compressing, reading back and publishing a shard of long rows takes a second, a PUT to S3 more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

WAITING = 2
"""Shards that are being committed or wait for it; with more the decoding waits, so that memory stays bounded."""


def commit_beside(shards: Iterable[T], commit: Callable[[T], object]) -> Generator[T]:
    """Every shard, in order, once it is committed: one at a time, in a thread, while the next ones are decoded.

    What `commit` raises is raised here, at the latest behind the last shard. However this is left, what was begun is over then.
    """
    under_way: deque[tuple[T, Future[object]]] = deque()

    def first() -> T:
        shard, future = under_way.popleft()
        future.result()
        return shard

    with ThreadPoolExecutor(1, thread_name_prefix="commit") as pool:
        for shard in shards:
            under_way.append((shard, pool.submit(commit, shard)))
            while len(under_way) > WAITING or (under_way and under_way[0][1].done()):
                yield first()
        while under_way:
            yield first()
