"""How many experts of a layer a round reads, and what each of them costs: a mixture of experts reads more with more tokens.

T tokens that choose k of E experts independently read E (1 - (1 - k/E)^T) on average. Tokens of one text are alike, so they read
fewer: as many as c T independent ones, with c the correlation factor, 0 < c <= 1. It is fitted to counts of the run: of some
rounds the device reports how many experts of each layer had tokens. Rounds that read nearly all experts say nothing of c.

    added_s[R, K] = s (E (1 - (1 - k/E)^(c R (K + 1))) - n[R, K])

is what a round of R rows takes more than the round over dead rows that was timed, which read n experts a layer; s is the time of
one expert in all layers, from two timings that differ in the number of experts alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

COUNT_EVERY = 32
"""Rounds between two counts."""
SATURATED = 0.97
"""Share of the experts above which a count is left out."""
HALF_LIFE = 64
"""Counts after which one weighs half."""


class ExpertReads:
    def __init__(self, num_experts: int, top_k: int, correlation: float = 1.0) -> None:
        """correlation: the factor until rounds were counted."""
        self._num_experts, self._missed = num_experts, math.log1p(-top_k / num_experts) if top_k < num_experts else -math.inf
        self._correlation, self._weight, self._sum = correlation, 0.0, 0.0
        self._read: dict[tuple[int, int], float] = {}
        self.expert_s = 0.0
        """Seconds that one more expert, of every layer, adds to a round."""

    @property
    def correlation(self) -> float:
        """The mean over the newest counts, or what was given where none says anything."""
        return self._sum / self._weight if self._weight else self._correlation

    def expected(self, tokens: NDArray[np.int64] | Sequence[int]) -> NDArray[np.float64]:
        """Experts of a layer that rounds of so many tokens read."""
        chosen: NDArray[np.float64] = -np.expm1(self._missed * self.correlation * np.asarray(tokens, np.float64))
        return self._num_experts * chosen

    def observe(self, counts: NDArray[np.int32], tokens: int) -> None:
        """counts int32 [layers]: experts of each layer that had tokens in a round of `tokens` tokens."""
        share = float(counts.mean()) / self._num_experts
        if not 0 < share < SATURATED:
            return
        decay = 0.5 ** (1 / HALF_LIFE)
        self._weight = decay * self._weight + 1
        self._sum = decay * self._sum + min(1.0, math.log1p(-share) / (self._missed * tokens))

    def set_base(self, num_rows: int, draft_len: int, counts: NDArray[np.int32]) -> None:
        """counts int32 [layers] of the round over dead rows that was timed."""
        self._read[num_rows, draft_len] = float(counts.mean())

    def set_cost(self, seconds: float, counts: float) -> None:
        """So many more experts of each layer took so many seconds more."""
        self.expert_s = max(0.0, seconds / counts) if counts > 0 else 0.0

    def added_s(self, num_rows: int, draft_lens: NDArray[np.int64]) -> NDArray[np.float64]:
        """See the module's docstring; float64 [len(draft_lens)], never below 0."""
        read = np.array([self._read.get((num_rows, int(k)), math.inf) for k in draft_lens])
        added: NDArray[np.float64] = self.expert_s * np.maximum(0.0, self.expected(num_rows * (draft_lens + 1)) - read)
        return added
