"""Prefetches requests from their stream while the device computes, a few after each result.

Taking a request (its length is predicted and compared with the time left) costs the thread that launches rounds some 20 us, and a
refill takes about a hundred. Without prefetching the device would wait for all of them.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from batchspec.records import Request

PREFETCHED_PER_ROUND = 8
"""Requests prefetched after each result: twice as many as end in a round of 256 rows that take 60 rounds each."""


class Prefetcher(Iterator[Request | None]):
    """Iterates over the requests of a stream, in its order, some of them prefetched.

    num_ready  number of requests that the stream can give without waiting; None: what `operator.length_hint` says, which is the
               number left of a list, and 0 for a generator
    most       maximum number of prefetched requests
    """

    def __init__(self, requests: Iterator[Request | None], num_ready: Callable[[], int] | None, *, most: int) -> None:
        self._requests, self._num_ready, self._most = requests, num_ready or partial(operator.length_hint, requests), most
        self._taken: deque[Request | None] = deque()
        self.only_taken = False
        """While set, `__next__` returns None instead of a request that is not prefetched."""

    def __next__(self) -> Request | None:
        if self._taken:
            return self._taken.popleft()
        return None if self.only_taken else self._next()

    @property
    def num_taken(self) -> int:
        """Number of prefetched requests that `__next__` has not returned yet."""
        return len(self._taken)

    def take(self, count: int) -> None:
        """Prefetch up to `count` requests, within the limit, and only requests that are ready."""
        for _ in range(min(count, self._most - len(self._taken))):
            if self._num_ready() <= 0:  # one request may use up several: rows for which no time is left
                return
            try:
                self._taken.append(self._next())
            except StopIteration:  # the stream also ends when the run has no time for more rows
                return

    def _next(self) -> Request | None:
        try:
            return next(self._requests)
        except StopIteration:  # free what the stream holds, such as the rows of a call: an engine keeps its last run
            self._requests, self._num_ready = iter(()), lambda: 0
            raise
