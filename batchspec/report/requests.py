"""The lengths of all requests, and the first error rows of each code. Shards are read a few at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from batchspec.report.quality import added
from batchspec.runstate.output_folder import OutputFolder
from batchspec.runstate.scan import scanning
from batchspec.text import MESSAGE_CHARS

Counts = NDArray[np.int64]

NUM_SHOWN = 5
READ_ROWS = 32768
"""Maximum number of rows in memory at a time, without their text."""


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
    errors: dict[str, tuple[Failed, ...]]
    """The first rows of each error code, in the order of the input."""


def read_requests(folder: OutputFolder) -> Requests:
    """What the report shows of single requests. Raises OutputError without a committed shard, StorageError."""
    prompts = outputs = np.zeros(1, np.int64)
    errors: dict[str, tuple[Failed, ...]] = {}
    done = sorted(folder.committed())
    step = max(1, READ_ROWS // folder.manifest.layout.most_rows(done))
    for start in range(0, max(1, len(done)), step):
        here = done[start : start + step]
        errors = _failed(folder, here, errors)
        rows = _lengths(folder, here)
        prompts = added(prompts, rows["prompt_tokens"])
        outputs = added(outputs, rows["completion_tokens"])
    return Requests(prompts, outputs, errors)


def _lengths(folder: OutputFolder, shards: list[int]) -> pl.DataFrame:
    usage = pl.col("usage").struct
    picked = folder.scan(shards).filter(pl.col("status").is_in(["ok", "truncated"])).select(
        usage.field("prompt_tokens"), usage.field("completion_tokens")
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
