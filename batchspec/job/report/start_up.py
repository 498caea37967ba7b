"""Measures the phases of the seconds between the command and the first token."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from batchspec.process import load_progress


def process_age_s() -> float:
    """Seconds since this process began, accurate to a hundredth; if /proc is missing, the CPU time that it has used."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return time.process_time()


def age_clock() -> Callable[[], float]:
    """A clock of the seconds since this process began: the origin is accurate to a hundredth, differences are exact."""
    began = time.perf_counter() - process_age_s()
    return lambda: time.perf_counter() - began


LEAST_SHARE = 0.05
LAST = "first rows"
"""The phase that ends with the first token."""


def start_up_of(log: str) -> dict[str, float] | None:
    """The phases in the log of a run, a JSON object; None if it has none, or the run emitted no token."""
    try:
        found = json.loads(log)["start_up"]
        return {str(phase): float(seconds) for phase, seconds in found.items()} if LAST in found else None
    except (ValueError, TypeError, KeyError, AttributeError):  # damaged
        return None


class StartUp:
    """Records the seconds of each phase when it ends; the first began with the process.

    age_s  a clock of the seconds since the process began
    """

    def __init__(self, age_s: Callable[[], float] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        """Phase -> its seconds, in the order of the phases."""
        self.over = False
        """Whether the first token has come."""
        self.reached_s = 0.0
        """End of the last phase, in seconds since the process began."""
        self._age_s = age_s or age_clock()

    def done(self, phase: str, parts: Mapping[str, float] | None = None) -> None:
        """End the phase, unless the start-up is over; its `parts` are listed under their own names."""
        load_progress.count_step()
        if self.over:
            return
        now, parts = self._age_s(), parts or {}
        for name, seconds in ({phase: now - self.reached_s - sum(parts.values())} | dict(parts)).items():
            self.seconds[name] = self.seconds.get(name, 0.0) + max(0.0, seconds)
        self.reached_s = now

    def end(self, phase: str) -> None:
        """End the last phase."""
        self.done(phase)
        self.over = True

    def line(self) -> str:
        """The phases in one line, without those that took less than LEAST_SHARE."""
        total = sum(self.seconds.values())
        phases = [f"{name} {seconds:.1f}" for name, seconds in self.seconds.items() if seconds >= LEAST_SHARE * total]
        rest = ", ..." if len(phases) < len(self.seconds) else ""
        return f"the first token came {total:.1f} s after the command: {', '.join(phases)}{rest}"

    def facts(self) -> dict[str, float]:
        """The phases for a file, in seconds."""
        return {name: round(seconds, 2) for name, seconds in self.seconds.items()}
