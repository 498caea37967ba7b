"""Prefetches requests from their stream while the device computes, a few after each round.

Taking a request (its length is predicted, and compared with the time left) costs the thread that launches rounds some 20 us. A
refill asks for a hundred at a time: without prefetching the device would wait for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from batchspec.records import Request


class Ahead(Iterator[Request | None]):
    """The requests of the stream, in its order.

    num_ready  number of requests that the stream can give without waiting
    most       limit on requests that are prefetched and not yet handed out
    """

    def __init__(self, requests: Iterator[Request | None], num_ready: Callable[[], int], *, most: int) -> None:
        self._requests, self._num_ready, self._most = requests, num_ready, most
        self._taken: deque[Request | None] = deque()

    def __next__(self) -> Request | None:
        return self._taken.popleft() if self._taken else next(self._requests)

    def take(self, count: int) -> None:
        """Prefetch up to `count` requests: no more than there is room for, and only those that are ready."""
        for _ in range(min(count, self._most - len(self._taken), self._num_ready())):
            try:
                self._taken.append(next(self._requests))
            except StopIteration:  # the stream ends early when the run has no time for more rows
                return
