"""The time that learning may take from a run: a share of the elapsed time, smaller while learning makes no progress."""

from __future__ import annotations

import time
from collections.abc import Callable

SAVED_S = 10.0
"""Most unused time that is carried over: rows in flight never wait longer than this at once."""
LEAST = 1 / 16
"""The share falls no lower than this part of the configured one."""


class Budget:
    """Keeps the time spent below the share of the elapsed time, except for first slices, whose cost is unknown."""

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
        """A slice took so long."""
        self._saved -= seconds

    def cut(self) -> None:
        """No progress: half the share from now on."""
        self.share = max(self.share / 2, LEAST * self._asked)

    def restore(self) -> None:
        """Progress: the whole share again."""
        self.share = self._asked
