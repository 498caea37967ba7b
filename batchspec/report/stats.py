"""What a job produced and what speculation did for it, from the committed output files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from batchspec.errors import OutputError
from batchspec.io.shards import OutputFolder
from batchspec.io.store import scanning

PROMPT_EDGES = (128, 512, 2048, 8192, 32768)
NUM_EXTREMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Sums over the completions of a group that speculated, and the ratios of the sums."""

    name: str
    completions: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    discarded: int
    """Tokens emitted behind the stop and thrown away."""
    mean_acceptance_length: float | None
    """1 + accepted / rounds, sum over sum: every round counts alike."""
    acceptance_rate: float | None
    """accepted / drafted, sum over sum: every draft token counts alike."""
    mean_length_over_requests: float | None
    """Mean of the completions' own mean acceptance lengths: every completion counts alike."""
    mean_rate_over_requests: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Draft place 0, 1, ... of a round: how often it was drafted, and accepted."""

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
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafter: str
    """The drafters of the rows, comma-separated; none where nothing drafted."""
    overall: Acceptance
    by_position: tuple[Position, ...]
    histogram: tuple[int, ...]
    """Rounds that accepted exactly j draft tokens."""
    by_prompt_tokens: tuple[Acceptance, ...]
    by_column: tuple[Acceptance, ...]
    """By the value of the column asked for, the most frequent first; empty without one."""
    best: tuple[Extreme, ...]
    worst: tuple[Extreme, ...]


def job_stats(out_dir: Path | str, by: str | None = None) -> JobStats:
    """Statistics of the committed shards of a job; `by` names a column of the output to group by.

    Raises OutputError where the folder holds no job or no committed shard, or has no such column to group by.
    """
    folder = OutputFolder(out_dir)
    done = folder.committed()
    rows = _read(folder, done, by)
    spec = rows.filter(pl.col("drafter").is_not_null())
    histogram = _sums(spec["histogram"])
    drafted = _sums(spec["drafted_at"])
    rated = spec.filter(pl.col("mean_length").is_not_null()).sort(
        ["mean_length", "row_index", "sample_index"], descending=[True, False, False]
    )
    return JobStats(
        shards=len(done),
        shards_total=folder.num_shards,
        completions=rows.height,
        by_status=_counts(rows["status"]),
        by_finish_reason=_counts(rows["finish_reason"]),
        by_error=_counts(rows["error"]),
        prompt_tokens=int(rows["prompt_tokens"].sum()),
        completion_tokens=int(rows["tokens"].sum()),
        cached_tokens=int(rows["cached_tokens"].sum()),
        drafter=",".join(sorted(spec["drafter"].unique())) or "none",
        overall=_acceptance("all", spec),
        by_position=tuple(
            Position(position=j, drafted=count, accepted=sum(histogram[j + 1 :]), rate=_ratio(sum(histogram[j + 1 :]), count))
            for j, count in enumerate(drafted)
        ),
        histogram=tuple(histogram),
        by_prompt_tokens=tuple(_by_prompt(spec)),
        by_column=tuple(_by_column(spec)) if by is not None else (),
        best=_extremes(rated.head(NUM_EXTREMES)),
        worst=_extremes(rated.tail(NUM_EXTREMES).reverse()),
    )


def _read(folder: OutputFolder, shards: set[int], by: str | None) -> pl.DataFrame:
    """One line a completion, with the columns that the statistics need."""
    frame = folder.scan(shards)
    schema = frame.collect_schema()
    if by is not None and (by not in schema or schema[by].is_nested()):
        flat = [name for name, kind in schema.items() if not kind.is_nested()]
        raise OutputError(f"--by {by}: the output has no such column of plain values; it has {', '.join(flat)}")
    spec = {
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
    usage = {"prompt_tokens": "prompt_tokens", "tokens": "completion_tokens", "cached_tokens": "cached_tokens"}
    picked = frame.select(
        "request_id",
        "row_index",
        "sample_index",
        "status",
        "finish_reason",
        pl.col("error").struct.field("code").alias("error"),
        *(pl.col("usage").struct.field(field).alias(name) for name, field in usage.items()),
        *(pl.col("spec_decode").struct.field(field).alias(name) for name, field in spec.items()),
        (pl.lit("") if by is None else pl.col(by).cast(pl.String)).fill_null("(null)").alias("group"),
    )
    with scanning(folder.path):
        return picked.collect()


def _acceptance(name: str, rows: pl.DataFrame) -> Acceptance:
    rounds, drafted, accepted = (int(rows[column].sum()) for column in ("rounds", "drafted", "accepted"))
    return Acceptance(
        name=name,
        completions=rows.height,
        tokens=int(rows["tokens"].sum()),
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        discarded=int(rows["discarded"].sum()),
        mean_acceptance_length=1 + accepted / rounds if rounds else None,
        acceptance_rate=_ratio(accepted, drafted),
        mean_length_over_requests=_mean(rows["mean_length"]),
        mean_rate_over_requests=_mean(rows["rate"]),
    )


def _by_prompt(rows: pl.DataFrame) -> list[Acceptance]:
    edges = (0, *PROMPT_EDGES)
    groups = []
    for low, high in zip(edges, [*PROMPT_EDGES, None], strict=True):
        inside = pl.col("prompt_tokens") >= low
        part = rows.filter(inside if high is None else inside & (pl.col("prompt_tokens") < high))
        if part.height:
            groups.append(_acceptance(f"{low}+" if high is None else f"{low}-{high - 1}", part))
    return groups


def _by_column(rows: pl.DataFrame) -> list[Acceptance]:
    groups = [_acceptance(str(key[0]), part) for key, part in rows.group_by("group", maintain_order=True)]
    return sorted(groups, key=lambda group: (-group.completions, group.name))


def _extremes(rows: pl.DataFrame) -> tuple[Extreme, ...]:
    names = ("request_id", "sample_index", "tokens", "mean_length")
    return tuple(
        Extreme(request_id=request_id, sample_index=sample_index, tokens=tokens, mean_acceptance_length=length)
        for request_id, sample_index, tokens, length in rows.select(names).iter_rows()
    )


def _sums(lists: pl.Series) -> list[int]:
    """Sums by place over lists of several lengths."""
    longest = int(lists.list.len().max() or 0)  # type: ignore[arg-type]
    return [int(lists.list.get(j, null_on_oob=True).sum()) for j in range(longest)]


def _counts(values: pl.Series) -> dict[str, int]:
    counts = values.drop_nulls().value_counts(sort=True)
    return dict(sorted(counts.iter_rows(), key=lambda pair: (-pair[1], pair[0])))


def _mean(values: pl.Series) -> float | None:
    known = values.drop_nulls().cast(pl.Float64)
    return float(known.sum()) / len(known) if len(known) else None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
