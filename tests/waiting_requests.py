"""Counts the requests that wait for a slot. Not in `engines.py`, because that must not import the scheduler."""

from __future__ import annotations

import pytest

from batchspec.engine.loop.engine_run import EngineRun


def count_waiting(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, after each result of every engine of this process, the number of requests that wait for a slot: 0 or 1
    if none are prefetched."""
    counts, take_ahead = list[int](), EngineRun.take_ahead

    def counted(run: EngineRun) -> None:
        take_ahead(run)
        counts.append(run._requests.num_taken + len(list(run._allocator._waiting)))

    patch.setattr(EngineRun, "take_ahead", counted)
    return counts
