"""Finds the ranks of a group whose processes do not run at all. The parent of the ranks calls it.

Such a process was stopped by a signal, or a call lets none of its threads run. It cannot end itself, and if it is the leader, the
other ranks just wait for its next message. A rank of which only the main thread hangs is ended by its own watchdog.
"""

from __future__ import annotations

import time

from batchspec.distributed.channel import ALIVE_S, Channel

LATER_S = 5.0
"""Seconds that the ranks' own watchdogs have to end first: they save the work."""
START_S = 600.0
"""Seconds that a process has to start, at least: until it has imported what its first sign of life needs."""


class SilentRanks:
    """The ranks of one group, as their parent sees them."""

    def __init__(self, channel: Channel, watchdog_s: float) -> None:
        """watchdog_s: the limit of the ranks' watchdogs; 0: nothing is ever found"""
        self._channel, self._watchdog_s = channel, watchdog_s
        self._signs, self._silent_s = [0] * channel.ranks, [0.0] * channel.ranks
        self._looked_at = time.monotonic()

    def find(self) -> list[int]:
        """The ranks that have shown no life for a little longer than their watchdogs wait.

        Call it several times a second. Of a longer pause between two calls one second counts, because whatever stopped the caller
        may have stopped the ranks, too.
        """
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, 2 * ALIVE_S), now
        if not self._watchdog_s:
            return []
        for rank in range(self._channel.ranks):
            signs = self._channel.signs_of_life(rank)
            self._silent_s[rank] = self._silent_s[rank] + passed_s if signs == self._signs[rank] else 0.0
            self._signs[rank] = signs
        return [rank for rank, silent_s in enumerate(self._silent_s) if silent_s >= self._limit_s(rank)]

    def _limit_s(self, rank: int) -> float:
        return (self._watchdog_s if self._signs[rank] else max(self._watchdog_s, START_S)) + LATER_S
