"""What the host knows of the rows in the slots, one array a field: a round of a thousand rows is read in a few numpy calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.request_state import RequestState

Log = NDArray[np.int32]
"""[R, 5+K] of a round, see `round.RoundResult`."""
Slots = NDArray[np.intp]


class TokenBuffer:
    """Output tokens and counts of each slot's row since it was placed; `close` adds them to the row's own account."""

    def __init__(self, slots: int, max_len: int, draft_len: int) -> None:
        self._tokens = np.zeros((slots, max_len), np.int32)
        self._num_tokens = np.zeros(slots, np.int64)
        self._num_discarded = np.zeros(slots, np.int64)
        self._accepted = np.zeros((slots, draft_len + 1), np.int64)
        self._drafted = np.zeros((slots, draft_len + 1), np.int64)
        self._num_prefills = np.zeros(slots, np.int64)

    def add_prefill(self, slots: Slots, log: Log) -> None:
        """The token that a prefill emitted for each of `slots`, none where it failed; line i of `log` is that of slots[i]."""
        self._num_prefills[slots] += 1
        emitted = log[:, 2] > 0
        there = slots[emitted]
        self._tokens[there, self._num_tokens[there]] = log[emitted, 4]
        self._num_tokens[there] += 1

    def add_round(self, slots: Slots, log: Log) -> None:
        """One round of live rows; a slot comes once."""
        accepted, drafted, kept = log[:, 0], log[:, 1], log[:, 2]
        self._accepted[slots, accepted] += 1
        self._drafted[slots, drafted] += 1
        self._num_discarded[slots] += accepted + 1 - kept
        before = self._num_tokens[slots]
        for j in range(int(kept.max(initial=0))):
            there = kept > j
            self._tokens[slots[there], before[there] + j] = log[there, 4 + j]
        self._num_tokens[slots] += kept

    def close(self, slot: int, progress: RequestState) -> None:
        """The row leaves its slot: its tokens and counts go to `progress`, the slot's own start anew."""
        progress.tokens += self._tokens[slot, : self._num_tokens[slot]].tolist()
        progress.num_prefills += int(self._num_prefills[slot])
        progress.num_discarded += int(self._num_discarded[slot])
        progress.add_counts(self._accepted[slot].tolist(), self._drafted[slot].tolist())
        for field in self._counts:
            field[slot] = 0

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Compaction: (source, destination) of each row that changes its slot; destinations are empty."""
        for source, destination in moves:
            self._tokens[destination] = self._tokens[source]
            for field in self._counts:
                field[destination] = field[source]
                field[source] = 0

    @property
    def _counts(self) -> tuple[NDArray[np.int64], ...]:
        return self._num_tokens, self._num_prefills, self._num_discarded, self._accepted, self._drafted
