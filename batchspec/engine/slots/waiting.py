"""The requests that wait for a slot: first those that were preempted, then those of the stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from batchspec.engine.slots.request_state import RequestState


class WaitingRequests:
    """A queue that takes a request from the stream only when a place beyond its present end is asked for."""

    def __init__(self, stream: Iterator[RequestState | None], ready: Callable[[RequestState], bool]) -> None:
        """
        stream  None: there is no request at present, but more may come
        ready   whether a request may enter a slot
        """
        self._stream, self._stream_ended, self._ready = stream, False, ready
        self._queue: deque[RequestState] = deque()

    @property
    def exhausted(self) -> bool:
        """Whether no request waits and none will come."""
        return self.peek() is None and self._stream_ended

    def peek(self, passed: int = 0) -> RequestState | None:
        """The request after the `passed` that have waited longest; None if there is none at present."""
        queue = self._queue
        while len(queue) > passed and queue[passed].finish_reason is not None:  # it failed before it got a slot
            del queue[passed]
        if len(queue) <= passed and not self._stream_ended:
            try:
                state = next(self._stream)
            except StopIteration:
                self._stream_ended = True
            else:
                queue += [] if state is None else [state]
        return queue[passed] if len(queue) > passed else None

    def take_ahead(self, count: int, most: int) -> None:
        """Take up to `count` requests from the stream before they can enter slots, while fewer than `most` wait."""
        for _ in range(min(count, most - len(self._queue))):
            if self.peek(len(self._queue)) is None:  # there is none at present
                break

    def __iter__(self) -> Iterator[RequestState]:
        """The requests that were taken from the stream and wait, in their order."""
        return iter(self._queue)

    def first_ready(self, passed: int, most: int) -> int | None:
        """The place of the first request, from place `passed` on, that need not wait any longer; None if there is none. At most
        `most` requests are passed over."""
        for place in range(passed, most + 1):
            state = self.peek(place)
            if state is None or self._ready(state):
                return None if state is None else place
        return None

    def __getitem__(self, place: int) -> RequestState:
        return self._queue[place]

    def __delitem__(self, place: int) -> None:
        del self._queue[place]

    def put_first(self, state: RequestState) -> None:
        """A preempted request waits before all others."""
        self._queue.appendleft(state)
