"""Whether rounds that verify a part of their drafts pay, by what they made: a trial in the job itself.

An A/B test: phases of rounds that may verify a part and phases of rounds that may not take turns. The tokens a second of two
neighbouring phases are one comparison; a trial ends when the mean of the comparisons is known well enough. Times and tokens are
measured in the run, so they include what the estimates of `draft_lengths.py` leave out: the host's time, which is most of a round
of a small model, and drafts that are accepted more often than estimated. Until the next trial all rounds do what won; where all
drafts are verified, they are not counted on the host either.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

WARM_UP = 64
"""Rounds before each trial, in which drafts are counted."""
PHASE_ROUNDS = 8
LEAST_ROUNDS = 4
"""A comparison needs as many measured rounds of each of its two phases: those after a refill are not measured."""
FEWEST, MOST = 8, 32
"""Number of comparisons of a trial."""
MOST_PHASES = 8 * MOST
"""A trial ends after so many phases, though too few could be compared. With fewer than FEWEST comparisons nothing changes."""
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
    phase: int | None
    """The number of its phase; None: the round is not measured for a trial."""


class Measured(NamedTuple):
    """What the measured rounds of a phase made."""

    num_rounds: int = 0
    tokens: float = 0.0
    """Of a row."""
    seconds: float = 0.0
    row_buckets: frozenset[int] = frozenset()


class PartTrial:
    """Call `next_turn` for each round, then `add` with what it made, in the order of the rounds."""

    def __init__(self) -> None:
        self._phase = 0
        self.restart()

    def restart(self) -> None:
        """Nothing is known: all drafts are verified, until a trial says otherwise."""
        self.pays = False
        self._begin()

    def drop_unfinished(self) -> None:
        """A run begins: phases that began before it are not compared with those after it."""
        self._measured.clear()

    def _begin(self) -> None:
        self._at, self._phase = 0, self._phase + 1  # results of earlier trials have lower numbers
        self._first, self._ended = self._phase, False
        self._measured: dict[int, Measured] = {}
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
        number = (at - WARM_UP) // PHASE_ROUNDS
        if number == MOST_PHASES:
            self._end(pays=float(np.mean(self._gains)) > self._bar if len(self._gains) >= FEWEST else self.pays)
            return self.next_turn()
        self._phase = self._first + number
        return Turn(number % 4 in (0, 3), True, self._phase)  # in this order neither kind is always the later one

    @property
    def _bar(self) -> float:
        """The mean gain above which verifying a part pays."""
        return 0.0 if self.pays else GAIN

    def add(self, phase: int, num_rows: int, tokens: float, seconds: float) -> None:
        """Note the tokens that a live row got on average from a round of this phase, over this row bucket, in so many seconds.

        Not those of all rows together: phases may have different numbers of live rows, and a round over one bucket takes about as
        long for any of them.
        """
        if self._ended or phase < self._first:
            return
        if phase not in self._measured and (phase - self._first) % 2 == 0:
            self._compare(phase - 2)
        sums = self._measured.get(phase, Measured())
        self._measured[phase] = Measured(
            sums.num_rounds + 1, sums.tokens + tokens, sums.seconds + seconds, sums.row_buckets | {num_rows}
        )

    def _compare(self, phase: int) -> None:
        """Compare this phase and the one after it, and end the trial if that is enough.

        Phases over different row buckets, or over several, are not compared: fewer rows make fewer tokens, whatever they verify.
        """
        one, two = self._measured.pop(phase, Measured()), self._measured.pop(phase + 1, Measured())
        if min(one.num_rounds, two.num_rounds) < LEAST_ROUNDS or len(one.row_buckets | two.row_buckets) > 1:
            return
        if min(one.tokens, two.tokens, one.seconds, two.seconds) <= 0:  # as where no token of a phase was kept
            return
        gain = math.log(one.tokens / one.seconds * two.seconds / two.tokens)
        self._gains.append(gain if (phase - self._first) % 4 == 0 else -gain)
        if len(self._gains) < FEWEST:
            return
        mean, error = float(np.mean(self._gains)), float(np.std(self._gains, ddof=1)) / math.sqrt(len(self._gains))
        if abs(mean - self._bar) > SURE * error or len(self._gains) == MOST:
            self._end(pays=mean > self._bar)

    def _end(self, *, pays: bool) -> None:
        self.pays, self._ended, self._at = pays, True, 0
