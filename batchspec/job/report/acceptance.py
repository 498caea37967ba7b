"""How drafts were accepted: over all completions, by position and by a column of the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

SPEC = {
    "drafter": "drafter",
    "rounds": "num_spec_steps",
    "drafted": "num_draft_tokens",
    "accepted": "num_accepted_draft_tokens",
    "discarded": "num_discarded_tokens",
    "rate": "draft_acceptance_rate",
    "histogram": "acceptance_histogram",
    "drafted_at": "drafted_per_position",
}
"""Column of the tables here -> field of spec_decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Sums over those completions of a group that have spec_decode, and ratios of the sums."""

    name: str
    completions: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    discarded: int
    """Tokens emitted after the stop and discarded."""
    mean_acceptance_length: float | None
    """1 + accepted / rounds, a ratio of sums: every round has the same weight."""
    acceptance_rate: float | None
    """accepted / drafted, a ratio of sums: every draft token has the same weight."""
    mean_length_over_requests: float | None
    """Mean of the completions' mean acceptance lengths: every completion has the same weight."""
    mean_rate_over_requests: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position 0, 1, ... in a round's draft: how often it was drafted, and accepted."""

    position: int
    drafted: int
    accepted: int
    rate: float | None


class AcceptanceTally:
    """Sums over all rows read so far. Besides its columns it reads those of `shown_columns`, and `group`."""

    def __init__(self) -> None:
        self.drafters: set[str] = set()
        self.histogram: list[int] = []
        """Rounds that accepted exactly j draft tokens."""
        self._drafted_at: list[int] = []
        self._overall = self._by_group = pl.DataFrame()

    def columns(self) -> Iterator[pl.Expr]:
        """What `add` needs of the output."""
        for name, field in SPEC.items():
            yield pl.col("spec_decode").struct.field(field).alias(name)

    def add(self, rows: pl.DataFrame) -> None:
        spec = rows.filter(pl.col("drafter").is_not_null())
        self.drafters |= set(spec["drafter"].unique())
        self.histogram = _added(self.histogram, spec["histogram"])
        self._drafted_at = _added(self._drafted_at, spec["drafted_at"])
        self._overall = _summed(self._overall, spec, pl.lit("all"))
        answered = rows.filter(pl.col("finish_reason") != "error")  # also those without drafts
        self._by_group = _summed(self._by_group, answered, pl.col("group"))

    @property
    def overall(self) -> Acceptance:
        return next(iter(_groups(self._overall)), _acceptance({"name": "all"}))

    @property
    def by_position(self) -> tuple[Position, ...]:
        accepted = [sum(self.histogram[j + 1 :]) for j in range(len(self._drafted_at))]
        return tuple(
            Position(position=j, drafted=count, accepted=kept, rate=_ratio(kept, count))
            for j, (count, kept) in enumerate(zip(self._drafted_at, accepted, strict=True))
        )

    @property
    def by_group(self) -> tuple[Acceptance, ...]:
        """The most frequent groups first."""
        return tuple(sorted(_groups(self._by_group), key=lambda group: (-group.completions, group.name)))

def _summed(so_far: pl.DataFrame, rows: pl.DataFrame, name: pl.Expr) -> pl.DataFrame:
    """Sums over `rows` by the group `name`, added to the sums of earlier rows."""
    sums = ("tokens", "rounds", "drafted", "accepted", "discarded")
    here = rows.group_by(name.alias("name")).agg(
        pl.len().cast(pl.Int64).alias("completions"),
        *(pl.col(column).cast(pl.Int64).sum() for column in sums),
        *(pl.col(column).cast(pl.Float64).sum() for column in ("mean_length", "rate")),
        *(pl.col(column).count().cast(pl.Int64).alias(f"num_{column}") for column in ("mean_length", "rate")),
    )
    return pl.concat([so_far, here]).group_by("name").agg(pl.all().sum())


def _groups(sums: pl.DataFrame) -> Iterator[Acceptance]:
    return map(_acceptance, sums.iter_rows(named=True))


def _acceptance(sums: Mapping[str, Any]) -> Acceptance:
    """The acceptance of one row of `_summed`; missing sums count as 0."""
    count = {name: sums.get(name, 0) for name in ("completions", "tokens", "rounds", "drafted", "accepted", "discarded")}
    return Acceptance(
        name=str(sums["name"]),
        **count,
        mean_acceptance_length=1 + count["accepted"] / count["rounds"] if count["rounds"] else None,
        acceptance_rate=_ratio(count["accepted"], count["drafted"]),
        mean_length_over_requests=_ratio(sums.get("mean_length", 0), sums.get("num_mean_length", 0)),
        mean_rate_over_requests=_ratio(sums.get("rate", 0), sums.get("num_rate", 0)),
    )


def _added(sums: list[int], lists: pl.Series) -> list[int]:
    """`sums` plus the elementwise sum of `lists`, which may differ in length."""
    longest = max(len(sums), int(lists.list.len().max() or 0))  # type: ignore[arg-type]
    here = [int(lists.list.get(j, null_on_oob=True).sum()) for j in range(longest)]
    return [count + (sums[j] if j < len(sums) else 0) for j, count in enumerate(here)]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
