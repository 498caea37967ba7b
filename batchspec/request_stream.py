"""The stream of requests to an engine. A job's shards, the calls of a warm engine, its conversations, the processes that compute
one model and plain lists of requests all give their requests in this way."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from batchspec.records import Request

MOST_LEFT_OUT = 4096
"""Maximum number of requests that `next_ready` leaves out at a time because they need no engine: refused ones, and those whose
answer is known. It then returns None, so that their shards are committed: all other rows of the input may be such rows."""


@runtime_checkable
class RequestStream(Protocol):
    """Gives requests one by one. Some may not exist yet, because they depend on completions of earlier ones or on automata that
    are still being compiled.

    `next_ready` may return None although the stream has not `ended`: nothing is ready yet, ask again. The engine asks again
    before its next round. If the engine is idle, the stream must block for a while before it returns None.
    """

    @property
    def num_ready(self) -> int:
        """Number of requests that `next_ready` returns without waiting for a disk, a thread or a process. The engine may take
        that many before it has slots for them; 0 if it is not decided yet which request is next."""

    @property
    def ended(self) -> bool:
        """Whether no more requests will come. Many streams know it only when `next_ready` has returned None."""

    def next_ready(self) -> Request | None:
        """The next request; None: nothing is ready at present, or the stream has ended."""


class ListedRequests:
    """The requests of an iterable as a `RequestStream`. All that is left of a list is ready, and nothing of a generator."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests, self.ended = iter(requests), False

    @property
    def num_ready(self) -> int:
        return operator.length_hint(self._requests)

    def next_ready(self) -> Request | None:
        request = next(self._requests, None)
        self.ended = request is None
        return request


class WrappedStream:
    """A `RequestStream` of the requests of another one, as they are; subclasses change `next_ready`."""

    def __init__(self, requests: RequestStream) -> None:
        self._requests = requests

    @property
    def num_ready(self) -> int:
        return self._requests.num_ready

    @property
    def ended(self) -> bool:
        return self._requests.ended

    def next_ready(self) -> Request | None:
        return self._requests.next_ready()


def stream_of(requests: RequestStream | Iterable[Request]) -> RequestStream:
    """A stream as it is; an iterable as a stream."""
    return requests if isinstance(requests, RequestStream) else ListedRequests(requests)


def take_ready(stream: RequestStream, most: int) -> list[Request]:
    """Up to `most` requests that the stream gives without waiting."""
    taken = list[Request]()
    while len(taken) < most and stream.num_ready > 0:  # one may use up several that are ready: rows for which no time is left
        request = stream.next_ready()
        if request is None:  # also the end, if the run has no time for more rows
            break
        taken.append(request)
    return taken
