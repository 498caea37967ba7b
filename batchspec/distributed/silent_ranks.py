"""Finds the ranks of a group whose processes do not run at all, for the parent of the ranks.

A signal has stopped such a process, or a call lets none of its threads run. It cannot end itself, and if it is the leader, the
other ranks just wait for its next message. If only the main thread of a rank hangs, the rank's own watchdog ends it.
"""

from __future__ import annotations

import time

from batchspec.distributed.channel import LIVENESS_S, Channel

LATER_S = 5.0
"""Seconds that the parent waits after the watchdog's limit: a rank's own watchdog goes first, because it saves the work."""
START_S = 600.0
"""Minimum limit in seconds for a process that is starting: its liveness thread runs only after the imports."""


class SilentRanks:
    """Watches the liveness counters of one group's ranks."""

    def __init__(self, channel: Channel, watchdog_s: float) -> None:
        """watchdog_s: limit of the ranks' watchdogs in seconds; 0: `find` finds nothing"""
        self._channel, self._watchdog_s = channel, watchdog_s
        self._counts, self._silent_s = [0] * channel.ranks, [0.0] * channel.ranks
        self._looked_at = time.monotonic()

    def find(self) -> list[int]:
        """The ranks whose liveness counter has not changed for LATER_S longer than the limit of their watchdogs.

        Call it several times a second. A longer pause between two calls counts as one second, because whatever stopped the caller
        may have stopped the ranks too.
        """
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, 2 * LIVENESS_S), now
        if not self._watchdog_s:
            return []
        for rank in range(self._channel.ranks):
            count = self._channel.liveness_count(rank)
            self._silent_s[rank] = self._silent_s[rank] + passed_s if count == self._counts[rank] else 0.0
            self._counts[rank] = count
        return [rank for rank, silent_s in enumerate(self._silent_s) if silent_s >= self._limit_s(rank)]

    def _limit_s(self, rank: int) -> float:
        return (self._watchdog_s if self._counts[rank] else max(self._watchdog_s, START_S)) + LATER_S
