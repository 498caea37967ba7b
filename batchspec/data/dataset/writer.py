"""Completions of a shard as an Arrow table, and the table as a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchspec.config.schema import InputConfig, OutputConfig
from batchspec.data.dataset.chats import Chats
from batchspec.data.dataset.columns import ColumnMap
from batchspec.data.dataset.decoding import plain_bytes
from batchspec.data.dataset.plain_types import plain_type
from batchspec.data.dataset.reader import InputShard
from batchspec.data.dataset.schema import output_schema
from batchspec.data.dataset.untyped_columns import as_text
from batchspec.data.dataset.valid_text import valid_text
from batchspec.records import Completion, Ids, RowStats, TokenText
from batchspec.tasks.base import Task
from batchspec.tasks.registry import GENERATE

GROUP_BYTES = 128 << 20
GROUP_ROWS = 8192


def build_table(
    shard: InputShard,
    completions: Sequence[Completion],
    *,
    columns: ColumnMap,
    input: InputConfig,
    output: OutputConfig,
    attempt: str,
    think_tokens: tuple[str, str] | None = ("<think>", "</think>"),
    calls: bool = False,
    task: Task = GENERATE,
    token_text: TokenText | None = None,
    texts: Mapping[int, Mapping[str, str]] | None = None,
    finished_at: datetime | None = None,
) -> pa.Table:
    """The output rows of a shard, by (row_index, sample_index), in the schema of `output_schema`. Copied columns that are
    dictionaries in `shard.table` stay so; `plain_table` makes the schema's own type of them, and so does `write_parquet`.

    `think_tokens` are put around a thought in `messages`; None: outputs have channels, and thoughts are a separate field, as tool
    calls are with `calls`. Copied columns come from `shard.table`; text that is not valid UTF-8
    gets U+FFFD, so that every reader can open the file. `attempt` is the uuid of the run, `task` is the job's, `token_text`
    is needed with output.logprob_tokens, `texts` is as for `Chats`, `finished_at` (default now) is the time of the build.
    """
    completions = sorted(completions, key=lambda c: (c.row_index, c.sample_index))
    assert all(completion.num_undecoded is None for completion in completions), "a text was never decoded"
    schema = output_schema(shard.table.schema, columns, output, calls=calls, channels=think_tokens is None, task=task)
    token_text = token_text if output.logprob_tokens else None
    input_fields = {field.name: field for field in shard.table.schema}
    rows = pa.array([c.row_index - shard.first_row for c in completions], pa.int64())
    chats = None
    if output.messages != "none":
        chats = Chats(shard, columns, input, output, think_tokens, calls=calls, texts=texts or {})
    when = finished_at or datetime.now(UTC)
    values: dict[str, Callable[[Completion], Any]] = {
        "completion": attrgetter("text"),
        "logprobs": lambda completion: logprob_cells(completion.logprobs),
        "top_logprobs": lambda completion: top_logprob_cells(completion.top_logprobs, token_text),
        "prompt_logprobs": lambda completion: logprob_cells(completion.prompt_logprobs),
        "prompt_top_logprobs": lambda completion: top_logprob_cells(completion.prompt_top_logprobs, token_text),
        "usage": _usage,
        "error": _error,
        "spec_decode": lambda completion: _spec_decode(completion.stats),
        "perf": lambda completion: _perf(completion, attempt, when),
        **task.cells,
    }
    if chats is not None:
        values["messages"] = chats.of
    num_own = schema.get_field_index("perf") + 1
    arrays = []
    for field in list(schema)[:num_own]:
        value = values.get(field.name, attrgetter(field.name))
        arrays.append(pa.array([value(completion) for completion in completions], field.type))
    for field in list(schema)[num_own:]:
        column = shard.table.column(field.name)
        column = valid_text(as_text(column.combine_chunks(), input_fields[field.name]))
        arrays.append(column.take(rows) if pa.types.is_dictionary(column.type) else column.cast(field.type).take(rows))
    return pa.Table.from_arrays(arrays, schema=pa.schema(list(map(_of_type, schema, arrays))))


def _of_type(field: pa.Field, column: pa.Array) -> pa.Field:
    return field.with_type(column.type)


def plain_table(table: pa.Table) -> pa.Table:
    """The table in the types of `output_schema`: the values of dictionaries are repeated in each row."""
    return table.cast(pa.schema([field.with_type(plain_type(field.type)) for field in table.schema]))


def write_parquet(table: pa.Table, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a new file and fsync it: zstd 3, row groups of at most 128 MiB and 8192 rows, page checksums and page index.

    `metadata` becomes the file's key-value metadata. Raises OSError, which leaves the unfinished file.
    """
    schema = plain_table(table.slice(0, 0)).schema.with_metadata(dict(metadata))
    with path.open("xb") as file:
        with pq.ParquetWriter(
            file, schema, compression="zstd", compression_level=3, write_page_checksum=True, write_page_index=True
        ) as writer:
            for group in _row_groups(table):
                writer.write_table(plain_table(group).replace_schema_metadata(schema.metadata), row_group_size=GROUP_ROWS)
        file.flush()
        os.fsync(file.fileno())


def _row_groups(table: pa.Table) -> Iterator[pa.Table]:
    if table.num_rows <= 1 or (table.num_rows <= GROUP_ROWS and sum(map(plain_bytes, table.columns)) <= GROUP_BYTES):
        yield table
        return
    half = table.num_rows // 2
    yield from _row_groups(table.slice(0, half))
    yield from _row_groups(table.slice(half))


def logprob_cells(values: NDArray[np.float32] | None) -> list[float | None] | None:
    """Numbers as cells of a logprobs column: null for NaN."""
    return None if values is None else [None if value != value else value for value in values.tolist()]


def top_logprob_cells(
    top: tuple[Ids, NDArray[np.float32]] | None, token_text: TokenText | None = None
) -> list[list[dict[str, Any]]] | None:
    """Ids and logprobs [tokens, N] as cells of a top_logprobs column, with texts if they can be made: no entry for the id -1."""
    if top is None:
        return None
    ids, logprobs = top
    known = [] if token_text is None else [token for token in np.unique(ids).tolist() if token >= 0]
    text = {token: {"token": token_text(token)[0]} for token in known if token_text is not None}
    return [
        [{"id": token, **text.get(token, {}), "logprob": value} for token, value in zip(*place, strict=True) if token >= 0]
        for place in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


def _usage(completion: Completion) -> dict[str, int | None] | None:
    if completion.prompt_ids is None:
        return None
    prompt = len(completion.prompt_ids)
    answer = 0 if completion.token_ids is None else len(completion.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "reasoning_tokens": completion.reasoning_tokens,
        "cached_tokens": completion.cached_tokens,
        "total_tokens": prompt + answer,
        "image_tokens": completion.image_tokens,
    }


def _error(completion: Completion) -> dict[str, Any] | None:
    error = completion.error
    if error is None:
        return None
    return {"code": error.code, "stage": error.stage, "message": error.message, "retryable": error.retryable}


def _spec_decode(stats: RowStats | None) -> dict[str, Any] | None:
    if stats is None or stats.drafter == "none":
        return None
    return {
        "drafter": stats.drafter,
        "num_spec_steps": stats.num_rounds,
        "num_draft_tokens": stats.num_drafted,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_spec_tokens": stats.draft_len,
        "num_prefills": stats.num_prefills,
        "num_discarded_tokens": stats.num_discarded,
        "num_forced_tokens": stats.num_forced,
        "mean_acceptance_length": 1 + stats.num_accepted / stats.num_rounds if stats.num_rounds else None,
        "draft_acceptance_rate": _ratio(stats.num_accepted, stats.num_drafted),
        "acceptance_histogram": stats.histogram,
        "acceptance_per_position": [_ratio(*pair) for pair in zip(stats.accepted_at, stats.drafted_at, strict=True)],
        "drafted_per_position": stats.drafted_at,
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _perf(completion: Completion, attempt: str, finished_at: datetime) -> dict[str, Any]:
    perf: dict[str, Any] = {
        "predicted_tokens": completion.predicted_tokens, "attempt": attempt, "finished_at": finished_at
    }
    if (stats := completion.stats) is not None:
        perf |= {"prefill_s": stats.prefill_s, "decode_s": stats.decode_s, "rounds": stats.num_rounds}
        perf["slot"] = stats.slot
    return perf
