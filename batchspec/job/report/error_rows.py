"""The first error rows of each code. Shards are read a few at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from batchspec.console.text import MESSAGE_CHARS
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning

NUM_SHOWN = 5
READ_ROWS = 32768
"""Maximum number of rows in memory at a time, without their text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An error row."""

    request_id: str
    row_index: int
    message: str


def first_errors(folder: OutputFolder) -> dict[str, tuple[Failed, ...]]:
    """The first rows of each error code, in input order. Raises OutputError without a committed shard, StorageError."""
    errors: dict[str, tuple[Failed, ...]] = {}
    done = sorted(folder.committed())
    step = max(1, READ_ROWS // folder.manifest.layout.most_rows(done))
    for start in range(0, max(1, len(done)), step):
        errors = _failed(folder, done[start : start + step], errors)
    return errors


def _failed(folder: OutputFolder, shards: list[int], known: Mapping[str, tuple[Failed, ...]]) -> dict[str, tuple[Failed, ...]]:
    """The first rows of each error code: `known` ones, then those of these shards."""
    error = pl.col("error").struct
    picked = folder.scan(shards).filter(pl.col("status") == "error").select(
        "request_id",
        "row_index",
        error.field("code").alias("code"),
        error.field("message").str.slice(0, MESSAGE_CHARS).alias("message"),
    )
    with scanning(folder.path):
        rows = picked.collect().group_by("code", maintain_order=True).head(NUM_SHOWN)
    errors = dict(known)
    for row in rows.select("code", "request_id", "row_index", "message").iter_rows():
        code, (request_id, row_index, message) = str(row[0]), row[1:]
        if len(errors.get(code, ())) < NUM_SHOWN:
            one = Failed(request_id=request_id, row_index=row_index, message=message or "")
            errors[code] = (*errors.get(code, ()), one)
    return errors
