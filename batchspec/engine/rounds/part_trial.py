"""Whether rounds that verify a part of their drafts pay, by what they made: a trial in the job itself.

Blocks of rounds that may verify a part and blocks of rounds that may not take turns. The tokens a second of two neighbouring
blocks are one comparison; a trial ends when the mean of the comparisons is known well enough. Times and tokens are those of the
run, so they hold whatever `draft_lengths.py` computes without: the host's time, which is most of a round of a small model, and
places of which less is expected than comes. Until the next trial all rounds do what won; where all drafts are verified, they are
not counted on the host either.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

WARM_UP = 64
"""Rounds before each trial, in which drafts are counted."""
BLOCK = 8
LEAST_ROUNDS = 4
"""A comparison needs as many measured rounds of each of its two blocks: those after a refill are not measured."""
FEWEST, MOST = 8, 32
"""Number of comparisons of a trial."""
MOST_BLOCKS = 8 * MOST
"""A trial that has not ended after so many blocks, because hardly any round could be measured, is lost."""
SURE = 2.0
"""A trial ends when its mean is so many standard errors away from the bar."""
GAIN = 0.01
"""Relative gain that makes verifying a part pay; once it pays, it does until it loses."""
HOLD = 4096
"""Rounds from the end of a trial to the warm-up of the next one."""


class Turn(NamedTuple):
    """What a round does for the trial."""

    may_verify_part: bool
    counts_drafts: bool
    """Whether the host reads how many drafts survive."""
    block: int | None
    """The block that it belongs to; None: no trial is under way."""


class PartTrial:
    """Call `next_turn` for each round, then `add` with what it made, in the order of the rounds."""

    def __init__(self) -> None:
        self._block = 0
        self.restart()

    def restart(self) -> None:
        """Nothing is known: all drafts are verified, until a trial says otherwise."""
        self.pays = False
        self._begin()

    def _begin(self) -> None:
        self._at, self._block = 0, self._block + 1  # results of earlier trials have lower numbers
        self._first, self._ended = self._block, False
        self._sums: dict[int, tuple[int, float, float]] = {}
        self._gains: list[float] = []

    def next_turn(self) -> Turn:
        """The turn of the next round."""
        if self._ended and self._at == HOLD:
            self._begin()
        at, self._at = self._at, self._at + 1
        if self._ended:
            return Turn(self.pays, self.pays, None)
        if at < WARM_UP:
            return Turn(self.pays, True, None)
        number = (at - WARM_UP) // BLOCK
        if number == MOST_BLOCKS:
            self._end(pays=False)
            return self.next_turn()
        self._block = self._first + number
        return Turn(number % 4 in (0, 3), True, self._block)  # in this order neither kind is always the later one

    def add(self, block: int, tokens: float, seconds: float) -> None:
        """Note what a round of this block made in so many seconds."""
        if self._ended or block < self._first:
            return
        if block not in self._sums and (block - self._first) % 2 == 0:
            self._compare(block - 2)
        rounds, all_tokens, all_seconds = self._sums.get(block, (0, 0.0, 0.0))
        self._sums[block] = rounds + 1, all_tokens + tokens, all_seconds + seconds

    def _compare(self, block: int) -> None:
        """Compare this block and the one after it, and end the trial if that is enough."""
        none = (0, 0.0, 0.0)
        two = self._sums.pop(block, none), self._sums.pop(block + 1, none)
        if min(rounds for rounds, _, _ in two) < LEAST_ROUNDS:
            return
        rates = [tokens / seconds for _, tokens, seconds in two]
        part_first = (block - self._first) % 4 == 0
        self._gains.append(math.log(rates[0] / rates[1]) * (1 if part_first else -1))
        if len(self._gains) < FEWEST:
            return
        mean, error = float(np.mean(self._gains)), float(np.std(self._gains, ddof=1)) / math.sqrt(len(self._gains))
        bar = 0.0 if self.pays else GAIN
        if abs(mean - bar) > SURE * error or len(self._gains) == MOST:
            self._end(pays=mean > bar)

    def _end(self, *, pays: bool) -> None:
        self.pays, self._ended, self._at = pays, True, 0
