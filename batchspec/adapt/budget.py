"""Time that learning may take from a run: a share of what goes by, saved up a little, cut down while nothing comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable

SAVED_S = 10.0
"""Time is saved up to this at most: rows in flight then wait no longer than that at a stretch."""
LEAST = 1 / 16
"""The share falls to this part of the one that was asked for."""


class Budget:
    """What is spent stays below the share of the time that has passed, but for first slices, whose cost is not known."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """share  of the time, in (0, 1]; 1 is no limit; clock: seconds"""
        self.share, self._asked, self._clock = share, share, clock
        self._at, self._saved = clock(), 0.0

    def allows(self, cost_s: float) -> bool:
        """Whether something that takes `cost_s` may be done now."""
        now = self._clock()
        self._saved = min(max(SAVED_S, cost_s), self._saved + self.share * (now - self._at))
        self._at = now
        return self._asked >= 1 or self._saved >= cost_s

    def spend(self, seconds: float) -> None:
        """It took so long."""
        self._saved -= seconds

    def cut(self) -> None:
        """Nothing came of it: half as much from now on."""
        self.share = max(self.share / 2, LEAST * self._asked)

    def restore(self) -> None:
        """Something did: the whole share again."""
        self.share = self._asked
