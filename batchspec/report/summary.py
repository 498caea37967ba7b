"""The summary of one run: one line, and values for a file."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_acceptance_length(self) -> float:
        return 1 + self.accepted / self.row_rounds if self.row_rounds else 1.0

    @property
    def mean_live_rows(self) -> float:
        return self.row_rounds / self.rounds if self.rounds else 0.0

    def line(self) -> str:
        return (
            f"{self.tokens:,} tokens in {round(self.seconds, 3):.2f} s from the first row read to the last commit, "
            f"{self.tok_s:,.1f} tok/s (start-up, {self.start_up_s:.1f} s, left out); "
            + (
                f"mean acceptance length {self.mean_acceptance_length:.3f}, "
                f"{self.rounds:,} rounds, {self.mean_live_rows:.1f} live rows a round"
                if self.rounds
                else "no round"
            )
            + ("" if self.expert_correlation is None else f"; packing.expert_correlation {self.expert_correlation:.3g}")
        )

    def facts(self) -> dict[str, float]:
        """The values of the line, and those from which they were computed."""
        found = {
            "seconds": round(self.seconds, 3), "start_up_s": round(self.start_up_s, 3), "tokens": self.tokens,
            "tok_s": round(self.tok_s, 1), "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "rounds": self.rounds, "mean_live_rows": round(self.mean_live_rows, 2), "preempted": self.preempted,
        }  # fmt: skip
        return found if self.expert_correlation is None else found | {"expert_correlation": round(self.expert_correlation, 4)}
