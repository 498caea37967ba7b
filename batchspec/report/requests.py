"""The lengths of all requests, and the text of the longest, the shortest, and those with the best and worst acceptance.

Shards are read a few at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from batchspec.runstate.output_folder import OutputFolder
from batchspec.runstate.scan import scanning
from batchspec.text import MESSAGE_CHARS

Counts = NDArray[np.int64]

NUM_SHOWN = 5
READ_ROWS = 32768
"""Maximum number of rows in memory at a time, without their text."""
TEXT_CHARS = 600

ORDERS: Mapping[str, tuple[str, bool]] = {
    "Longest mean acceptance length": ("mean_length", True),
    "Shortest mean acceptance length": ("mean_length", False),
    "Longest completions": ("tokens", True),
    "Shortest completions": ("tokens", False),
}
"""Title -> (column by which requests are chosen, whether the largest come first)."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An error row."""

    request_id: str
    row_index: int
    message: str


@dataclass(frozen=True, slots=True)
class Requests:
    prompt_lens: Counts
    """[longest + 1] number of rows by prompt length in tokens."""
    output_lens: Counts
    """The same by output length."""
    shown: dict[str, tuple[Shown, ...]]
    """The requests of each title of ORDERS, if there are any."""
    errors: dict[str, tuple[Failed, ...]]
    """The first rows of each error code, in the order of the input."""


def read_requests(folder: OutputFolder) -> Requests:
    """What the report shows of single requests. Raises OutputError without a committed shard, StorageError."""
    prompts = outputs = np.zeros(1, np.int64)
    best: dict[str, pl.DataFrame] = {}
    errors: dict[str, tuple[Failed, ...]] = {}
    done = sorted(folder.committed())
    step = max(1, READ_ROWS // folder.manifest.layout.most_rows(done))
    for start in range(0, max(1, len(done)), step):
        here = done[start : start + step]
        errors = _failed(folder, here, errors)
        rows = _numbers(folder, here)
        prompts = _added(prompts, rows["prompt_tokens"])
        outputs = _added(outputs, rows["tokens"])
        for title, (key, largest) in ORDERS.items():
            known = rows.filter(pl.col(key).is_not_null())
            both = pl.concat([best[title], known]) if title in best else known
            order = both.sort([key, "row_index", "sample_index"], descending=[largest, False, False])
            best[title] = order.head(NUM_SHOWN)
    texts = _texts(folder, {(row, sample) for part in best.values() for row, sample in part[:, 1:3].iter_rows()})
    shown = {
        title: tuple(_shown(row, *texts[row["row_index"], row["sample_index"]]) for row in part.iter_rows(named=True))
        for title, part in best.items()
        if part.height
    }
    return Requests(prompts, outputs, shown, errors)


def _numbers(folder: OutputFolder, shards: list[int]) -> pl.DataFrame:
    usage, spec = pl.col("usage").struct, pl.col("spec_decode").struct
    picked = folder.scan(shards).filter(pl.col("status").is_in(["ok", "truncated"])).select(
        "request_id",
        "row_index",
        "sample_index",
        "status",
        "finish_reason",
        usage.field("prompt_tokens").alias("prompt_tokens"),
        usage.field("completion_tokens").alias("tokens"),
        spec.field("mean_acceptance_length").alias("mean_length"),
    )  # fmt: skip
    with scanning(folder.path):
        return picked.collect()


def _failed(folder: OutputFolder, shards: list[int], known: Mapping[str, tuple[Failed, ...]]) -> dict[str, tuple[Failed, ...]]:
    """The first rows of each error code: `known` ones, then those of these shards."""
    error = pl.col("error").struct
    picked = folder.scan(shards).filter(pl.col("status") == "error").select(
        "request_id",
        "row_index",
        error.field("code").alias("code"),
        error.field("message").str.slice(0, MESSAGE_CHARS).alias("message"),
    )  # fmt: skip
    with scanning(folder.path):
        rows = picked.collect().group_by("code", maintain_order=True).head(NUM_SHOWN)
    errors = dict(known)
    for row in rows.select("code", "request_id", "row_index", "message").iter_rows():
        code, (request_id, row_index, message) = str(row[0]), row[1:]
        if len(errors.get(code, ())) < NUM_SHOWN:
            one = Failed(request_id=request_id, row_index=row_index, message=message or "")
            errors[code] = (*errors.get(code, ()), one)
    return errors


def _added(counts: Counts, lengths: pl.Series) -> Counts:
    more = np.bincount(lengths.drop_nulls().to_numpy(), minlength=len(counts)).astype(np.int64)
    more[: len(counts)] += counts
    return more


def _shown(row: Mapping[str, Any], prompt: str | None, completion: str) -> Shown:
    return Shown(**row, prompt=prompt, completion=completion)


def _texts(folder: OutputFolder, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], tuple[str | None, str]]:
    """Prompt and completion of some rows, by row_index and sample_index, from the shards that hold them."""
    shard_of = folder.manifest.layout.shard_of
    kept = folder.manifest.config.get("output", {}).get("messages", "full")
    texts = {}
    for shard in sorted({shard_of(row) for row, _ in wanted}):
        here = [row for row, _ in wanted if shard_of(row) == shard]
        rows = folder.scan([shard]).filter(pl.col("row_index").is_in(here))
        names = ["row_index", "sample_index", "completion", *(["messages"] if kept != "none" else [])]
        with scanning(folder.path):
            found = rows.select(names).collect()
        for row in found.iter_rows(named=True):
            prompt = _prompt(row.get("messages"), whole=kept == "full")
            texts[row["row_index"], row["sample_index"]] = (prompt, cut(row["completion"] or ""))
    return texts


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
