"""Statistics of a job's output and of its speculation, from the committed output files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning
from batchspec.errors import OutputError
from batchspec.job.report.acceptance import Acceptance, AcceptanceTally, Position
from batchspec.job.report.calls import CallTally, ToolCalls
from batchspec.job.report.columns import type_names
from batchspec.job.report.json_answers import JsonAnswers, JsonTally
from batchspec.job.report.labels import Labels, LabelTally
from batchspec.job.report.quality import Quality, QualityTally, quality_columns
from batchspec.job.report.scores import Score, ScoreTally
from batchspec.job.report.start_up import start_up_of
from batchspec.job.report.summary import Calibration, Speed, calibration_of, speed_of
from batchspec.job.report.texts import SHOWN_COLUMNS
from batchspec.job.report.trained_head import TrainedHead, trained_head_of
from batchspec.records import ANSWERED

USAGE = {
    "prompt_tokens": "prompt_tokens",
    "tokens": "completion_tokens",
    "reasoning_tokens": "reasoning_tokens",
    "cached_tokens": "cached_tokens",
}
"""Column of the tables here -> field of usage."""
READ_ROWS = 32768
"""Rows in memory at a time."""
TEXT_KINDS = (pl.String, pl.Boolean, pl.Date, pl.Time, pl.Datetime, pl.Categorical, pl.Enum, pl.Null)
"""Types besides numbers whose values polars can write as text."""
DECIMAL_DIGITS = 38
"""Maximum precision of a decimal that polars can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStats:
    shards: int
    shards_total: int
    completions: int
    by_status: dict[str, int]
    by_finish_reason: dict[str, int]
    """Of the rows with an answer."""
    by_error: dict[str, int]
    error_rows: int
    """Input rows with at least one error completion."""
    copied: int
    """Completions that are copies of those of equal rows (output.dedup)."""
    copied_tokens: int
    """The part of completion_tokens that belongs to copies, and was not computed."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    """The part of completion_tokens that belongs to thoughts."""
    reasoning_truncated: int
    """Completions whose thought was cut off, by its budget or by max_new_tokens."""
    quality: Quality
    labels: Labels | None
    scores: tuple[Score, ...]
    """Of the labels of a model that scores them; empty in other jobs."""
    """None: the job does not choose among texts."""
    json_answers: JsonAnswers | None
    """None: the job has no schema, and most answers are no JSON objects."""
    tool_calls: ToolCalls | None
    """None: the output has no tool calls."""
    speed: Speed | None
    """None before a run has ended."""
    weights: str | None
    """How the model's weights were kept: their format and dtype; None: a job of an earlier version, which did not record it."""
    drafter: str
    """The drafters of the rows, comma-separated; "none" without a drafter."""
    overall: Acceptance
    by_position: tuple[Position, ...]
    histogram: tuple[int, ...]
    """Rounds that accepted exactly j draft tokens."""
    by_column: tuple[Acceptance, ...]
    """By the value of the column `by`, the most frequent first; empty without `by`."""
    columns: dict[str, str]
    """The output's columns and their types."""
    start_ups: tuple[dict[str, float], ...]
    """Of each run that has ended and had a token, in no order: seconds from the command to its first token, by phase."""
    trained_head: TrainedHead | None
    """What the head brought that the job trained for itself; None: it trained none."""
    calibration: tuple[Calibration, ...]
    """By the drafter's confidence, over the runs that have ended: how many drafts were expected to be accepted, and were."""


def count_error_rows(folder: OutputFolder, shards: Sequence[int]) -> int:
    """Number of input rows of these shards that have at least one error completion, as `JobStats.error_rows`. Polars skips the
    shards whose footers tell that they have none. Raises OutputError if a file cannot be read."""
    with scanning(folder.path):
        errors = folder.scan(shards).filter(pl.col("status") == "error")
        return int(errors.select(pl.col("row_index").n_unique()).collect().item())


def job_stats(out_dir: Path | str, by: str | None = None) -> JobStats:
    """Statistics of the committed shards of a job, read a few at a time; `by` names an output column to group by.

    Raises OutputError if the folder holds no job or no committed shard, or if there is no such column to group by.
    """
    folder = OutputFolder(out_dir)
    done = sorted(folder.committed())
    with scanning(folder.path):
        schema = folder.scan(done[:1]).collect_schema()
    _check_column(schema, by)
    tally = _Tally(folder.manifest.config, schema.names())
    for rows in _read(folder, done, by, [*quality_columns(schema), *tally.columns()]):
        tally.add(rows)
    logs = list(folder.logs(".json"))
    drafts = tally.drafts
    return JobStats(
        shards=len(done),
        shards_total=folder.num_shards,
        completions=tally.completions,
        by_status=_counts(tally.by_status),
        by_finish_reason=_counts(tally.by_finish_reason),
        by_error=_counts(tally.by_error),
        error_rows=tally.error_rows,
        copied=tally.copied,
        copied_tokens=tally.copied_tokens,
        prompt_tokens=tally.tokens["prompt_tokens"],
        completion_tokens=tally.tokens["tokens"],
        cached_tokens=tally.tokens["cached_tokens"],
        reasoning_tokens=tally.tokens["reasoning_tokens"],
        reasoning_truncated=tally.reasoning_truncated,
        quality=tally.quality.result(folder),
        labels=tally.labels.result(),
        scores=tally.scores.result(),
        json_answers=tally.json_answers.result(),
        tool_calls=tally.tool_calls.result(),
        speed=speed_of(logs),
        weights=folder.manifest.recorded.get("weights"),
        drafter=",".join(sorted(drafts.drafters)) or "none",
        overall=drafts.overall,
        by_position=drafts.by_position,
        histogram=tuple(drafts.histogram),
        by_column=drafts.by_group if by is not None else (),
        columns=type_names(schema),
        start_ups=tuple(filter(None, map(start_up_of, logs))),
        trained_head=trained_head_of(logs),
        calibration=calibration_of(logs),
    )


class _Tally:
    """Sums over all rows read so far."""

    def __init__(self, config: Mapping[str, Any], columns: Collection[str]) -> None:
        self.completions = self.reasoning_truncated = self.error_rows = self.copied = self.copied_tokens = 0
        self.tokens: Counter[str] = Counter()
        self.by_status: Counter[str] = Counter()
        self.by_finish_reason: Counter[str] = Counter()
        self.by_error: Counter[str] = Counter()
        self.quality, self.labels, self.scores = QualityTally(), LabelTally(config, columns), ScoreTally(config)
        self.json_answers, self.tool_calls, self.drafts = JsonTally(config), CallTally(config, columns), AcceptanceTally()

    def columns(self) -> Iterator[pl.Expr]:
        for kind in (self.labels, self.scores, self.json_answers, self.tool_calls, self.drafts):
            yield from kind.columns()

    def add(self, rows: pl.DataFrame) -> None:
        for kind in (self.quality, self.labels, self.scores, self.json_answers, self.tool_calls, self.drafts):
            kind.add(rows)
        self.completions += rows.height
        self.reasoning_truncated += int(rows["reasoning_truncated"].sum())
        self.error_rows += rows.filter(pl.col("status") == "error")["row_index"].n_unique()  # a row is in one shard
        self.copied += int(rows["copied"].sum())
        self.copied_tokens += int(rows.filter("copied")["tokens"].sum())
        self.tokens.update({name: int(rows[name].sum()) for name in USAGE})
        answered = pl.col("status").is_in(ANSWERED)
        rows = rows.with_columns(
            error=pl.when(pl.col("status") == "error").then("error"), finish_reason=pl.when(answered).then("finish_reason")
        )
        for name in ("status", "finish_reason", "error"):
            getattr(self, f"by_{name}").update(dict(rows[name].drop_nulls().value_counts().iter_rows()))


def _check_column(schema: pl.Schema, by: str | None) -> None:
    flat = [name for name, kind in schema.items() if _has_text(kind)]
    if by is not None and by not in flat:
        raise OutputError(f"--by {by}: the output has no such column of plain values; it has {', '.join(flat)}")


def _has_text(kind: pl.DataType) -> bool:
    """Whether a column of this type holds plain values that polars can write as text: no bytes, durations or extensions."""
    too_wide = isinstance(kind, pl.Decimal) and (kind.precision or 0) > DECIMAL_DIGITS
    return (kind.is_numeric() and not too_wide) or kind in TEXT_KINDS


def _read(folder: OutputFolder, shards: list[int], by: str | None, more: Sequence[pl.Expr]) -> Iterator[pl.DataFrame]:
    """Tables of one row a completion, with the columns that the statistics need, and `more`."""
    step = max(1, READ_ROWS // folder.manifest.layout.most_rows(shards))
    for start in range(0, len(shards), step):
        picked = folder.scan(shards[start : start + step]).select(
            *more,
            "reasoning_truncated",
            pl.col("error").struct.field("code").alias("error"),
            (pl.col("status").is_in(ANSWERED) & pl.col("perf").struct.field("prefill_s").is_null()).alias("copied"),
            *(pl.col("usage").struct.field(field).alias(name) for name, field in USAGE.items() if name not in SHOWN_COLUMNS),
            (pl.lit("") if by is None else pl.col(by).cast(pl.String)).fill_null("(null)").alias("group"),
        )
        with scanning(folder.path):
            yield picked.collect()


def _counts(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
