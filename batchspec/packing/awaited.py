"""Requests whose automata are there, while those of others are compiled: a row waits for its own automaton and for no other.

Tokens do not depend on the order in which rows begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from batchspec.records import Completion, Request

WAIT_S = 0.05
"""The longest wait where nothing else can be done: signals and a call that is given up are looked for in between."""


class Compiling(Protocol):
    """What compiles: `Admission`."""

    def begin(self, request: Request) -> Future[Any] | None:
        """Have the request's automaton compiled; done once `compiled` need not wait. None: it needs none."""

    def compiled(self, request: Request) -> Request | Completion:
        """The request with its automaton, or the reason why it has none; waits for it."""


class Awaited(Iterator[Request | None]):
    """The requests in their order, but those whose automata are not there yet come later. None: at present there is none.

    requests  None of them: there is none yet; it ends with the last
    refused   gets each request whose constraint has no automaton, as the row that it becomes
    busy      whether the engine has unfinished requests; else the next one is waited for, WAIT_S at most
    ahead     so many requests at most are taken and compiled before they can begin
    """

    def __init__(
        self, requests: Iterator[Request], compiling: Compiling, *, refused: Callable[[Completion], None],
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
        """The first request that waits no longer, or else the next one that need not wait; None: there is none."""
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
        """The next request that need not wait; the ones before it wait from now on."""
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
