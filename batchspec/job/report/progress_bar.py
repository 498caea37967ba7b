"""The progress of a run: a bar on a terminal, or a line every 30 seconds in a log file. Both are updated during a long prefill
too."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

from batchspec.console import terminal
from batchspec.console.text import counted
from batchspec.job.report.start_up import StartUp
from batchspec.process import load_progress
from batchspec.process.threads import start_thread

WINDOW_S = 60.0
"""The rate shown is the mean over this time."""
SAMPLE_S = 0.5
"""Shortest time between two samples that the rate is computed from: a small model ends thousands of rounds a second."""
TICK_S = 1.0
DRAW_S = 0.1
"""Shortest time between two drawings of the bar."""
QUIET_S = 30.0
"""After this time without a result (`RunHeartbeat.quiet_s`), the bar or line reports it."""
MIN_BAR, MAX_BAR = 4, 40


class ProgressBar:
    """Completions done, tokens a second, mean acceptance length, running rows and the time left.

    total_completions  of the whole job, `done` of them committed by earlier runs
    clock              seconds, monotonic
    start_up           told about each phase until the first token
    The time left is computed from the expected number of tokens if `update` gets `mean_output`, else from completions.
    """

    def __init__(
        self,
        total_completions: int,
        *,
        done: int = 0,
        stream: TextIO | None = None,
        interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        start_up: StartUp | None = None,
    ) -> None:
        self.total, self.done = total_completions, done
        self.start_up = start_up or StartUp()
        self.stream = stream or sys.stderr
        self.interval_s, self.clock = interval_s, clock
        self.tokens = self.accepted = self.rounds = self.live_rows = 0
        self.shards = self.errors = self.replaced_errors = self.skipped = self.in_flight_tokens = 0
        self.open_shards: Sequence[tuple[int, int]] = ()
        self.mean_output: float | None = None
        self._done_before, self._result_at = done, clock()
        self._history = deque([(clock(), 0, done)])
        self._began_at, self._drawn_at, self._next_line = clock(), 0.0, clock() + interval_s
        self._working = False
        self._phase: tuple[str, float] | None = None
        self._over = threading.Event()
        self._ticker: threading.Thread | None = None
        self._bar = terminal.StatusLine(self.stream) if self.stream.isatty() and total_completions else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.__enter__()
            self._draw()
        self._ticker = start_thread(self._tick, "progress bar")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._ticker is not None:
            self._ticker.join(TICK_S)
        if self._bar is not None:
            self._draw()
            self._bar.__exit__(kind, error, trace)
        elif self.total:
            self._line()

    def _tick(self) -> None:
        """Redraw while there is no result: in a long prefill, or while the model loads."""
        with suppress(OSError, ValueError):  # a closed terminal must not end the run
            while not self._over.wait(TICK_S):
                self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._draw()
        elif self.clock() >= self._next_line:
            self._next_line = self.clock() + self.interval_s
            if self._working:
                self._line()
            elif self._phase is not None:
                note, began = self._phase
                terminal.say(f"{note}: {self.clock() - began:.0f} s so far", stream=self.stream)

    def update(
        self,
        *,
        completions: int = 0,
        tokens: int = 0,
        accepted: int = 0,
        rounds: int = 0,
        shards: int = 0,
        errors: int = 0,
        replaced_errors: int = 0,
        skipped: int = 0,
        live_rows: int | None = None,
        open_shards: Sequence[tuple[int, int]] | None = None,
        mean_output: float | None = None,
        in_flight_tokens: int = 0,
    ) -> None:
        """Add what happened since the last call, and set the present state.

        Added: `completions` finished, new `tokens` of all rows, `accepted` draft tokens and `rounds` (both summed over rows),
        committed `shards`, their `errors`, error rows, `replaced_errors`, those that a retry computed anew, and `skipped` rows.
        Set, all together: `live_rows`; `open_shards`, (shard, finished completions) of shards that are not committed;
        `mean_output`, expected tokens of a completion, which gives the time left; `in_flight_tokens` of unfinished rows.
        """
        self.done += completions
        self.tokens += tokens
        self.accepted += accepted
        self.rounds += rounds
        self.shards += shards
        self.errors += errors
        self.replaced_errors += replaced_errors
        self.skipped += skipped
        self.live_rows = self.live_rows if live_rows is None else live_rows
        self.open_shards = self.open_shards if open_shards is None else open_shards
        if mean_output is not None:
            self.mean_output, self.in_flight_tokens = mean_output, in_flight_tokens
        now = self.clock()
        if rounds or tokens or completions:
            self._result_at = now
        if len(self._history) > 1 and self._history[-1][0] - self._history[-2][0] < SAMPLE_S:
            self._history.pop()
        self._history.append((now, self.tokens, self.done))
        while len(self._history) > 2 and self._history[1][0] <= now - WINDOW_S:
            self._history.popleft()
        self._working = True
        if self._bar is None or now - self._drawn_at >= DRAW_S:
            self._show()

    def phase(self, note: str) -> None:
        """Print a line about the present phase of the run; in a log file again while it lasts, until the first round."""
        load_progress.count_step()
        self._phase = note, self.clock()
        terminal.say(note, stream=self.stream)

    def facts(self) -> dict[str, Any]:
        """Fields of the run's heartbeat, see runstate.heartbeats.RunHeartbeat. Any thread may call it."""
        quiet_s = self._quiet_s
        return {
            "expected": self.total,
            "shards": self.shards,
            "completions": self.done - self._done_before,
            "errors": self.errors,
            "replaced_errors": self.replaced_errors,
            "skipped": self.skipped,
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

    def _draw(self) -> None:
        assert self._bar is not None
        self._drawn_at = self.clock()
        self._bar.draw(self.bar(_columns(self.stream)))

    def bar(self, columns: int) -> str:
        """The bar for a terminal of this width; the least important parts are left out if it does not fit."""
        share = self._share()
        left = self._eta_s()
        facts = [f"{self.done}/{self.total}", tqdm.format_interval(self.clock() - self._began_at)]
        facts += ["" if left is None else f"ETA {tqdm.format_interval(left)}", f"{self._rate(1):,.0f} tok/s", self._quiet()]
        facts += [f"acceptance {1 + self.accepted / self.rounds:.2f}" if self.rounds else "", self._running()]
        facts = [fact for fact in facts if fact]
        percent = f"{int(100 * share):3}%"
        room = columns - 1  # a cursor after the last column would wrap
        while len(facts) > 1 and room - len(f"{percent} || {', '.join(facts)}") < MIN_BAR:
            facts.pop()
        said = ", ".join(facts)
        width = min(MAX_BAR, room - len(f"{percent} || {said}"))
        line = f"{percent} |{self._blocks(share, width)}| {said}" if width >= MIN_BAR else f"{percent} {said}"
        return line[:room]

    def _share(self) -> float:
        """Share of the job that is done; tokens of unfinished rows count as fractions of a row. 1 when nothing is left."""
        if self.done >= self.total:
            return 1.0
        begun = self.in_flight_tokens / self.mean_output if self.mean_output else 0.0
        return min((self.done + begun) / self.total, 0.999)

    def _blocks(self, share: float, width: int) -> str:
        full, empty = ("█", "░") if "utf" in (getattr(self.stream, "encoding", None) or "utf-8").lower() else ("#", "-")
        filled = min(width, int(share * width))
        return full * filled + empty * (width - filled)

    @property
    def _quiet_s(self) -> float:
        return self.clock() - self._result_at

    def _quiet(self) -> str:
        quiet_s = self._quiet_s
        return f"no result for {quiet_s:.0f} s" if self._working and quiet_s >= QUIET_S and self.done < self.total else ""

    def _running(self) -> str:
        return f"{counted(self.live_rows, 'row')} running" if self.live_rows and self.done < self.total else ""

    def _line(self) -> None:
        share = self.done / self.total if self.total else 1.0
        terminal.say(f"{self.done}/{self.total} completions ({share:.1%}), {self._speed()}", stream=self.stream)

    def _speed(self) -> str:
        parts = [f"{self._rate(1):,.0f} tok/s"]
        if self.rounds:
            parts.append(f"mean acceptance length {1 + self.accepted / self.rounds:.2f}")
        if running := self._running():
            parts.append(running)
        left = self._eta_s()
        if left is not None:
            parts.append(f"ETA {tqdm.format_interval(left)}")
        if quiet := self._quiet():
            parts.append(quiet)
        return ", ".join(parts)

    def _eta_s(self) -> float | None:
        """Seconds left, at least 1; None if that is not known: before there is a rate (the first tokens come from prefill, whose
        rate says little about rounds), and where the running rows have become longer than was expected of all that are left."""
        rows, rate = self.total - self.done, self._rate(2)
        left = float(rows)
        if self.mean_output:  # 0 where prompts are scored
            left, rate = rows * self.mean_output - self.in_flight_tokens, self._rate(1) if self.rounds else 0.0
        seconds = left / rate if rate else 0.0
        return seconds if seconds >= 1 else None

    def _rate(self, column: int) -> float:
        first, last = self._history[0], self._history[-1]
        seconds = last[0] - first[0]
        return (last[column] - first[column]) / seconds if seconds > 0 else 0.0


def _columns(stream: TextIO) -> int:
    """Present width of the stream's terminal, in columns; 80 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
