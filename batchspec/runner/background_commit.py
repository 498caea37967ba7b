"""Commits shards in a thread while the next ones are decoded: compressing, reading back and publishing one takes a second or
more."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

WAITING, MOST_WAITING = 2, 32
"""Maximum number of shards that are being committed or wait for it, for large and for small shards; decoding waits at the limit.
The rows of several shards are ordered together (`packing/order.py`), so four or more shards end almost at the same time: with a
limit of two the engine would wait for commits."""
SMALL_BYTES = 100 << 20
"""Shards count as small while all uncommitted ones together take no more memory than this."""


def commit_in_background(
    shards: Iterable[T], commit: Callable[[T], object], num_bytes: Callable[[T], float] = lambda shard: math.inf
) -> Generator[T]:
    """Yield every shard, in order, after its commit. A thread commits one at a time while the next ones are decoded.

    num_bytes  a shard -> bytes of memory that it takes; default: all shards are large
    Errors of `commit` are raised here, after the last shard at the latest. However the generator is left, commits that have
    begun are complete then.
    """
    under_way: deque[tuple[T, Future[object], float]] = deque()

    def first() -> T:
        shard, future, _ = under_way.popleft()
        future.result()
        return shard

    def too_many() -> bool:
        are_small = sum(size for _, _, size in under_way) <= SMALL_BYTES
        return len(under_way) > (MOST_WAITING if are_small else WAITING)

    with ThreadPoolExecutor(1, thread_name_prefix="commit") as pool:
        for shard in shards:
            under_way.append((shard, pool.submit(commit, shard), num_bytes(shard)))
            while too_many() or (under_way and under_way[0][1].done()):
                yield first()
        while under_way:
            yield first()
