"""The time budget of learning: a share of the elapsed time, halved when learning makes no progress."""

from __future__ import annotations

import time
from collections.abc import Callable

SAVED_S = 10.0
"""Maximum unused time that is carried over, so that rows in flight never wait longer than this at once."""
LEAST = 1 / 16
"""Lower bound of the share, relative to the configured one."""


class Budget:
    """Keeps the time spent below the share of the elapsed time, except for first slices, whose cost is unknown."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        share  share of the elapsed time, in (0, 1]; 1 means no limit
        clock  seconds, monotonic
        """
        self.share, self._asked, self._clock = share, share, clock
        self._at, self._saved = clock(), 0.0

    def allows(self, cost_s: float) -> bool:
        """Whether a slice that takes `cost_s` may run now."""
        now = self._clock()
        self._saved = min(max(SAVED_S, cost_s), self._saved + self.share * (now - self._at))
        self._at = now
        return self._asked >= 1 or self._saved >= cost_s

    def spend(self, seconds: float) -> None:
        """Record that a slice took so long."""
        self._saved -= seconds

    def cut(self) -> None:
        """Halve the share, after a measurement without progress."""
        self.share = max(self.share / 2, LEAST * self._asked)

    def restore(self) -> None:
        """Restore the configured share, after progress."""
        self.share = self._asked
