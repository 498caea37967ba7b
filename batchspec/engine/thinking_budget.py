"""Which rows the host must look at because their thinking budget may be used up: one number a slot, a few numpy calls a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.request_state import RequestState

NEVER = 1 << 62
NO_TOKEN = -2


class ThinkingBudgets:
    """Of the rows in slots that have a budget. A row outside of a thought is looked at when it begins one."""

    def __init__(self, slots: int) -> None:
        self._due = np.full(slots, NEVER, np.int64)
        self._begin_ids = np.full(slots, NO_TOKEN, np.int64)
        self._any = False

    def enter(self, slot: int, num_tokens: int, progress: RequestState) -> None:
        """A row in its slot has this many tokens, prompt included, all of them on the row's own account."""
        thinking = progress.request.thinking
        limited = thinking is not None and thinking.budget is not None
        self._any = self._any or limited
        left = progress.thinking_left() if limited else None
        self._due[slot] = NEVER if left is None else num_tokens + left
        begin_id = thinking.begin_id if limited and thinking is not None else None
        self._begin_ids[slot] = NO_TOKEN if begin_id is None else begin_id

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Compaction: (source, destination) of each row that changes its slot."""
        for source, destination in moves:
            for field in (self._due, self._begin_ids):
                field[destination] = field[source]

    def due(self, slots: NDArray[np.intp], num_tokens: NDArray[np.int64], emitted: NDArray[np.int32]) -> list[int]:
        """Those of `slots` to look at: num_tokens [n] they have now, emitted [n, S] in this round, -1 where there is none."""
        if not self._any:
            return []
        begins = (emitted == self._begin_ids[slots, None]).any(1)
        found: list[int] = slots[(num_tokens >= self._due[slots]) | begins].tolist()
        return found
