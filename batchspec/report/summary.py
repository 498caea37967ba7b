"""The summary of one run: two lines at most, and values for a file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchspec.console.text import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run; a job that was resumed has several."""

    seconds: float
    """From the first row read to the last commit, start_up_s left out."""
    start_up_s: float
    """Reading what earlier runs left, loading the weights, planning, compiling and capturing."""
    tokens: int
    """Tokens made in this run, without those that its rows had from earlier runs."""
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
        speed = f"{self.tokens:,} tokens in {round(self.seconds, 3):.2f} s, {self.tok_s:,.1f} tok/s"
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
            "seconds": round(self.seconds, 3), "start_up_s": round(self.start_up_s, 3), "tokens": self.tokens,
            "tok_s": round(self.tok_s, 1), "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "rounds": self.rounds, "mean_live_rows": round(self.mean_live_rows, 2), "preempted": self.preempted,
        }
        if self.expert_correlation is not None:
            found["expert_correlation"] = round(self.expert_correlation, 4)
        if self.calibration:
            found["drafter"] = self.drafter
            found["calibration"] = {str(i): [*counts, round(expected, 2)] for i, (*counts, expected) in self.calibration.items()}
        return found


def speed_of(log: str) -> tuple[int, float] | None:
    """Tokens and seconds in the log of a run, the JSON object of `RunSummary.facts`; None for another file."""
    try:
        found = json.loads(log)
        return int(found["tokens"]), float(found["seconds"])
    except (ValueError, TypeError, KeyError, OverflowError):
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
