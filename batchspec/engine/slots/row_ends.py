"""The end of a row: it leaves its slot, and its request has ended."""

from __future__ import annotations

import time

from batchspec.engine.slots.allocator import SlotAllocator
from batchspec.engine.slots.open_requests import OpenRequests
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RunFeatures
from batchspec.kernels.rounds.accept import HELD


class RowEnds:
    """Ends rows: `end` those that the device or a feature has ended, `fail` those that a feature has failed."""

    def __init__(self, allocator: SlotAllocator, features: RunFeatures, requests: OpenRequests) -> None:
        self._allocator, self._features, self._requests = allocator, features, requests

    def end(self, state: RequestState, finish: int, now: float) -> None:
        """Take a request that has ended out of its slot.

        finish  the device's reason; 0 if a feature ended it
        now     seconds of the host's clock
        If it ended with an error, later rows share no page of its prompt: an infinite key in one of these pages may be the cause.
        All pages of its prefix are forgotten, even those that other rows read without an error: a query to which the infinite
        key is masked, or gets no weight, has finite results.
        """
        slot = state.slot
        self._allocator.release(state, on_device=finish not in (0, HELD))
        if state.finish_reason is None:
            state.set_finish_reason(finish)
        if state.finish_reason == "error":
            self._allocator.pools.forget_prefix(state.prefix_hashes or ())
        self._requests.end(state, slot=slot, now=now)

    def fail(self, state: RequestState) -> None:
        """End a row that one of its features has failed, in a slot or not. Its features examine its newest tokens first: if these
        end it, it ends with their reason. Otherwise the number of tokens a round adds would decide which of the two it is."""
        error, state.finish_reason, state.error = state.error, None, None
        slot = state.slot
        if slot >= 0:
            self._allocator.slots.flush(state)
        self._features.examine(state)
        if state.finish_reason is None:
            state.fail(error)
        if slot >= 0:
            self._allocator.release(state)
        self._requests.end(state, slot=slot, now=time.perf_counter())
