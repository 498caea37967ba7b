"""Sums of what the engine has done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchspec.engine.rounds.records import PendingResult, RoundLog


@dataclass(slots=True)
class EngineTotals:
    """Sums over the engine's life, of the results that the host has read."""

    rounds: int = 0
    """Launched."""
    row_rounds: int = 0
    """Sum over the rounds of their live rows."""
    tokens: int = 0
    """Output tokens; where rows do not decode, those of their prefill passes."""
    accepted: int = 0
    drafted: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    """Seconds of prefill, each group counted from its begin to its last result."""
    cached_tokens: int = 0
    preempted: int = 0
    """Number of preemptions: requests that lost their slot because pages ran out."""
    live_rows: int = 0
    expert_correlation: float | None = None
    """See `expert_reads.py`; None without experts."""
    _group: Any = None
    """Begin of the group of the latest prefill result: all passes of a group have the same."""
    _group_s: float = 0.0

    def add(self, result: PendingResult, log: RoundLog) -> None:
        """Add a result that has arrived; `log` has the lines of its live rows."""
        self.tokens += int(log.num_kept.sum())
        if result.began is not None:
            seconds = result.seconds_since(result.began)
            self.prefill_s += seconds - (self._group_s if result.began is self._group else 0.0)
            self._group, self._group_s = result.began, seconds
        else:
            self.row_rounds += len(log.num_kept)
            self.accepted += int(log.accepted_len.sum())
            self.drafted += int(log.draft_len.sum())
