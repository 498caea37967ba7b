"""Where the seconds go between the command and the first token."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def process_age_s() -> float:
    """Seconds since this process began, to a hundredth; since its processor first worked for it where /proc is missing."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return time.process_time()


def age_clock() -> Callable[[], float]:
    """A clock of the seconds since this process began: its zero is right to a hundredth, differences are exact."""
    began = time.perf_counter() - process_age_s()
    return lambda: time.perf_counter() - began


LAST = "first rows"
"""The phase that ends with the first token."""


def start_up_of(log: str) -> dict[str, float] | None:
    """The phases in the log of a run, a JSON object; None where it has none, or the run had no token."""
    try:
        found = json.loads(log)["start_up"]
        return {str(phase): float(seconds) for phase, seconds in found.items()} if LAST in found else None
    except (ValueError, TypeError, KeyError, AttributeError):  # of an older version, or damaged
        return None


class StartUp:
    """Names each phase when it is over; the first began with the process.

    age_s  a clock of the seconds since the process began
    """

    def __init__(self, age_s: Callable[[], float] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        """Phase -> its seconds, in the order of the phases."""
        self.over = False
        """The first token was there."""
        self.reached_s = 0.0
        """When the last phase was over, in seconds since the process began."""
        self._age_s = age_s or age_clock()

    def done(self, phase: str, parts: Mapping[str, float] | None = None) -> None:
        """The phase is over, unless the start-up is; `parts` of it are listed by their own names."""
        if self.over:
            return
        now, parts = self._age_s(), parts or {}
        for name, seconds in ({phase: now - self.reached_s - sum(parts.values())} | dict(parts)).items():
            self.seconds[name] = self.seconds.get(name, 0.0) + max(0.0, seconds)
        self.reached_s = now

    def end(self, phase: str) -> None:
        """The last phase is over."""
        self.done(phase)
        self.over = True

    def line(self) -> str:
        """All phases, in one line."""
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"the first token came {sum(self.seconds.values()):.1f} s after the command: {phases}"

    def facts(self) -> dict[str, float]:
        """The phases for a file, in seconds."""
        return {name: round(seconds, 2) for name, seconds in self.seconds.items()}
