"""Hands out requests whose automata are compiled while others are being compiled: a row waits for its own automaton only.

This changes the order in which rows begin, which no token depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from batchspec.records import Completion, Request

WAIT_S = 0.05
"""Longest wait, in seconds, while the engine has nothing to do. Between waits the caller checks signals and cancelled calls."""


class RequestCompiler(Protocol):
    """Compiles automata; implemented by `Admission`."""

    def begin(self, request: Request) -> Future[Any] | None:
        """Start to compile the request's automaton. The future is done once `compiled` need not wait; None: it needs none."""

    def compiled(self, request: Request) -> Request | Completion:
        """The request with its automaton, or the reason why it has none; waits for it."""


class ReadyRequests(Iterator[Request | None]):
    """Iterates over requests in order, except that a request comes later if its automaton is not compiled yet. It gives None
    if no request is ready at present.

    requests  the requests
    refused   called with the error row of each request whose constraint cannot be compiled
    busy      whether the engine has unfinished requests; if not, `next` waits for an automaton, at most WAIT_S
    ahead     maximum number of requests that have been taken from `requests` and wait for their automata
    """

    def __init__(
        self, requests: Iterator[Request], compiling: RequestCompiler, *, refused: Callable[[Completion], None],
        busy: Callable[[], bool], ahead: int,
    ) -> None:  # fmt: skip
        self._requests, self._compiling, self._refused, self._busy, self._ahead = requests, compiling, refused, busy, ahead
        self._waiting: list[tuple[Request, Future[Any]]] = []
        self._ended = False

    def __next__(self) -> Request | None:
        if (request := self._next_ready()) is not None:
            return request
        if self._waiting:
            if not self._busy():
                wait([future for _, future in self._waiting], WAIT_S, FIRST_COMPLETED)
            return self._next_ready()
        raise StopIteration

    def _next_ready(self) -> Request | None:
        """The first waiting request whose automaton is compiled, or else the next one that need not wait; None: there is
        neither."""
        while (found := self._first_done() or self._taken()) is not None:
            ready = self._compiling.compiled(found)
            if isinstance(ready, Request):
                return ready
            self._refused(ready)
        return None

    def _first_done(self) -> Request | None:
        place = next((place for place, (_, future) in enumerate(self._waiting) if future.done()), None)
        return None if place is None else self._waiting.pop(place)[0]

    def _taken(self) -> Request | None:
        """Take requests from the stream until one need not wait, and return it; those before it wait. None: `ahead` of them
        wait."""
        while not self._ended and len(self._waiting) < self._ahead:
            request = next(self._requests, None)
            if request is None:
                self._ended = True
                return None
            future = self._compiling.begin(request)
            if future is None or future.done():
                return request
            self._waiting.append((request, future))
        return None
