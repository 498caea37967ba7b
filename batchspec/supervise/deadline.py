"""Which rows are begun before the batch system ends the job, and when the run ends by itself to save what it has."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from batchspec.dataset.reader import InputShard
from batchspec.records import Completion, Request

PREFILLS = 10
"""A row whose tokens are kept is begun when this many times its prefill is left: doing that again costs a tenth at most."""
SHARE = 0.25
"""Of the time that the run had when it began, at most this much is left unused at the end."""


class Deadline:
    """The end of the job, and what rows have taken so far.

    left_s       asks the batch system for the seconds that are left; None where it does not say: what it said before stands
    reserve_s    the run ends by itself when no more than this is left
    keeps_tokens unfinished rows go on later where they are now
    stop         ends the engine's run; called once

    The estimate: rows that ended in this run tell the wall seconds of a prefill and of an output token, their waits included,
    because they ran in the same batch. Where tokens are kept, an unfinished row costs its prefill once more and nothing else, and
    slots that idle cost more than that: rows are begun almost to the end. Where they are not, only rows whose predicted output
    will be done in time are begun. Predictions may be wrong; that costs time, never a row.
    """

    def __init__(
        self,
        left_s: Callable[[], float | None],
        reserve_s: float,
        *,
        keeps_tokens: bool,
        stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left_s, self._keeps_tokens, self._stop, self._clock = left_s, keeps_tokens, stop, clock
        self._ends_at: float | None = None
        self._ask()
        self._reserve_s = 0.0 if self._ends_at is None else min(reserve_s, SHARE * (self._ends_at - clock()))
        self._rows, self._tokens, self._prefill_s, self._decode_s = 0, 0, 0.0, 0.0
        self.reached = False
        """A row was refused or the run was ended: no shard is taken any more."""

    def _ask(self) -> None:
        left = self._left_s()
        if left is not None:
            self._ends_at = self._clock() + left

    def shards(self, shards: Iterator[InputShard]) -> Iterator[InputShard]:
        """The same shards until the end is reached."""
        return itertools.takewhile(lambda _: not self.reached, shards)

    def requests(self, requests: Iterator[Request]) -> Iterator[Request]:
        """The requests that are worth beginning."""
        return (request for request in requests if self._reaches(self.need_s(request)))

    def check(self) -> None:
        """Stop the engine when the end is there."""
        if not self._reaches(0.0):
            self._stop()

    def observe(self, completion: Completion) -> None:
        """Count a finished row."""
        if completion.stats is not None and completion.token_ids is not None:
            self._rows += 1
            self._tokens += len(completion.token_ids)
            self._prefill_s += completion.stats.prefill_s
            self._decode_s += completion.stats.decode_s

    def need_s(self, request: Request) -> float:
        """Seconds that have to be left for the row; 0 before one has ended."""
        prefill_s = self._prefill_s / max(1, self._rows)
        if self._keeps_tokens:
            return PREFILLS * prefill_s
        return prefill_s + request.predicted_tokens * self._decode_s / max(1, self._tokens)

    def _reaches(self, need_s: float) -> bool:
        """Whether so many seconds are left before the reserve. Before the first no, the limit may have been moved: asks again."""
        if self._enough(need_s):
            return True
        if not self.reached:
            self._ask()
            self.reached = not self._enough(need_s)
        return not self.reached

    def _enough(self, need_s: float) -> bool:
        return self._ends_at is None or self._ends_at - self._clock() > self._reserve_s + need_s
