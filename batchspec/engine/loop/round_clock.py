"""Measures how long rounds take, from the arrival of one round's result to that of the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchspec.engine.rounds.results import PendingResult
from batchspec.engine.slots.launch import UnreadLaunch


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
