"""Measures in a run how long rounds take, from the arrival of one round's result to that of the next, and learns from it the
fixed part of a refill's time: the part that does not grow with its tokens.

A refill is worth it once slots have been idle for as long as its fixed time. That time cannot be known before the run: it
includes the gap on the device while the host prepares the refill, which other threads and processes lengthen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.rounds.records import PendingResult
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.step import RoundWidth

FORGETTING = 0.98
"""Weight of a refill relative to the next one: about the last 50 refills count."""
PRIOR = 0.3
"""Weight of each of the two assumed refills, of no tokens and of PRIOR_TOKENS, relative to a measured one."""
PRIOR_TOKENS = 2048
"""Tokens of the larger assumed refill."""
NEWEST = 0.1
"""Weight of the newest round in the mean time of a round."""
FIRST = 5
"""Of so many first rounds of a width only the shortest counts: one of them may include the capture of its graph."""


@dataclass(frozen=True, slots=True)
class RoundTime:
    """The time of a round and of the prefill passes between it and the round before."""

    seconds: float
    num_prefilled: int
    """Tokens of those passes; 0: the round directly follows another one."""


class RoundClock:
    """Call `add` with each result, in the order of the launches. A new run needs a new clock."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None
        self._num_prefilled = 0

    def add(self, launch: UnreadLaunch, result: PendingResult) -> RoundTime | None:
        """The time since the result of the previous round.

        None for a prefill pass and for the first round.
        """
        if launch.is_prefill:
            self._num_prefilled += launch.num_prefilled
            return None
        last, num_prefilled = self._last, self._num_prefilled
        self._last, self._num_prefilled = result.arrived, 0
        return None if last is None else RoundTime(result.seconds_since(last), num_prefilled)


class RefillTimes:
    """Call `add` with each time that a `RoundClock` measures. All times are seconds."""

    def __init__(self, cost: PrefillCost, num_slots: int) -> None:
        """
        cost       of passes, in seconds, with the time of a replay
        num_slots  rows of the rounds between which slots are refilled
        """
        assert cost.replay is not None, "only passes that are replayed are learned"
        self._cost, self._num_slots = cost, num_slots
        # Normal equations of seconds = fixed + slope * tokens.
        none, none_sums = _equations(0, cost.replay)
        many, many_sums = _equations(PRIOR_TOKENS, cost.replay + PRIOR_TOKENS * cost.token)
        self._prior, self._prior_sums = PRIOR * (none + many), PRIOR * (none_sums + many_sums)
        self._matrix, self._sums = np.zeros((2, 2)), np.zeros(2)
        self.fixed_s = cost.replay
        """Fixed seconds of a refill, without those of its tokens."""
        self._num_timed: Counter[RoundWidth] = Counter()
        self.round_s: dict[RoundWidth, float] = {}
        """By width, the mean seconds of a round over all slots that directly follows another round."""

    def add(self, launch: UnreadLaunch, took: RoundTime) -> None:
        """Add the time of a round, and of the passes before it."""
        if launch.num_rows != self._num_slots:
            return
        if not took.num_prefilled:
            self._add_round(launch.width, took.seconds)
        elif self._num_timed[launch.width] >= FIRST:
            self._add_refill(took.num_prefilled, max(0.0, took.seconds - self.round_s[launch.width]))

    def _add_round(self, width: RoundWidth, seconds: float) -> None:
        mean = self.round_s.get(width, seconds)
        self._num_timed[width] += 1
        few = self._num_timed[width] <= FIRST
        self.round_s[width] = min(seconds, mean) if few else mean + NEWEST * (min(seconds, 2 * mean) - mean)

    def _add_refill(self, num_tokens: int, seconds: float) -> None:
        if seconds >= self._cost.least:  # a pass that was launched kernel by kernel, or the host was busy with something else
            return
        matrix, sums = _equations(num_tokens, seconds)
        self._matrix, self._sums = FORGETTING * self._matrix + matrix, FORGETTING * self._sums + sums
        matrix, sums = self._prior + self._matrix, self._prior_sums + self._sums
        fixed, slope = np.linalg.solve(matrix, sums).tolist()
        if slope < self._cost.token:  # a token takes at least as long as in a full pass
            fixed = (sums[0] - self._cost.token * matrix[0, 1]) / matrix[0, 0]
        self.fixed_s = max(0.0, float(fixed))


def _equations(num_tokens: int, seconds: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Matrix and right side of the normal equations of one refill."""
    line = np.array([1.0, num_tokens])
    return np.outer(line, line), line * seconds
