"""Reads streams of requests as an engine does."""

from __future__ import annotations

from collections.abc import Iterator

from batchspec.records import Request
from batchspec.request_stream import RequestStream


def answers_of(stream: RequestStream) -> Iterator[Request | None]:
    """Every answer of a stream until its end; None: nothing was ready."""
    while (request := stream.next_ready()) is not None or not stream.ended:
        yield request


def all_of(stream: RequestStream) -> Iterator[Request]:
    """All requests of a stream in which nothing is waited for."""
    for request in answers_of(stream):
        assert request is not None
        yield request
