"""The text of the longest requests, the shortest, and those with the best and worst acceptance; the first error rows.

Shards are read a few at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from batchspec.console.text import MESSAGE_CHARS
from batchspec.report.texts import Shown, shown_columns, with_texts
from batchspec.runstate.output_folder import OutputFolder
from batchspec.runstate.scan import scanning

NUM_SHOWN = 5
READ_ROWS = 32768
"""Maximum number of rows in memory at a time, without their text."""

ORDERS: Mapping[str, tuple[str, bool]] = {
    "Longest mean acceptance length": ("mean_length", True),
    "Shortest mean acceptance length": ("mean_length", False),
    "Longest completions": ("tokens", True),
    "Shortest completions": ("tokens", False),
}
"""Title -> (column by which requests are chosen, whether the largest come first)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An error row."""

    request_id: str
    row_index: int
    message: str


@dataclass(frozen=True, slots=True)
class Requests:
    shown: dict[str, tuple[Shown, ...]]
    """The requests of each title of ORDERS, if there are any."""
    errors: dict[str, tuple[Failed, ...]]
    """The first rows of each error code, in the order of the input."""


def read_requests(folder: OutputFolder) -> Requests:
    """What the report shows of single requests. Raises OutputError without a committed shard, StorageError."""
    best: dict[str, pl.DataFrame] = {}
    errors: dict[str, tuple[Failed, ...]] = {}
    done = sorted(folder.committed())
    step = max(1, READ_ROWS // folder.manifest.layout.most_rows(done))
    for start in range(0, max(1, len(done)), step):
        here = done[start : start + step]
        errors = _failed(folder, here, errors)
        rows = _numbers(folder, here)
        for title, (key, largest) in ORDERS.items():
            known = rows.filter(pl.col(key).is_not_null())
            both = pl.concat([best[title], known]) if title in best else known
            order = both.sort([key, "row_index", "sample_index"], descending=[largest, False, False])
            best[title] = order.head(NUM_SHOWN)
    shown = {title: with_texts(folder, part) for title, part in best.items() if part.height}
    return Requests(shown, errors)


def _numbers(folder: OutputFolder, shards: list[int]) -> pl.DataFrame:
    picked = folder.scan(shards).filter(pl.col("status").is_in(["ok", "truncated"])).select(*shown_columns())
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
