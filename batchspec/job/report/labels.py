"""The labels of a job that chooses among given texts: how many rows have each, and how sure the model was of them.

With decode.score=choices the column `choice_probs` has the probabilities; with decode.choice alone there are only the counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from batchspec.job.report.texts import ROW_KEY
from batchspec.tasks.registry import saved_task

NUM_UNCERTAIN = 10
MAX_LABELS = 1000
"""Distinct labels that are counted, the first ones of the output; rows may bring choices of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    label: str
    rows: int
    """Rows whose answer it is."""
    mean_prob: float | None
    """Mean probability of the label in these rows; None without rows or probabilities."""
    mean_margin: float | None
    """Mean difference to the second most probable label in these rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertainRow:
    request_id: str
    sample_index: int
    label: str
    prob: float
    margin: float
    """prob minus that of the second most probable label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    rows: int
    """Rows that have a label."""
    labels: tuple[Label, ...]
    """The most frequent first, then in the order of decode.choice."""
    other_rows: int
    """Rows with a label that is not among `labels`."""
    least_certain: tuple[UncertainRow, ...]
    """The rows with the smallest margins, the smallest first; empty without probabilities."""


class LabelTally:
    """Counts over all rows read so far.

    config   the job's configuration
    columns  the output's columns
    """

    def __init__(self, config: Mapping[str, Any], columns: Collection[str]) -> None:
        decode = config.get("decode", {})
        self._scored, known = "choice_probs" in columns, list(map(str, decode.get("choice") or ()))
        self._chosen = saved_task(config).decodes and bool(known)
        self._sums = dict.fromkeys(known[:MAX_LABELS], (0, 0.0, 0.0))
        """Label -> rows, sum of probabilities, sum of margins."""
        self._rows = 0
        self._uncertain = pl.DataFrame()

    def columns(self) -> Iterator[pl.Expr]:
        """What `add` needs of the output."""
        if self._scored:
            probs = pl.col("choice_probs").list.eval(pl.element().struct.field("prob")).list.sort(descending=True)
            best = probs.list.get(0, null_on_oob=True)
            yield pl.when(best.is_not_null()).then(pl.col("completion")).alias("label")
            yield best.alias("prob")
            yield (best - probs.list.get(1, null_on_oob=True).fill_null(0.0)).alias("margin")
        elif self._chosen:
            yield pl.when(pl.col("status") == "ok").then(pl.col("completion")).alias("label")
            yield pl.lit(None, pl.Float64).alias("prob")
            yield pl.lit(None, pl.Float64).alias("margin")

    def add(self, rows: pl.DataFrame) -> None:
        if not (self._scored or self._chosen):
            return
        rows = rows.select(*ROW_KEY, "label", "prob", "margin").filter(pl.col("label").is_not_null())
        self._rows += rows.height
        for label, prob, margin in rows.select("label", "prob", "margin").iter_rows():
            if label in self._sums or len(self._sums) < MAX_LABELS:
                count, probs, margins = self._sums.get(label, (0, 0.0, 0.0))
                self._sums[label] = count + 1, probs + (prob or 0.0), margins + (margin or 0.0)
        rated = rows.filter(pl.col("margin").is_not_null())
        order = ["margin", "row_index", "sample_index"]
        self._uncertain = pl.concat([self._uncertain, rated]).sort(order).head(NUM_UNCERTAIN)

    def result(self) -> Labels | None:
        """None if the job chooses among no texts."""
        if not (self._scored or self._chosen):
            return None
        labels = [
            Label(
                label=label, rows=rows,
                mean_prob=prob / rows if rows and self._scored else None,
                mean_margin=margin / rows if rows and self._scored else None,
            )
            for label, (rows, prob, margin) in self._sums.items()
        ]
        return Labels(
            rows=self._rows,
            labels=tuple(sorted(labels, key=lambda one: -one.rows)),
            other_rows=self._rows - sum(one.rows for one in labels),
            least_certain=tuple(
                UncertainRow(request_id=name, sample_index=sample, label=label, prob=prob, margin=margin)
                for name, _, sample, label, prob, margin in self._uncertain.iter_rows()
            ),
        )
