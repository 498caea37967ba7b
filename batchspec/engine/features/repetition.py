"""A stop at repetition: a row whose newest tokens are one sequence again and again ends there. Reasoning models may loop for
thousands of tokens, and a batch pays for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchspec.engine.slots.request_state import RequestState, Watch
from batchspec.engine.slots.row_feature import RowFeature
from batchspec.records import Completion, Repetition

EXAMINED_TOGETHER = 16
"""A row is examined once for so many tokens: it may decode some of them in vain, which are not part of it."""


class RepetitionStop(RowFeature):
    """Ends a row at the first token, not before `min_new_tokens`, that completes a repetition (`Request.repetition`), whatever
    rounds its tokens came in."""

    def __init__(self) -> None:
        self._rows: dict[RequestState, RepetitionFinder] = {}

    def arrive(self, state: RequestState) -> bool:
        if state.request.repetition is not None:
            self._rows[state] = RepetitionFinder(state.request.repetition, state.request.min_new_tokens)
        return state in self._rows

    def examine(self, state: RequestState) -> Watch | None:
        found = self._rows[state].go_on(state.tokens, state.num_forced)
        if found is not None:
            state.cut(found, "repetition", truncated=True)
            return None
        return Watch(len(state.tokens) + EXAMINED_TOGETHER)

    def finish(self, state: RequestState, done: Completion) -> Completion:
        del self._rows[state]
        return done


class RepetitionFinder:
    """Finds the first repetition in the tokens of one row, which come in pieces.

    For every pattern size p it keeps how many of the newest tokens equal the token p places before them. The last N * p tokens
    are N times one pattern when that number is at least (N - 1) * p.
    """

    def __init__(self, repetition: Repetition, min_len: int = 0) -> None:
        """min_len: number of tokens without which no repetition ends the row."""
        self._min_len = min_len
        self._sizes = np.arange(repetition.min_pattern_size, repetition.max_pattern_size + 1)
        self._needed = (repetition.min_count - 1) * self._sizes
        self._restart(0)

    def _restart(self, num_forced: int) -> None:
        self._num_forced, self._num_read = num_forced, 0
        self._equal = np.zeros(len(self._sizes), np.int64)

    def go_on(self, tokens: Sequence[int], num_forced: int) -> int | None:
        """The number of first tokens of the row that end with its first repetition; None: there is none.

        num_forced  number of tokens that were forced in it: with more, tokens that were read may have been replaced
        """
        if num_forced != self._num_forced or len(tokens) < self._num_read:
            self._restart(num_forced)
        while (first := self._num_read) < len(tokens):
            end = min(len(tokens), first + EXAMINED_TOGETHER)
            begin = max(0, first - int(self._sizes[-1]))
            known = np.array(tokens[begin:end])
            at = np.arange(first, end)[:, None] - self._sizes
            equal = (at >= 0) & (known[first - begin :, None] == known[np.maximum(at - begin, 0)])
            position = np.arange(1, end - first + 1)[:, None]
            broken = np.maximum.accumulate(np.where(equal, 0, position), axis=0)
            run = np.where(broken, position - broken, position + self._equal)
            found = np.flatnonzero((run >= self._needed).any(1) & (np.arange(first, end) + 1 >= self._min_len))
            if len(found):
                return first + int(found[0]) + 1
            self._equal, self._num_read = run[-1], end
        return None
