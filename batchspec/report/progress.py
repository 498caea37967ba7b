"""How far a run is: a bar on a terminal, one line every 30 seconds in a log file."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

WINDOW_S = 60.0
"""The rate shown is that of the last minute."""


class Progress:
    """Completions done, tokens a second, mean acceptance length, live rows and the time left.

    total_completions  of the whole job, `done` of them committed by earlier runs
    clock              seconds, monotonic
    The time left comes from the tokens that are expected still where `update` is told of them, else from completions.
    """

    def __init__(
        self,
        total_completions: int,
        *,
        done: int = 0,
        stream: TextIO | None = None,
        interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.done = total_completions, done
        self.stream = stream or sys.stderr
        self.interval_s, self.clock = interval_s, clock
        self.tokens = self.accepted = self.rounds = self.live_rows = 0
        self.shards = self.errors = self.in_flight_tokens = 0
        self.open_shards: Sequence[tuple[int, int]] = ()
        self.mean_output: float | None = None
        self._done_before, self._round_at = done, clock()
        self._history = deque([(clock(), 0, done)])
        self._next_line = clock() + interval_s
        self._bar: tqdm[None] | None = None
        if self.stream.isatty():
            layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
            self._bar = tqdm(
                total=total_completions, initial=done, file=self.stream, bar_format=layout, dynamic_ncols=True, miniters=0
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self.total:
            self._line()

    def update(
        self,
        *,
        completions: int = 0,
        tokens: int = 0,
        accepted: int = 0,
        rounds: int = 0,
        shards: int = 0,
        errors: int = 0,
        live_rows: int | None = None,
        open_shards: Sequence[tuple[int, int]] | None = None,
        mean_output: float | None = None,
        in_flight_tokens: int = 0,
    ) -> None:
        """Add what happened since the last call: finished completions, their and other new tokens, accepted draft tokens and
        rounds (each summed over rows), committed shards and the error rows in them.

        As of now are `live_rows`, `open_shards` (not committed, and what is finished of each), `mean_output` (tokens expected
        of a completion, the time left comes from it) and `in_flight_tokens` (of rows that are not finished), given together.
        """
        self.done += completions
        self.tokens += tokens
        self.accepted += accepted
        self.rounds += rounds
        self.shards += shards
        self.errors += errors
        self.live_rows = self.live_rows if live_rows is None else live_rows
        self.open_shards = self.open_shards if open_shards is None else open_shards
        if mean_output is not None:
            self.mean_output, self.in_flight_tokens = mean_output, in_flight_tokens
        now = self.clock()
        self._round_at = now if rounds else self._round_at
        self._history.append((now, self.tokens, self.done))
        while len(self._history) > 2 and self._history[1][0] <= now - WINDOW_S:
            self._history.popleft()
        if self._bar is not None:
            self._bar.set_postfix_str(self._speed(), refresh=False)
            self._bar.update(completions)
        elif now >= self._next_line:
            self._next_line = now + self.interval_s
            self._line()

    def phase(self, note: str) -> None:
        """Say in one line what is being done."""
        if self._bar is not None:
            self._bar.write(note, file=self.stream)
        else:
            print(note, file=self.stream, flush=True)

    def facts(self) -> dict[str, Any]:
        """For the run's progress file, see io.progress.RunProgress. Any thread may ask."""
        quiet_s = self.clock() - self._round_at
        return {
            "expected": self.total,
            "shards": self.shards,
            "completions": self.done - self._done_before,
            "errors": self.errors,
            "open_shards": self.open_shards,
            "tokens": self.tokens,
            "accepted": self.accepted,
            "rounds": self.rounds,
            "live_rows": self.live_rows,
            "tok_s": round(self._rate(1), 1) if quiet_s < WINDOW_S else 0.0,
            "quiet_s": round(quiet_s, 1),
            "mean_output": round(self.mean_output or 0.0, 1),
            "in_flight_tokens": self.in_flight_tokens,
        }

    def _line(self) -> None:
        share = self.done / self.total if self.total else 1.0
        print(f"{self.done}/{self.total} completions ({share:.1%}), {self._speed()}", file=self.stream, flush=True)

    def _speed(self) -> str:
        parts = [f"{self._rate(1):,.0f} tok/s"]
        if self.rounds:
            parts.append(f"mean acceptance length {1 + self.accepted / self.rounds:.2f}")
        parts.append(f"{self.live_rows} live rows")
        left = self._eta_s()
        if left is not None:
            parts.append(f"ETA {tqdm.format_interval(left)}")
        return ", ".join(parts)

    def _eta_s(self) -> float | None:
        """Seconds left; None before there is a rate."""
        tokens_rate, done_rate = self._rate(1), self._rate(2)
        if self.done >= self.total:
            return 0.0
        if self.mean_output is not None:
            left = max(0.0, (self.total - self.done) * self.mean_output - self.in_flight_tokens)
            return left / tokens_rate if tokens_rate else None
        return (self.total - self.done) / done_rate if done_rate else None

    def _rate(self, column: int) -> float:
        first, last = self._history[0], self._history[-1]
        seconds = last[0] - first[0]
        return (last[column] - first[column]) / seconds if seconds > 0 else 0.0
