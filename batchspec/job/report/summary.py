"""The summary of one run: two lines at most, and values for a file."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchspec.console.text import counted
from batchspec.tasks.registry import GENERATE

DECODED = GENERATE.counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run; a job that was resumed has several."""

    began_at: float
    """`seconds` before the last commit, in seconds since 1970: when the first row was read, if start_up_s had come before it."""
    seconds: float
    """From the first row read to the last commit, start_up_s left out."""
    start_up_s: float
    """Reading what earlier runs left, loading the weights, planning, compiling and capturing."""
    tokens: int
    """Tokens made in this run, without those that its rows had from earlier runs."""
    counts: str
    """What these tokens are: `Task.counts`."""
    rounds: int
    row_rounds: int
    """Rounds, summed over the live rows of each."""
    accepted: int
    preempted: int
    expert_correlation: float | None = None
    """Share of the tokens of a round that would read as many experts if they chose independently; None without experts."""
    drafter: str = "none"
    calibration: Mapping[int, tuple[int, int, float]] = field(default_factory=dict)
    """By the drafter's confidence: drafts that were verified after accepted ones, those accepted, and how many were expected to
    be. Drafters count their confidence in different ways."""

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_acceptance_length(self) -> float:
        return 1 + self.accepted / self.row_rounds if self.row_rounds else 1.0

    @property
    def mean_live_rows(self) -> float:
        return self.row_rounds / self.rounds if self.rounds else 0.0

    def lines(self) -> Iterator[str]:
        start_up = f"start-up, {self.start_up_s:.1f} s, left out"
        speed = f"{self.tokens:,} {self.counts} in {self.seconds:.2f} s, {self.tok_s:,.1f} tok/s"
        yield f"{speed}, from the first row read to the last commit ({start_up})"
        if self.rounds:  # none where prompts are scored
            experts = "" if self.expert_correlation is None else f"; packing.expert_correlation {self.expert_correlation:.3g}"
            yield (
                f"{counted(self.rounds, 'round')} of {self.mean_live_rows:.1f} rows on average, "
                f"mean acceptance length {self.mean_acceptance_length:.3f}{experts}"
            )

    def facts(self) -> dict[str, Any]:
        """The values of the lines, and those from which they were computed."""
        found: dict[str, Any] = {
            "began_at": round(self.began_at, 3), "seconds": self.seconds, "start_up_s": round(self.start_up_s, 3),
            "tokens": self.tokens, "counts": self.counts, "tok_s": round(self.tok_s, 1),
            "mean_acceptance_length": round(self.mean_acceptance_length, 4), "rounds": self.rounds,
            "mean_live_rows": round(self.mean_live_rows, 2), "preempted": self.preempted,
        }
        if self.expert_correlation is not None:
            found["expert_correlation"] = round(self.expert_correlation, 4)
        if self.calibration:
            found["drafter"] = self.drafter
            found["calibration"] = {str(i): [*counts, round(expected, 2)] for i, (*counts, expected) in self.calibration.items()}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of a job, over those of its runs that have reached their end."""

    tok_s: float
    """tokens / seconds"""
    counts: str
    """What the tokens are: `Task.counts`."""
    tokens: int
    seconds: float
    """While at least one of the runs worked: from its first row read to its last commit, start-up left out."""
    runs: int


def speed_of(logs: Iterable[str]) -> Speed | None:
    """The speed of a job from the logs of its runs, the JSON objects of `RunSummary.facts`; None if none has ended. The runs of
    earlier versions, which did not record when they began, count as one after another."""
    runs = [run for log in logs if (run := _run_in(log)) is not None]
    seconds, end = 0.0, -math.inf
    for began_at, lasted, _, _ in sorted(runs):
        shared = min(lasted, max(0.0, end - began_at)) if began_at else 0.0
        seconds += lasted - shared
        end = max(end, began_at + lasted) if began_at else end
    if not seconds:
        return None
    tokens = sum(run[2] for run in runs)
    return Speed(tok_s=tokens / seconds, counts=runs[0][3], tokens=tokens, seconds=seconds, runs=len(runs))


def _run_in(log: str) -> tuple[float, float, int, str] | None:
    """When a run began (0: unknown), its seconds, its tokens and what they are; None for another file."""
    try:
        found = json.loads(log)
        run = float(found.get("began_at", 0)), float(found["seconds"]), int(found["tokens"])
        return (*run, str(found.get("counts", DECODED)))
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Drafts in which the drafter had the same confidence."""

    drafts: int
    """Drafts that were verified after accepted ones."""
    expected: float
    """Share of them that was expected to be accepted when they were chosen."""
    accepted: float
    """Share of them that was accepted."""


def calibration_of(logs: Iterable[str]) -> tuple[Calibration, ...]:
    """Sums over the runs of each drafter, from their logs, by ascending expected share; empty if none chose drafts by chances."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for log in logs:
        try:
            run = json.loads(log)
            for confidence, counts in run["calibration"].items():
                key = str(run.get("drafter")), confidence
                sums[key] = [float(old) + float(new) for old, new in zip(sums[key], counts, strict=True)]
        except (ValueError, TypeError, KeyError, AttributeError):  # damaged, or of another kind
            continue
    found = [
        Calibration(drafts=int(drafts), expected=expected / drafts, accepted=accepted / drafts)
        for drafts, accepted, expected in sums.values()
        if drafts > 0
    ]
    return tuple(sorted(found, key=lambda one: one.expected))
