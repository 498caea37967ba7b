"""How long a round takes, by its row bucket and width, from measured times.

    seconds = base_s + experts_s + context_tokens * token_s

base_s is the time of a round over dead rows, measured once for each graph. experts_s is the time for the experts that live rows
read in addition, negative if they read fewer (`expert_reads.py`), 0 without experts. token_s is the time that one more context
token adds (attention): the minimum of the newest measurements. For a row bucket without measurements those of the nearest one
count. A width without measurements is like the one with the nearest number of verified drafts, times the ratio of the two in the
nearest row bucket that has both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.rounds.expert_reads import ExpertReads
from batchspec.engine.step import RoundWidth

NUM_TIMES = 5
"""Number of measurements kept of each width. Their minimum is used: with the mean, a width penalised by one host stall would
rarely be sampled again."""
SIMILAR_ROWS = 4
"""A ratio of two widths holds for row buckets up to so many times larger or smaller: among few rows launches are most of it."""
LEAST_SHARE = 0.05
"""A round over few live rows is taken to need at least this share of base_s, however few experts it reads."""


class RoundTimes:
    """Measured times of rounds. A round with drafts always prepares the next draft; one without does if `prepare_next`."""

    def __init__(self, experts: ExpertReads | None = None, num_nodes: int | None = None) -> None:
        """num_nodes  of a tree: nodes that a round with drafts verifies besides a row's newest token; None: chains"""
        self._experts, self._num_nodes = experts, num_nodes
        self._base: dict[tuple[int, RoundWidth, bool], float] = {}
        self._token_s: dict[int, dict[RoundWidth, deque[float]]] = {}
        self._least: dict[int, dict[RoundWidth, float]] = {}

    def __bool__(self) -> bool:
        """Whether any round was timed."""
        return bool(self._base)

    def knows(self, num_rows: int, width: RoundWidth) -> bool:
        """Whether a round of this row bucket and width was timed."""
        return (num_rows, width, width.draft_len > 0) in self._base

    def set_base(self, num_rows: int, width: RoundWidth, seconds: float, *, prepare_next: bool) -> None:
        """Set the time of a round over `num_rows` dead rows."""
        self._base[num_rows, width, prepare_next or width.draft_len > 0] = seconds

    def add(
        self, num_rows: int, width: RoundWidth, context_tokens: int, seconds: float, *, prepare_next: bool, live_rows: int
    ) -> None:
        """Add the measured seconds of a round. live_rows: how many of its rows were live."""
        if not context_tokens:
            return
        timed_s = self._base[num_rows, width, prepare_next or width.draft_len > 0]
        base = float(self._with_experts(num_rows, [width], np.array([timed_s]), live_rows)[0])
        newest = self._token_s.setdefault(num_rows, {}).setdefault(width, deque(maxlen=NUM_TIMES))
        newest.append(max(0.0, seconds - base) / context_tokens)
        self._least.setdefault(num_rows, {})[width] = min(newest)

    # A few numbers in each round: lists are faster than arrays.

    def seconds(self, num_rows: int, widths: Sequence[RoundWidth], context_tokens: int, live_rows: int) -> list[float]:
        """Expected seconds of a round, for each of these widths. All of them must have been timed."""
        base = [self._base[num_rows, width, width.draft_len > 0] for width in widths]
        if self._experts is not None:
            base = self._with_experts(num_rows, widths, np.array(base), live_rows).tolist()
        if not context_tokens or not self._least:
            return base
        at = num_rows if num_rows in self._least else min(self._least, key=lambda rows: abs(math.log(rows / num_rows)))
        return [base_s + context_tokens * self._added_s(at, width) for base_s, width in zip(base, widths, strict=True)]

    def _added_s(self, num_rows: int, width: RoundWidth) -> float:
        """token_s of a row bucket with measurements."""
        least = self._least[num_rows]
        if width in least:
            return least[width]
        nearest = min(least, key=lambda one: abs(one.verified - width.verified))
        found = least[nearest]
        similar = [
            rows for rows, timed in self._least.items()
            if timed.get(nearest) and width in timed and 1 / SIMILAR_ROWS <= rows / num_rows <= SIMILAR_ROWS
        ]
        if not similar:
            return found
        timed = self._least[min(similar, key=lambda rows: abs(math.log(rows / num_rows)))]
        return found * timed[width] / timed[nearest]

    def _with_experts(
        self, num_rows: int, widths: Sequence[RoundWidth], base_s: NDArray[np.float64], live_rows: int
    ) -> NDArray[np.float64]:
        """base_s + experts_s: the time of a round without attention."""
        if self._experts is None:
            return base_s
        verified = [width.verified if self._num_nodes is None or not width.draft_len else self._num_nodes for width in widths]
        tokens = np.array([round(live_rows * (1 + drafts)) for drafts in verified])
        added = self._experts.added_s(num_rows, widths, tokens)
        seconds: NDArray[np.float64] = np.maximum(base_s + added, LEAST_SHARE * base_s)
        return seconds
