"""Finds, for their parent, processes that do not run at all: ranks of a group. A worker without other ranks is a group of one.

A signal has stopped such a process, or a call lets none of its threads run. It cannot end itself, and if it is the leader, the
other ranks just wait for its next message. If only the main thread of a rank hangs, the rank's own watchdog ends it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from batchspec.distributed.channel import LIVENESS_S, Channel
from batchspec.process import load_progress
from batchspec.process.load_progress import Activity

LATER_S = 5.0
"""Seconds that the parent waits after the watchdog's limit: a rank's own watchdog goes first, because it saves the work."""
STILL_S = 4 * LIVENESS_S
"""Seconds without a count after which a rank that ends with its group is taken for the one that the others waited for."""
START_S = 600.0
"""Minimum limit in seconds for a process that is starting: its liveness thread runs only after the imports."""


class SilentRanks:
    """Watches the liveness counters of one group's ranks."""

    def __init__(self, channel: Channel, watchdog_s: float, pids: Sequence[int]) -> None:
        """
        watchdog_s  limit of the ranks' watchdogs in seconds; 0: `find` finds nothing
        pids        the ranks' processes
        """
        self._channel, self._watchdog_s, self._activities = channel, watchdog_s, [Activity(pid) for pid in pids]
        self._counts, self._silent_s = [0] * channel.ranks, [0.0] * channel.ranks
        self._looked_at = _now()

    def find(self) -> list[int]:
        """The ranks whose liveness counter has not changed for LATER_S longer than the limit of their watchdogs, while they
        neither read nor wrote: a call that holds the GIL may be reading a large tensor from a slow disk.

        Call it several times a second. The time between two calls counts as at most one second. If it is longer than PAUSE_S, the
        caller was stopped or the machine was suspended, and every rank gets its whole limit again: a rank may continue later than
        the caller.
        """
        now = _now()
        passed_s, self._looked_at = now - self._looked_at, now
        paused = passed_s > load_progress.PAUSE_S
        for rank in range(self._channel.ranks):
            count = self._channel.liveness_count(rank)
            self._silent_s[rank] += min(passed_s, 2 * LIVENESS_S)
            is_late = self._silent_s[rank] > 2 * LIVENESS_S
            if count != self._counts[rank] or paused or (is_late and self._activities[rank].made_progress()):
                self._silent_s[rank] = 0.0
            self._counts[rank] = count
        if not self._watchdog_s:
            return []
        return [rank for rank, silent_s in enumerate(self._silent_s) if silent_s >= self._limit_s(rank)]

    def is_still(self, rank: int) -> bool:
        """Whether the rank has run before, and not in the last STILL_S seconds, as far as the calls of `find` show."""
        return self._counts[rank] > 0 and self._silent_s[rank] >= STILL_S

    def _limit_s(self, rank: int) -> float:
        return (self._watchdog_s if self._counts[rank] else max(self._watchdog_s, START_S)) + LATER_S


def _now() -> float:
    """Seconds by a clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
