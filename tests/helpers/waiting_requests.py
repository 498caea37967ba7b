"""Requests that wait for a slot. Not in `engines.py`, because that must not import the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

from batchspec.engine.loop.engine_run import EngineRun
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.waiting import WaitingRequests
from batchspec.request_stream import ListedRequests


def waiting(states: Iterable[RequestState]) -> WaitingRequests:
    """The queue of requests whose states a test has made."""
    return WaitingRequests(ListedRequests(cast(Any, states)), lambda state: cast(Any, state), lambda _: True)


def count_waiting(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, after each result of every engine of this process, the number of requests that wait for a slot: 0 or 1
    if none are prefetched."""
    counts, take_ahead = list[int](), EngineRun.take_ahead

    def counted(run: EngineRun) -> None:
        take_ahead(run)
        counts.append(run._waiting.num_prefetched + len(run._waiting))

    patch.setattr(EngineRun, "take_ahead", counted)
    return counts
