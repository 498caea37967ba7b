"""Requests that wait for a slot. Not in `engines.py`, because that must not import the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from batchspec.engine.loop.engine_run import EngineRun
from batchspec.engine.slots.open_requests import OpenRequests
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.waiting import WaitingRequests
from batchspec.records import Request
from batchspec.request_stream import ListedRequests, RequestStream


class Arriving:
    """Requests without features: each may enter a slot at once."""

    def __init__(self, arrive: Callable[[Request], RequestState | None]) -> None:
        self.arrive = arrive

    def ready(self, state: RequestState) -> bool:
        return True


def queue_of(
    stream: RequestStream, arrive: Callable[[Request], RequestState | None] = lambda one: RequestState.of(one, 0), *,
    most_prefetched: int = 0,
) -> WaitingRequests:
    return WaitingRequests(stream, cast(OpenRequests, Arriving(arrive)), most_prefetched=most_prefetched)


def waiting(states: Iterable[RequestState]) -> WaitingRequests:
    """The queue of requests whose states a test has made."""
    return queue_of(ListedRequests(cast(Any, states)), lambda state: cast(Any, state))


def count_waiting(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, after each result of every engine of this process, the number of requests that wait for a slot: 0 or 1
    if none are prefetched."""
    counts, take_ahead = list[int](), EngineRun.take_ahead

    def counted(run: EngineRun) -> None:
        take_ahead(run)
        counts.append(run._waiting.num_prefetched + len(run._waiting))

    patch.setattr(EngineRun, "take_ahead", counted)
    return counts
