"""Statistics of a job's output and of its speculation, from the committed output files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from batchspec.errors import OutputError
from batchspec.records import ANSWERED
from batchspec.report.calls import CallTally, ToolCalls
from batchspec.report.columns import type_names
from batchspec.report.json_answers import JsonAnswers, JsonTally
from batchspec.report.labels import Labels, LabelTally
from batchspec.report.quality import Quality, QualityTally, quality_columns
from batchspec.report.start_up import start_up_of
from batchspec.report.summary import Calibration, Speed, calibration_of, speed_of
from batchspec.runstate.output_folder import OutputFolder
from batchspec.runstate.scan import scanning

PROMPT_EDGES = (128, 512, 2048, 8192, 32768)
PROMPT_BUCKETS = [
    *(f"{low}-{high - 1}" for low, high in zip((0, *PROMPT_EDGES[:-1]), PROMPT_EDGES, strict=True)), f"{PROMPT_EDGES[-1]}+"
]
ROW_KEY = ("request_id", "row_index", "sample_index")
USAGE = {
    "prompt_tokens": "prompt_tokens",
    "tokens": "completion_tokens",
    "reasoning_tokens": "reasoning_tokens",
    "cached_tokens": "cached_tokens",
}
SPEC = {
    "drafter": "drafter",
    "rounds": "num_spec_steps",
    "drafted": "num_draft_tokens",
    "accepted": "num_accepted_draft_tokens",
    "discarded": "num_discarded_tokens",
    "mean_length": "mean_acceptance_length",
    "rate": "draft_acceptance_rate",
    "histogram": "acceptance_histogram",
    "drafted_at": "drafted_per_position",
}
"""Column of the tables here -> field of spec_decode."""
SHOWN = ("prompt_tokens", "tokens", "mean_length")
"""Those of both that `quality_columns` reads under the same names."""
NUM_EXTREMES = 5
READ_ROWS = 32768
"""Rows in memory at a time."""
TEXT_KINDS = (pl.String, pl.Boolean, pl.Date, pl.Time, pl.Datetime, pl.Categorical, pl.Enum, pl.Null)
"""Types besides numbers whose values polars can write as text."""
DECIMAL_DIGITS = 38
"""Maximum precision of a decimal that polars can read."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    request_id: str
    sample_index: int
    tokens: int
    mean_acceptance_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStats:
    shards: int
    shards_total: int
    completions: int
    by_status: dict[str, int]
    by_finish_reason: dict[str, int]
    by_error: dict[str, int]
    error_rows: int
    """Input rows with at least one error completion."""
    copied: int
    """Completions that are copies of those of equal rows (output.dedup)."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    """The part of completion_tokens that belongs to thoughts."""
    reasoning_truncated: int
    """Completions whose thought was cut off, by its budget or by max_new_tokens."""
    quality: Quality
    labels: Labels | None
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
    by_prompt_tokens: tuple[Acceptance, ...]
    by_column: tuple[Acceptance, ...]
    """By the value of the column `by`, the most frequent first; empty without `by`."""
    best: tuple[Extreme, ...]
    worst: tuple[Extreme, ...]
    columns: dict[str, str]
    """The output's columns and their types."""
    start_ups: tuple[dict[str, float], ...]
    """Of each run that has ended and had a token, in no order: seconds from the command to its first token, by phase."""
    calibration: tuple[Calibration, ...]
    """By the drafter's confidence, over the runs that have ended: how many drafts were expected to be accepted, and were."""


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
    histogram, drafted = tally.histogram, tally.drafted_at
    accepted = [sum(histogram[j + 1 :]) for j in range(len(drafted))]
    groups = sorted(_groups(tally.by_group), key=lambda group: (-group.completions, group.name))
    return JobStats(
        shards=len(done),
        shards_total=folder.num_shards,
        completions=tally.completions,
        by_status=_counts(tally.by_status),
        by_finish_reason=_counts(tally.by_finish_reason),
        by_error=_counts(tally.by_error),
        error_rows=tally.error_rows,
        copied=tally.copied,
        prompt_tokens=tally.tokens["prompt_tokens"],
        completion_tokens=tally.tokens["tokens"],
        cached_tokens=tally.tokens["cached_tokens"],
        reasoning_tokens=tally.tokens["reasoning_tokens"],
        reasoning_truncated=tally.reasoning_truncated,
        quality=tally.quality.result(folder),
        labels=tally.labels.result(),
        json_answers=tally.json_answers.result(),
        tool_calls=tally.tool_calls.result(),
        speed=speed_of(logs),
        weights=folder.manifest.recorded.get("weights"),
        drafter=",".join(sorted(tally.drafters)) or "none",
        overall=next(iter(_groups(tally.overall)), _acceptance({"name": "all"})),
        by_position=tuple(
            Position(position=j, drafted=count, accepted=kept, rate=_ratio(kept, count))
            for j, (count, kept) in enumerate(zip(drafted, accepted, strict=True))
        ),
        histogram=tuple(histogram),
        by_prompt_tokens=tuple(
            group for name in PROMPT_BUCKETS for group in _groups(tally.by_prompt_tokens) if group.name == name
        ),
        by_column=tuple(groups) if by is not None else (),
        best=_extremes(tally.best),
        worst=_extremes(tally.worst),
        columns=type_names(schema),
        start_ups=tuple(filter(None, map(start_up_of, logs))),
        calibration=calibration_of(logs),
    )


class _Tally:
    """Sums over all rows read so far."""

    def __init__(self, config: Mapping[str, Any], columns: Collection[str]) -> None:
        self.completions = self.reasoning_truncated = self.error_rows = self.copied = 0
        self.tokens: Counter[str] = Counter()
        self.by_status: Counter[str] = Counter()
        self.by_finish_reason: Counter[str] = Counter()
        self.by_error: Counter[str] = Counter()
        self.drafters: set[str] = set()
        self.histogram: list[int] = []
        self.drafted_at: list[int] = []
        self.overall = self.by_prompt_tokens = self.by_group = pl.DataFrame()
        self.best = self.worst = pl.DataFrame()
        self.quality, self.labels = QualityTally(), LabelTally(config, columns)
        self.json_answers, self.tool_calls = JsonTally(config), CallTally(config, columns)

    def columns(self) -> Iterator[pl.Expr]:
        for kind in (self.labels, self.json_answers, self.tool_calls):
            yield from kind.columns()

    def add(self, rows: pl.DataFrame) -> None:
        for kind in (self.quality, self.labels, self.json_answers, self.tool_calls):
            kind.add(rows)
        spec = rows.filter(pl.col("drafter").is_not_null())
        self.completions += rows.height
        self.reasoning_truncated += int(rows["reasoning_truncated"].sum())
        self.error_rows += rows.filter(pl.col("status") == "error")["row_index"].n_unique()  # a row is in one shard
        self.copied += int(rows["copied"].sum())
        self.tokens.update({name: int(rows[name].sum()) for name in USAGE})
        rows = rows.with_columns(error=pl.when(pl.col("status") == "error").then("error"))
        for name in ("status", "finish_reason", "error"):
            getattr(self, f"by_{name}").update(dict(rows[name].drop_nulls().value_counts().iter_rows()))
        self.drafters |= set(spec["drafter"].unique())
        self.histogram = _added(self.histogram, spec["histogram"])
        self.drafted_at = _added(self.drafted_at, spec["drafted_at"])
        self.overall = _summed(self.overall, spec, pl.lit("all"))
        bucket = pl.sum_horizontal(pl.col("prompt_tokens") >= edge for edge in PROMPT_EDGES)
        names = dict(enumerate(PROMPT_BUCKETS))
        self.by_prompt_tokens = _summed(self.by_prompt_tokens, spec, bucket.replace_strict(names, return_dtype=pl.String))
        answered = rows.filter(pl.col("finish_reason") != "error")  # also those without drafts
        self.by_group = _summed(self.by_group, answered, pl.col("group"))
        rated = spec.filter(pl.col("mean_length").is_not_null()).select(*ROW_KEY, "tokens", "mean_length")
        order = ["mean_length", "row_index", "sample_index"]
        self.best = pl.concat([self.best, rated]).sort(order, descending=[True, False, False]).head(NUM_EXTREMES)
        self.worst = pl.concat([self.worst, rated]).sort(order, descending=[False, True, True]).head(NUM_EXTREMES)


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
            *(pl.col("usage").struct.field(field).alias(name) for name, field in USAGE.items() if name not in SHOWN),
            *(pl.col("spec_decode").struct.field(field).alias(name) for name, field in SPEC.items() if name not in SHOWN),
            (pl.lit("") if by is None else pl.col(by).cast(pl.String)).fill_null("(null)").alias("group"),
        )
        with scanning(folder.path):
            yield picked.collect()


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


def _extremes(rows: pl.DataFrame) -> tuple[Extreme, ...]:
    return tuple(
        Extreme(request_id=request_id, sample_index=sample_index, tokens=tokens, mean_acceptance_length=length)
        for request_id, _, sample_index, tokens, length in rows.iter_rows()
    )


def _added(sums: list[int], lists: pl.Series) -> list[int]:
    """`sums` plus the elementwise sum of `lists`, which may differ in length."""
    longest = max(len(sums), int(lists.list.len().max() or 0))  # type: ignore[arg-type]
    here = [int(lists.list.get(j, null_on_oob=True).sum()) for j in range(longest)]
    return [count + (sums[j] if j < len(sums) else 0) for j, count in enumerate(here)]


def _counts(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
