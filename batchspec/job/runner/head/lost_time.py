"""How much time a head has lost since it last paid, by what the rounds of the job accept with it.

The time of a window of rounds is compared with what the drafter before the head would have taken for it. Windows add up what the
head loses and gains, to no less than 0 in all (CUSUM; Page 1954). Letting the head go once it has lost as much as that costs
loses at most twice what the best choice would, however acceptance changes, and a few poor ones do not end a good head.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.job.report.trained_head import Phase
from batchspec.job.runner.head.forecast import Prospect
from batchspec.packing.expected_drafts import accepted_of_most

WINDOW_S, WINDOW_ROUNDS = 30.0, 4096
"""A window has at least so many seconds, and rounds of rows."""


class LostTime:
    """Call `window` after each round, and `add` with what each window was worth."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._until = Phase()

    def window(self, total: Phase) -> Phase | None:
        """What rounds did since the last window; None: too little. total: all that they did with the head."""
        new = total.since(self._until)
        if new.seconds < WINDOW_S or new.row_rounds < WINDOW_ROUNDS:
            return None
        self._until = replace(total)
        return new

    def add(self, seconds: float, found: Prospect) -> None:
        """seconds: of a window; found: of rows that accept as many drafts as those of this window."""
        share = found.without_s / found.with_s if found.with_s else 1.0
        self.seconds = max(0.0, self.seconds + seconds * (1.0 - share))


def accepted_of(phase: Phase, most: int) -> float:
    """Accepted drafts of a row in a round that verifies `most`, of a drafter that always drafts as many as are verified."""
    rounds = max(1, phase.row_rounds)
    return accepted_of_most(phase.accepted / rounds, phase.drafted / rounds, most)
