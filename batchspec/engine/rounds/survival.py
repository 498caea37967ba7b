"""How many drafts survive with which probability, and so how many tokens a round with any number of places is expected to emit.

A draft survives if it and all drafts of its row before it are accepted. Rounds count their drafts by position and by level of
survival (`kernels/rounds/allocate_drafts.py`); the counts of earlier rounds fade with every round, also with those that draft
nothing: after many of these the next counts are trusted alone.
Legend: K draft_len.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from batchspec.kernels.rounds.allocate_drafts import LEVELS, PER_HALF

LEAST_WEIGHT = 2.0**-10
"""Of earlier counts when new ones come, however long that took: they never vanish."""
RENEW_EVERY = 16
"""Least number of rounds between two times at which sums are computed anew."""
PROBABILITY: NDArray[np.float64] = np.exp2(-np.arange(LEVELS) / PER_HALF)


class Survival:
    """Counts of drafts by position and level of survival."""

    def __init__(self, draft_len: int) -> None:
        self._draft_len = draft_len
        self.forget()

    def forget(self) -> None:
        """Discard all counts."""
        self._counts = np.zeros((self._draft_len, LEVELS))
        self._rows = np.zeros(self._draft_len)
        self._weight = np.ones(self._draft_len)  # of the counts of each position, when new ones come
        self._since_renewed = 0
        self._sums: list[tuple[list[float], list[float]]] = []

    def fade(self, decay: float) -> None:
        """A round is launched: all counts weigh `decay` times as much."""
        self._weight *= decay
        self._since_renewed += 1

    def observe(self, levels: NDArray[np.int32], num_rows: int) -> None:
        """Count a round's drafts. levels: int32 [K, LEVELS], of so many live rows."""
        if not num_rows:
            return
        width = len(levels)
        is_deeper, weight = self._rows[width - 1] == 0, self._weight[:width].clip(LEAST_WEIGHT)
        self._counts[:width] = weight[:, None] * self._counts[:width] + levels
        self._rows[:width] = weight * self._rows[:width] + num_rows
        self._weight[:width] = 1
        if is_deeper or self._since_renewed >= RENEW_EVERY:
            self._renew()

    @property
    def known_len(self) -> int:
        """The largest K whose drafts were counted."""
        return len(self._sums)

    def accepted(self, draft_len: int, places: float) -> float:
        """Expected number of accepted drafts per row, if a round drafts `draft_len` (1..known_len) tokens for each row and, on
        average, verifies `places` of them per row: those most likely to survive."""
        drafts, survivors = self._sums[draft_len - 1]
        at = bisect_left(drafts, places)
        if at == len(drafts):
            return survivors[-1]
        below = drafts[at - 1] if at else 0.0
        share = (places - below) / (drafts[at] - below)
        before = survivors[at - 1] if at else 0.0
        return before + share * (survivors[at] - before)

    def _renew(self) -> None:
        """For each K that was counted: drafts per row up to each level, and how many of them survive."""
        self._since_renewed = 0
        known = int(np.count_nonzero(self._rows))
        per_row = (self._counts[:known] / self._rows[:known, None]).cumsum(0)
        self._sums = [(line.cumsum().tolist(), (line * PROBABILITY).cumsum().tolist()) for line in per_row]
