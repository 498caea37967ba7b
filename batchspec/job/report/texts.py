"""Requests that are shown to people: their numbers, and prompt and answer as text cut to a length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning

TEXT_CHARS = 600
ROW_KEY = ("request_id", "row_index", "sample_index")
"""Columns that name a row of an output."""
DIGEST = "image_digest"
"""Column of outputs of jobs with images, and field of a `Shown`."""
SHOWN_COLUMNS = ("prompt_tokens", "tokens", "mean_length")
"""Fields of usage and spec_decode that `shown_columns` reads, by the names that other tables have for them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A request with its truncated text."""

    request_id: str
    row_index: int
    sample_index: int
    status: str
    finish_reason: str
    prompt_tokens: int
    tokens: int
    mean_length: float | None
    """Mean acceptance length; None without a drafter."""
    prompt: str | None
    """None if the output has no column `messages`."""
    completion: str
    image_digest: str | None = None
    """As in the output; None: the row has no images."""


def shown_columns() -> Iterator[pl.Expr]:
    """The columns of an output that a `Shown` needs, without its texts."""
    usage, spec = pl.col("usage").struct, pl.col("spec_decode").struct
    yield from map(pl.col, (*ROW_KEY, "status", "finish_reason"))
    yield usage.field("prompt_tokens").alias("prompt_tokens")
    yield usage.field("completion_tokens").alias("tokens")
    yield spec.field("mean_acceptance_length").alias("mean_length")


def with_texts(folder: OutputFolder, rows: pl.DataFrame) -> tuple[Shown, ...]:
    """Rows that have the columns of `shown_columns`, with their texts from the shards that hold them. Raises StorageError."""
    names = [name for name in Shown.__dataclass_fields__ if name not in ("prompt", "completion", DIGEST)]
    texts = _texts(folder, set(rows.select("row_index", "sample_index").iter_rows()))
    made = []
    for row in rows.select(names).iter_rows(named=True):
        made.append(Shown(**row, **texts[row["row_index"], row["sample_index"]]))
    return tuple(made)


def _texts(folder: OutputFolder, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Prompt, completion and digest of images of some rows, by row_index and sample_index."""
    shard_of = folder.manifest.layout.shard_of
    kept = folder.manifest.config.get("output", {}).get("messages", "full")
    texts = dict[tuple[int, int], dict[str, Any]]()
    for shard in sorted({shard_of(row) for row, _ in wanted}):
        here = [row for row, _ in wanted if shard_of(row) == shard]
        rows = folder.scan([shard]).filter(pl.col("row_index").is_in(here))
        names = ["row_index", "sample_index", "completion", *(["messages"] if kept != "none" else [])]
        with scanning(folder.path):
            names += [DIGEST] if _has_images(rows.collect_schema()) else []
            found = rows.select(names).collect()
        for row in found.iter_rows(named=True):
            prompt = _prompt(row.get("messages"), whole=kept == "full")
            own: dict[str, Any] = {"prompt": prompt, "completion": cut(row["completion"] or ""), DIGEST: row.get(DIGEST)}
            texts[row["row_index"], row["sample_index"]] = own
    return texts


def _has_images(schema: pl.Schema) -> bool:
    """Whether it is the schema of a job with images. In others a column of their digests is one of the input, copied."""
    usage = schema["usage"]
    return isinstance(usage, pl.Struct) and any(field.name == "image_tokens" for field in usage.fields)


def _prompt(messages: list[Any] | None, *, whole: bool) -> str | None:
    if messages is None:
        return None
    turns = messages[:-1] if whole else messages
    # If the conversation is too long, its end is kept: the last turn holds the question.
    return cut("\n".join(f"{turn['role']}: {turn['content'] or ''}" for turn in turns), from_end=True)


def cut(text: str, *, from_end: bool = False) -> str:
    """At most TEXT_CHARS characters, with a note of how many are left out."""
    more = len(text) - TEXT_CHARS
    if more <= 0:
        return text
    note = f"({more:,} more characters)"
    return f"{note} ...{text[-TEXT_CHARS:]}" if from_end else f"{text[:TEXT_CHARS]}... {note}"
