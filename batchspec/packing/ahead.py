"""Requests are taken from their stream while the device computes, a few after each round.

To predict, to judge and to hand out a request takes some 20 us of the thread that launches the rounds. A refill asks for a
hundred at a time, and the device would wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from batchspec.records import Request


class Ahead(Iterator[Request | None]):
    """The same requests, in their order.

    num_ready  how many requests the stream can give without waiting
    most       of requests that are taken and not yet handed out
    """

    def __init__(self, requests: Iterator[Request | None], num_ready: Callable[[], int], *, most: int) -> None:
        self._requests, self._num_ready, self._most = requests, num_ready, most
        self._taken: deque[Request | None] = deque()

    def __next__(self) -> Request | None:
        return self._taken.popleft() if self._taken else next(self._requests)

    def take(self, count: int) -> None:
        """Take so many requests, or as many as there is room for and the stream need not wait for."""
        for _ in range(min(count, self._most - len(self._taken), self._num_ready())):
            try:
                self._taken.append(next(self._requests))
            except StopIteration:  # it has ended before its time: the run has no time for more rows
                return
