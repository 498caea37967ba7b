"""Commit shards in a thread while the next ones are decoded: to compress, read back and publish one takes a second or more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

WAITING = 2
"""At most this many shards are being committed or wait for it; beyond that decoding waits, so that memory stays bounded."""


def commit_in_background(shards: Iterable[T], commit: Callable[[T], object]) -> Generator[T]:
    """Every shard, in order, once it is committed. One at a time is committed, in a thread, while the next ones are decoded.

    What `commit` raises is raised here, after the last shard at the latest. However the generator is left, commits that have
    begun are over then.
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
