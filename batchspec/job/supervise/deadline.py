"""The time limit of the batch system: which rows still begin before it, and when the run ends by itself to save its work."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchspec.records import Completion, Request

PREFILLS = 10
"""If tokens are kept, a row begins if at least this many times its prefill time is left. If it is not finished, the next run
prefills it again, which then costs at most a tenth of the time that the row had in this run."""
SHARE = 0.25
"""The reserve is at most this share of the time that the run had when it began."""


class Deadline:
    """The end of the job, and how long rows have taken so far.

    left_s       asks the batch system for the seconds that are left; if it returns None, the last answer counts
    reserve_s    the run ends by itself when no more than this is left
    keeps_tokens whether unfinished rows continue from their tokens in the next run
    stop         stops the engine; called once

    The time that a row needs is estimated from the rows that finished in this run: wall time of a prefill and of an output token,
    waiting included, because they ran in the same batch. If tokens are kept, an unfinished row costs only a second prefill, less
    than an idle slot, so rows begin almost until the end. Otherwise a row begins only if its predicted output can finish in time.
    A wrong prediction costs time, never a row.
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
        """A row was refused or the engine was stopped: no more shards are claimed."""

    def _ask(self) -> None:
        left = self._left_s()
        if left is not None:
            self._ends_at = self._clock() + left

    def has_time(self, request: Request) -> bool:
        """Whether the row may begin."""
        if self._ends_at is None:  # no limit, and `_reaches` asks for none later
            return True
        return self._reaches(self.need_s(request))

    def leaves(self, seconds: float) -> bool:
        """Whether so many seconds are left in which no row is decoded. The batch system is asked before the answer is no."""
        if not self._enough(seconds):
            self._ask()
        return self._enough(seconds)

    def check(self) -> None:
        """Stop the engine when the reserve is reached."""
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
        """Seconds that the row needs; 0 before any row has finished."""
        prefill_s = self._prefill_s / max(1, self._rows)
        if self._keeps_tokens:
            return PREFILLS * prefill_s
        return prefill_s + request.predicted_tokens * self._decode_s / max(1, self._tokens)

    def _reaches(self, need_s: float) -> bool:
        """Whether at least `need_s` seconds are left before the reserve. Before its first negative answer it asks the batch
        system again, because the limit may have been extended.
        """
        if self._enough(need_s):
            return True
        if not self.reached:
            self._ask()
            self.reached = not self._enough(need_s)
        return not self.reached

    def _enough(self, need_s: float) -> bool:
        return self._ends_at is None or self._ends_at - self._clock() > self._reserve_s + need_s
