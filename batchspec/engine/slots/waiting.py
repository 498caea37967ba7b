"""The requests that wait for a slot: taken from their stream while the device computes, preempted ones first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from batchspec.engine.slots.open_requests import OpenRequests
from batchspec.engine.slots.request_state import RequestState
from batchspec.records import Request
from batchspec.request_stream import MOST_LEFT_OUT, RequestStream, take_ready


class WaitingRequests:
    """Holds the requests of a run from the moment when they are taken from their stream until they enter a slot.

    stream           is dropped once it has ended, because an engine keeps its last run and the stream may hold a job's rows
    requests         makes the state of a request, and says whether it may enter a slot
    most_prefetched  maximum number of requests that are prefetched: taken from the stream, without a state

    Taking a request (its length is predicted and compared with the time left) costs the thread that launches rounds some 20 us,
    and a refill takes about a hundred requests. Without prefetching the device would wait for all of them. States, and the hashes
    of their prompts, are made only for the requests that the next refills need.
    """

    def __init__(
        self, stream: RequestStream, requests: OpenRequests, *, most_prefetched: int = 0
    ) -> None:
        self._stream: RequestStream | None = stream
        self._requests, self._most_prefetched = requests, most_prefetched
        self._prefetched: deque[Request] = deque()
        self._queue: deque[RequestState] = deque()

    def is_exhausted(self) -> bool:
        """Whether no request waits and none will come. Takes one from the stream if none waits."""
        return self.are_last(0)

    def peek(self, passed: int = 0) -> RequestState | None:
        """The request after the `passed` that have waited longest; None if there is none at present."""
        queue = self._queue
        while len(queue) > passed and queue[passed].finish_reason is not None:  # it failed before it got a slot
            del queue[passed]
        num_ended = 0  # as they arrived; their completions leave with the step
        while len(queue) <= passed and num_ended < MOST_LEFT_OUT and (request := self._next()) is not None:
            num_ended += not self._enqueue(request)
        return queue[passed] if len(queue) > passed else None

    def are_last(self, most: int) -> bool:
        """Whether at most `most` requests wait and no others will come."""
        return self.peek(most) is None and self._stream is None

    def take_ahead(self, count: int, most: int) -> None:
        """Prefetch up to `count` requests that are ready. Then make the states of as many that were prefetched, while fewer than
        `most` requests have states and wait."""
        if self._stream is not None:
            self._prefetched += take_ready(self._stream, min(count, self._most_prefetched - len(self._prefetched)))
            self._drop_ended_stream()
        most_states = min(len(self._queue) + count, most)
        while self._prefetched and len(self._queue) < most_states:
            self._enqueue(self._prefetched.popleft())

    def first_ready(self, passed: int, most: int) -> int | None:
        """The index of the first request, from index `passed` on, that need not wait any longer; None if there is none. At most
        `most` requests are passed over."""
        for index in range(passed, most + 1):
            state = self.peek(index)
            if state is None or self._requests.ready(state):
                return None if state is None else index
        return None

    def put_first(self, state: RequestState) -> None:
        """A preempted request waits before all others."""
        self._queue.appendleft(state)

    def close(self) -> None:
        """Take no more requests, and drop the stream with all that it holds."""
        self._stream = None
        self._prefetched.clear()

    @property
    def num_prefetched(self) -> int:
        """Number of requests that were taken from the stream and have no state yet."""
        return len(self._prefetched)

    def __len__(self) -> int:
        """Number of requests that have states and wait."""
        return len(self._queue)

    def __iter__(self) -> Iterator[RequestState]:
        """The same requests, in their order."""
        return iter(self._queue)

    def __getitem__(self, index: int) -> RequestState:
        return self._queue[index]

    def __delitem__(self, index: int) -> None:
        del self._queue[index]

    def _next(self) -> Request | None:
        if self._prefetched:
            return self._prefetched.popleft()
        if self._stream is None:
            return None
        request = self._stream.next_ready()
        if request is None:
            self._drop_ended_stream()
        return request

    def _enqueue(self, request: Request) -> bool:
        """Whether it waits now; False: it has ended."""
        state = self._requests.arrive(request)
        if state is not None:
            self._queue.append(state)
        return state is not None

    def _drop_ended_stream(self) -> None:
        if self._stream is not None and self._stream.ended:
            self._stream = None
