"""Hand-made completions and shards for the tests of io and report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchspec.config.schema import InputConfig, OutputConfig
from batchspec.data.dataset.columns import ColumnMap, map_columns
from batchspec.data.dataset.reader import InputShard, table_source
from batchspec.data.dataset.writer import build_table
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.records import Completion, RowError, RowStats
from batchspec.tasks.base import Task
from batchspec.tasks.registry import GENERATE


def stats(accepted: list[int], drafted: list[int] | None = None, *, k: int = 3, **changes: Any) -> RowStats:
    """RowStats of rounds that accepted `accepted[i]` of `drafted[i]` (default k) draft tokens."""
    drafted = drafted or [k] * len(accepted)
    values: dict[str, Any] = {
        "drafter": "lookup",
        "draft_len": k,
        "num_prefills": 1,
        "num_rounds": len(accepted),
        "num_drafted": sum(drafted),
        "num_accepted": sum(accepted),
        "num_discarded": 0,
        "histogram": tuple(accepted.count(j) for j in range(k + 1)),
        "drafted_at": tuple(sum(d > j for d in drafted) for j in range(k)),
        "accepted_at": tuple(sum(a > j for a in accepted) for j in range(k)),
        "prefill_s": 0.25,
        "decode_s": 1.5,
        "slot": 2,
    }
    return RowStats(**values | changes)


def completion(row: int, sample: int = 0, **changes: Any) -> Completion:
    values: dict[str, Any] = {
        "request_id": f"q-{row}",
        "row_index": row,
        "sample_index": sample,
        "shard": 0,
        "status": "ok",
        "finish_reason": "stop",
        "prompt_ids": np.arange(5, dtype=np.int32),
        "token_ids": np.array([7, 8, 2], np.int32),
        "text": f"answer {row}.{sample}",
        "seed": 11,
        "stats": stats([0, 3, 1]),
    }
    return Completion(**values | changes)


def failed(row: int) -> Completion:
    error = RowError(code="overlong", stage="admit", message="too long", retryable=False)
    nothing: dict[str, Any] = {"prompt_ids": None, "token_ids": None, "text": None, "seed": None, "stats": None}
    return completion(row, status="error", finish_reason="error", error=error, **nothing)


def dataset(rows: int) -> pa.Table:
    names = range(rows)
    kinds = ["a" if i % 2 == 0 else "b" for i in names]
    return pa.table({"id": [f"q-{i}" for i in names], "prompt": [f"say {i}" for i in names], "kind": kinds})


def shards_of(table: pa.Table, shard_rows: int) -> tuple[list[InputShard], ColumnMap]:
    return list(table_source(table).shards(shard_rows)), map_columns(table.schema, {})


def built(
    shard: InputShard, columns: ColumnMap, completions: list[Completion] | None = None, *, task: Task = GENERATE,
    calls: bool = False, **output: Any,
) -> pa.Table:
    rows = range(shard.first_row, shard.first_row + shard.table.num_rows)
    return build_table(
        shard, [completion(row) for row in rows] if completions is None else completions,
        columns=columns, input=InputConfig(), output=OutputConfig(**output), attempt="attempt", task=task, calls=calls,
    )


def tables(rows: int = 6, shard_rows: int = 2, **output: Any) -> list[pa.Table]:
    """Every shard of a dataset of `rows` rows."""
    shards, columns = shards_of(dataset(rows), shard_rows)
    return [built(shard, columns, **output) for shard in shards]


def new_folder(path: Path, num_rows: int, shard_rows: int, **changes: Any) -> OutputFolder:
    values: dict[str, Any] = {"fingerprint": {"model": "a"}, "config": {"model": {"path": "tiny"}}, "recorded": {}, "files": ()}
    folder = OutputFolder(path)
    folder.create(num_rows=num_rows, shard_rows=shard_rows, **values | changes)
    return folder
