"""What the head that a job trained for itself brought: measured by its runs, in their logs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from batchspec.console.text import duration


@dataclass(slots=True, kw_only=True)
class Phase:
    """What rounds did with one drafter. Time in which nothing was decoded is left out."""

    seconds: float = 0.0
    tokens: int = 0
    row_rounds: int = 0
    """Rounds, summed over the rows of each."""
    accepted: int = 0

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts of a row and round."""
        return self.accepted / max(1, self.row_rounds)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, other: Phase) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(slots=True, kw_only=True)
class TrainedHead:
    """The part of a run, or of all runs of a job."""

    trained_s: float = 0.0
    """Seconds in which nothing was decoded, because the head was trained."""
    before: Phase = field(default_factory=Phase)
    after: Phase = field(default_factory=Phase)
    """With the drafter before the head, and with the head."""

    def line(self) -> str:
        """One line; empty if the head has drafted nothing."""
        before, after = self.before, self.after
        cost = f"; its training took {duration(self.trained_s)}" if self.trained_s else ""
        if not after.tokens:
            return ""
        said = f"{1 + after.mean_accepted:.2f} tokens a round and {after.tok_s:,.0f} tok/s with the trained head"
        if not before.tokens:
            return f"{said}{cost}"
        saved_s = after.tokens / before.tok_s - after.seconds
        return (
            f"{said}, {1 + before.mean_accepted:.2f} and {before.tok_s:,.0f} before it: decoding took {duration(abs(saved_s))} "
            f"{'less' if saved_s >= 0 else 'more'} than at that speed{cost}"
        )

    def facts(self) -> dict[str, Any]:
        return {"trained_head": asdict(self)}


def trained_head_of(logs: Iterable[str]) -> TrainedHead | None:
    """Sums over the runs of a job, from their logs; None if none had, or was to train, a head."""
    total = None
    for log in logs:
        try:
            found = json.loads(log)["trained_head"]
            run = TrainedHead(
                trained_s=float(found["trained_s"]), before=Phase(**found["before"]), after=Phase(**found["after"])
            )
            total = total or TrainedHead()
            total.trained_s += run.trained_s
            total.before.add(run.before)
            total.after.add(run.after)
        except (ValueError, TypeError, KeyError, AttributeError):  # damaged, or a run of another job
            continue
    return total
