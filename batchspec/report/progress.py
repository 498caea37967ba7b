"""How far a run is: a bar on a terminal, one line every 30 seconds in a log file."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from tqdm import tqdm

WINDOW_S = 60.0
"""The rate shown is that of the last minute."""


class Progress:
    """Completions done, tokens a second, mean acceptance length, live rows and the time left.

    total_completions  of the whole job, `done` of them committed by earlier runs
    clock              seconds, monotonic
    The time left comes from the tokens that are expected still where `update` is told them, else from completions.
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
        self.remaining_tokens: int | None = None
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
        live_rows: int | None = None,
        remaining_tokens: int | None = None,
    ) -> None:
        """Add what happened since the last call: finished completions, their and other new tokens, accepted draft tokens and
        rounds (each summed over rows). `live_rows` and `remaining_tokens` (expected in the rest of the job) are as of now.
        """
        self.done += completions
        self.tokens += tokens
        self.accepted += accepted
        self.rounds += rounds
        self.live_rows = self.live_rows if live_rows is None else live_rows
        self.remaining_tokens = self.remaining_tokens if remaining_tokens is None else remaining_tokens
        now = self.clock()
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
        if self.remaining_tokens is not None:
            return self.remaining_tokens / tokens_rate if tokens_rate else None
        return (self.total - self.done) / done_rate if done_rate else None

    def _rate(self, column: int) -> float:
        first, last = self._history[0], self._history[-1]
        seconds = last[0] - first[0]
        return (last[column] - first[column]) / seconds if seconds > 0 else 0.0
