"""The scores of a job whose task writes some: mean, spread and ends of each label, over all rows that have them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from batchspec.tasks.registry import saved_task


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    label: str
    rows: int
    mean: float
    deviation: float
    """Standard deviation over the rows."""
    least: float
    greatest: float


class ScoreTally:
    """Sums over all rows read so far, in fp64. config: the job's; the input may have columns of these names too."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        task = saved_task(config)
        self._column = task.score_column if task.tallies else ""
        """Lists of labels with scores, or scores, whose label is the column's name; empty: the job has none."""
        self._of: dict[str, tuple[int, float, float, float, float]] = {}
        """Label -> rows, mean, sum of squared differences from it, least, greatest; labels in the order of the checkpoint's."""

    def columns(self) -> Iterator[pl.Expr]:
        """What `add` needs of the output."""
        if self._column:
            yield pl.col(self._column)

    def add(self, rows: pl.DataFrame) -> None:
        if not (name := self._column):
            return
        if isinstance(rows.schema[name], pl.List):
            each = rows.select(pl.col(name).explode()).unnest(name).drop_nulls()
        else:
            each = rows.select(pl.lit(name).alias("label"), pl.col(name).alias("score")).drop_nulls()
        found = each.group_by("label", maintain_order=True).agg(
            pl.len(), pl.col("score").cast(pl.Float64).mean().alias("mean"),
            pl.col("score").cast(pl.Float64).var(ddof=0).alias("var"), pl.col("score").min().alias("least"),
            pl.col("score").max().alias("greatest"),
        )
        for label, count, mean, var, least, greatest in found.iter_rows():
            self._of[label] = _joined(self._of.get(label), (count, mean, count * var, least, greatest))

    def result(self) -> tuple[Score, ...]:
        """Empty if the job scores no labels."""
        return tuple(
            Score(label=label, rows=rows, mean=mean, deviation=math.sqrt(squares / rows), least=least, greatest=greatest)
            for label, (rows, mean, squares, least, greatest) in self._of.items()
        )


_Sums = tuple[int, float, float, float, float]


def _joined(own: _Sums | None, other: _Sums) -> _Sums:
    """Both together. Source: Chan, Golub, LeVeque 1979, Updating formulae for sample variances."""
    if own is None:
        return other
    rows, apart = own[0] + other[0], other[1] - own[1]
    mean = own[1] + apart * other[0] / rows
    squares = own[2] + other[2] + apart * apart * own[0] * other[0] / rows
    return rows, mean, squares, min(own[3], other[3]), max(own[4], other[4])
