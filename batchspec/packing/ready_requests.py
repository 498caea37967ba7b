"""Hands out requests whose automata are compiled while others are being compiled: a row waits for its own automaton only.

This changes the order in which rows begin, which no token depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from batchspec.records import Completion, Request
from batchspec.request_stream import MOST_LEFT_OUT, RequestStream

WAIT_S = 0.05
"""Longest wait, in seconds, while the engine has nothing to do. Between waits the caller checks signals and cancelled calls."""


class RequestCompiler(Protocol):
    """Compiles automata; implemented by `Admission`."""

    def begin(self, request: Request) -> Future[Any] | None:
        """Start to compile the request's automaton. The future is done once `compiled` need not wait; None: it needs none."""

    def compiled(self, request: Request) -> Request | Completion:
        """The request with its automaton, or the reason why it has none; waits for it."""


class ReadyRequests:
    """A `RequestStream` that lets requests pass whose automata are compiled while others wait for theirs.

    requests  the requests in order
    refused   called with the error row of each request whose constraint cannot be compiled
    busy      whether the engine has unfinished requests; if not, `next_ready` waits for an automaton, at most WAIT_S. None:
              whether requests were given that have not `finished`
    ahead     maximum number of requests that have been taken from `requests` and wait for their automata
    """

    num_ready = 0
    """Which request is next depends on which automata are compiled by then."""

    def __init__(
        self, requests: RequestStream, compiling: RequestCompiler, *, refused: Callable[[Completion], None],
        busy: Callable[[], bool] | None = None, ahead: int,
    ) -> None:
        self._requests, self._compiling, self._refused, self._busy, self._ahead = requests, compiling, refused, busy, ahead
        self._waiting: list[tuple[Request, Future[Any]]] = []
        self._num_unfinished = 0
        """Number of requests that were given and have not finished."""

    @property
    def ended(self) -> bool:
        return not self._waiting and self._requests.ended

    def next_ready(self) -> Request | None:
        request = self._compiled()
        if request is None and self._waiting and not (self._num_unfinished if self._busy is None else self._busy()):
            wait([future for _, future in self._waiting], WAIT_S, FIRST_COMPLETED)
            request = self._compiled()
        self._num_unfinished += request is not None
        return request

    def finished(self) -> None:
        """A request that was given has finished."""
        self._num_unfinished -= 1

    def _compiled(self) -> Request | None:
        """The first waiting request whose automaton is compiled, or else the next one that need not wait; None: there is
        neither, or MOST_LEFT_OUT were refused."""
        for _ in range(MOST_LEFT_OUT):
            if (found := self._first_done() or self._taken()) is None:
                break
            ready = self._compiling.compiled(found)
            if isinstance(ready, Request):
                return ready
            self._refused(ready)
        return None

    def _first_done(self) -> Request | None:
        place = next((place for place, (_, future) in enumerate(self._waiting) if future.done()), None)
        return None if place is None else self._waiting.pop(place)[0]

    def _taken(self) -> Request | None:
        """Take requests until one need not wait, and return it; those before it wait. None: there is no more, or `ahead` of them
        wait."""
        while len(self._waiting) < self._ahead and (request := self._requests.next_ready()) is not None:
            future = self._compiling.begin(request)
            if future is None or future.done():
                return request
            self._waiting.append((request, future))
        return None
