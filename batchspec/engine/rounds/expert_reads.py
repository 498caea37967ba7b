"""The number of experts that a round reads per layer, and the time that reading them adds. More tokens read more experts.

T tokens that choose k of E experts independently read E (1 - (1 - k/E)^T) experts on average. Tokens of one text choose similar
experts and read fewer: as many as c T independent tokens, where 0 < c <= 1 is the correlation factor. The run measures c: after
some rounds the device reports how many experts of each layer had tokens, and c is fitted to these counts. Rounds that read nearly
all experts are left out, because they would give nearly the same count for every c.

A round of R rows and of width W was timed before the job's first row, over dead rows whose tokens went through experts as those
of live rows do, and read n[R, W] experts per layer. A round with T live tokens takes this many seconds more:

    added_s[R, W] = s (E (1 - (1 - k/E)^(c T)) - n[R, W])

added_s is negative if the round reads fewer experts: tokens of dead rows and padding go through none, and tokens of one text
choose similar experts. s is the time to read one more expert in every layer, from two timed rounds that differ only in the number
of experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.step import RoundWidth

COUNT_EVERY = 32
"""Number of rounds between two counts; a power of two."""
SATURATED = 0.97
"""A count of at least this share of the experts is ignored."""
HALF_LIFE = 64
"""A count weighs half as much after this many newer counts."""


def counted(num_round: int) -> bool:
    """Whether the experts of round number `num_round`, from 1, are counted: rounds 1, 2, 4, 8, 16, then every 32nd."""
    return num_round % COUNT_EVERY == 0 or (num_round < COUNT_EVERY and num_round & (num_round - 1) == 0)


class ExpertReads:
    """The fitted correlation factor and the cost of an expert, for the rounds of one run; see the module's docstring."""

    def __init__(self, num_experts: int, top_k: int, correlation: float = 1.0) -> None:
        """correlation: the factor c to use until a count is available."""
        self._num_experts, self._missed = num_experts, math.log1p(-top_k / num_experts) if top_k < num_experts else -math.inf
        self._correlation, self._weight, self._sum = correlation, 0.0, 0.0
        self._read: dict[tuple[int, RoundWidth], float] = {}
        self.expert_s = 0.0
        """s: seconds that reading one more expert in every layer adds to a round."""

    @property
    def correlation(self) -> float:
        """The factor c: the decaying mean over the counts, or the given factor before the first usable count."""
        return self._sum / self._weight if self._weight else self._correlation

    def expected(self, tokens: NDArray[np.int64] | Sequence[int]) -> NDArray[np.float64]:
        """The number of experts per layer that rounds of these numbers of tokens are expected to read, in the same shape."""
        chosen: NDArray[np.float64] = -np.expm1(self._missed * self.correlation * np.asarray(tokens, np.float64))
        return self._num_experts * chosen

    def observe(self, counts: NDArray[np.int32], tokens: int) -> None:
        """Fit c to a round of `tokens` live tokens. counts: int32 [layers], experts of each layer that had tokens."""
        share = float(counts.mean()) / self._num_experts
        if not 0 < share < SATURATED or not tokens:
            return
        decay = 0.5 ** (1 / HALF_LIFE)
        self._weight = decay * self._weight + 1
        self._sum = decay * self._sum + min(1.0, math.log1p(-share) / (self._missed * tokens))

    def set_base(self, num_rows: int, width: RoundWidth, counts: NDArray[np.int32]) -> None:
        """Set n[num_rows, width] from the timed round over dead rows. counts: int32 [layers], experts that had tokens."""
        self._read[num_rows, width] = float(counts.mean())

    def set_cost(self, seconds: float, num_experts: float) -> None:
        """Set s from two timed rounds: the second read `num_experts` more experts per layer and took `seconds` longer.

        If they differ by less than one expert per layer, they tell nothing about the cost: s is 0.
        """
        self.expert_s = max(0.0, seconds / num_experts) if num_experts >= 1 else 0.0

    def added_s(self, num_rows: int, widths: Sequence[RoundWidth], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """added_s of the module's docstring for each width, float64 [len(widths)]; 0 where no round was timed.

        num_rows  row bucket
        tokens    number of live tokens of a round of each width
        """
        expected = self.expected(tokens)
        read = [self._read.get((num_rows, width), own) for width, own in zip(widths, expected, strict=True)]
        added: NDArray[np.float64] = self.expert_s * (expected - np.array(read))
        return added
