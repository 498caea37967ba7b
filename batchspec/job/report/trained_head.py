"""What the head that a job trained for itself brought: measured by its runs, in their logs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from batchspec.console.text import counted, duration


@dataclass(slots=True, kw_only=True)
class Phase:
    """What rounds did with one drafter. Time in which nothing was decoded is left out."""

    seconds: float = 0.0
    tokens: int = 0
    row_rounds: int = 0
    """Rounds, summed over the rows of each."""
    drafted: int = 0
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

    def since(self, earlier: Phase) -> Phase:
        """What was added since `earlier`."""
        return Phase(**{item.name: getattr(self, item.name) - getattr(earlier, item.name) for item in fields(self)})


@dataclass(slots=True, kw_only=True)
class TrainedHead:
    """The part of a run, or of all runs of a job."""

    idle_s: float = 0.0
    """Seconds in which nothing was decoded, because the head was trained and engines were loaded."""
    dropped: int = 0
    """Runs that let the head go, because it lost time."""
    before: Phase = field(default_factory=Phase)
    after: Phase = field(default_factory=Phase)
    """Without the head, before it and since a run let it go; with the head."""

    def line(self) -> str:
        """One line; empty if the head has drafted nothing."""
        before, after = self.before, self.after
        cost = f"; training and loading took {duration(self.idle_s)}" if self.idle_s else ""
        if self.dropped:
            cost += f"; {counted(self.dropped, 'run')} let it go, because it lost time"
        if not after.tokens:
            return ""
        said = f"{1 + after.mean_accepted:.2f} tokens a round and {after.tok_s:,.0f} tok/s with the trained head"
        if not before.tokens:
            return f"{said}{cost}"
        saved_s = after.tokens / before.tok_s - after.seconds
        return (
            f"{said}, {1 + before.mean_accepted:.2f} and {before.tok_s:,.0f} without: decoding took {duration(abs(saved_s))} "
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
                idle_s=float(found["idle_s"]), dropped=int(found["dropped"]), before=Phase(**found["before"]),
                after=Phase(**found["after"]),
            )
            total = total or TrainedHead()
            total.idle_s += run.idle_s
            total.dropped += run.dropped
            total.before.add(run.before)
            total.after.add(run.after)
        except (ValueError, TypeError, KeyError, AttributeError):  # damaged, or a run of another job
            continue
    return total
