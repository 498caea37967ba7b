"""The schema of an output file: fixed columns in a fixed order, with types that never depend on the values."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.config.schema import OutputConfig
from batchspec.data.dataset.columns import IMAGES, ColumnMap
from batchspec.data.dataset.messages import THINKING_FIELD, TOOL_FIELDS, may_call_tools
from batchspec.data.dataset.plain_types import plain_type
from batchspec.errors import ConfigError, InputError
from batchspec.tasks.base import Task
from batchspec.tasks.registry import GENERATE, TASKS

TURN = (("role", pa.string()), ("content", pa.large_string()))
MESSAGES = pa.list_(pa.struct(TURN))
TOOL_MESSAGES = pa.list_(pa.struct([*TURN, *((name, pa.large_string()) for name in TOOL_FIELDS)]))
"""Type of messages if input or output may have tool calls; tool_calls is the JSON text of OpenAI's list."""
THINKING_MESSAGES = pa.list_(pa.struct([*TURN, *((name, pa.large_string()) for name in (THINKING_FIELD, *TOOL_FIELDS))]))
"""The same with a field for the thought, where gpt-oss's chat templates read it."""
TOP_LOGPROBS = pa.list_(pa.list_(pa.struct([("id", pa.int32()), ("logprob", pa.float32())])))
TOP_TOKENS = pa.list_(pa.list_(pa.struct([("id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())])))
"""The same with the text of each token (output.logprob_tokens)."""
DIGEST = "image_digest"
"""Column of jobs whose prompts may have images: says which ones a row had; null for none."""
EMBEDDING = pa.list_(pa.float32(), 1)
SCORES = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float32())]))
CHOICE_PROBS = pa.list_(pa.struct([("choice", pa.large_string()), ("prob", pa.float64()), ("logprob", pa.float64())]))
USAGE = pa.struct([(f"{name}_tokens", pa.int32()) for name in ("prompt", "completion", "reasoning", "cached", "total")])
IMAGE_USAGE = pa.struct([*USAGE, ("image_tokens", pa.int32())])
"""Of jobs whose prompts may have images: how many of the prompt's tokens are places of these."""
ERROR = pa.struct([("code", pa.string()), ("stage", pa.string()), ("message", pa.string()), ("retryable", pa.bool_())])
SPEC_DECODE = pa.struct(
    [
        ("drafter", pa.string()),
        ("num_spec_steps", pa.int32()),
        ("num_draft_tokens", pa.int32()),
        ("num_accepted_draft_tokens", pa.int32()),
        ("num_spec_tokens", pa.int32()),
        ("num_prefills", pa.int32()),
        ("num_discarded_tokens", pa.int32()),
        ("num_forced_tokens", pa.int32()),
        ("mean_acceptance_length", pa.float32()),
        ("draft_acceptance_rate", pa.float32()),
        ("acceptance_histogram", pa.list_(pa.int32())),
        ("acceptance_per_position", pa.list_(pa.float32())),
        # Counts, because sums over rows need them: a ratio of 0 does not tell how often the position was drafted.
        ("drafted_per_position", pa.list_(pa.int32())),
    ]
)
PERF = pa.struct(
    [
        ("prefill_s", pa.float32()),
        ("decode_s", pa.float32()),
        ("rounds", pa.int32()),
        ("slot", pa.int32()),
        ("predicted_tokens", pa.int32()),
        ("attempt", pa.string()),
        ("finished_at", pa.timestamp("us", tz="UTC")),
    ]
)


def output_schema(
    input_schema: pa.Schema, columns: ColumnMap, output: OutputConfig, *, calls: bool = False, channels: bool = False,
    task: Task = GENERATE,
) -> pa.Schema:
    """The schema of every output file of a job: its own columns, then the input's columns that output.passthrough copies.

    calls     rows may have tools, so there is a column of tool calls
    channels  the model's outputs have channels (harmony), so that messages may have a field for the thought
    task      what the job does to each row
    An input column `messages`, `prompt_ids` or `seed` that is mapped, or `request_id` that is the id, is not copied, because the
    output's column of that name has its values. Neither is the column of images, unless output.passthrough names it.
    Raises ConfigError if another input column has the name of an output column, or output.passthrough names a missing column,
    and InputError for a column that cannot be copied.
    """
    messages = messages_type(input_schema, columns, output, calls=calls, channels=channels)
    own = _own_fields(output, messages, calls=calls, task=task, images=columns.has_images)
    copied = _passthrough(input_schema, columns, output.passthrough, {field.name for field in own})
    return pa.schema([*own, *(_copied_field(input_schema.field(name), copied) for name in copied)])


def columns_read(input_schema: pa.Schema, columns: ColumnMap, output: OutputConfig) -> list[str]:
    """The input's columns that the rows of a job are made of. `output_schema` has checked output.passthrough."""
    wish = output.passthrough
    everything = [name for name in input_schema.names if name != columns.get(IMAGES)]
    copied = everything if wish == "all" else () if wish == "none" else wish
    return [*columns.read, *copied]


def messages_type(
    input_schema: pa.Schema, columns: ColumnMap, output: OutputConfig, *, calls: bool, channels: bool
) -> pa.DataType:
    """Type of the column `messages`: role and content, and the fields of tool calls if input or output may have them."""
    if channels and output.reasoning_in_messages:
        return THINKING_MESSAGES
    in_prompt = columns.prompt_kind == "messages" and may_call_tools(input_schema.field(columns.names["messages"]))
    return TOOL_MESSAGES if in_prompt or calls else MESSAGES


def _own_fields(output: OutputConfig, messages: pa.DataType, *, calls: bool, task: Task, images: bool) -> list[pa.Field]:
    optional = {
        "messages": output.messages != "none",
        "prompt_ids": output.prompt_ids,
        "token_ids": output.token_ids,
        "tool_calls": calls,
        DIGEST: images,
        "logprobs": output.logprobs is not None,
        "top_logprobs": bool(output.logprobs),
    }
    optional |= {name: name in task.writes(output) for one in TASKS.values() for name in one.columns}
    top = TOP_TOKENS if output.logprob_tokens else TOP_LOGPROBS
    usage = IMAGE_USAGE if images else USAGE
    every = _every_field(messages, top, _embedding(output, task.dim), usage)
    return [field for field in every if optional.get(field.name, True)]


def _embedding(output: OutputConfig, dim: int) -> pa.DataType:
    """dim: number of values of an embedding; 0: of a job that writes none, or whose model is not known yet"""
    return pa.list_(pa.float16() if output.embedding_dtype == "float16" else pa.float32(), dim or 1)


def _every_field(
    messages: pa.DataType, top: pa.DataType, embedding: pa.DataType = EMBEDDING, usage: pa.DataType = USAGE
) -> list[pa.Field]:
    """The columns that a job may write itself, in their order."""
    ids = pa.list_(pa.int32())
    return [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("row_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("messages", messages),
        pa.field("completion", pa.large_string()),
        pa.field("reasoning", pa.large_string()),
        pa.field("reasoning_truncated", pa.bool_()),
        pa.field("tool_calls", pa.large_string()),
        pa.field("finish_reason", pa.string()),
        pa.field("stop_reason", pa.string()),
        pa.field("prompt_ids", ids),
        pa.field("token_ids", ids),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("top_logprobs", top),
        pa.field("prompt_logprob_sum", pa.float64()),
        pa.field("prompt_logprobs", pa.list_(pa.float32())),
        pa.field("prompt_top_logprobs", top),
        pa.field("choice_probs", CHOICE_PROBS),
        pa.field("scores", SCORES),
        pa.field("score", pa.float32()),
        pa.field("embedding", embedding),
        pa.field("usage", usage),
        pa.field("seed", pa.int64()),
        pa.field(DIGEST, pa.string()),
        pa.field("error", ERROR),
        pa.field("spec_decode", SPEC_DECODE),
        pa.field("perf", PERF),
    ]


OWN_COLUMNS = tuple(field.name for field in _every_field(MESSAGES, TOP_LOGPROBS))
"""Names of all columns that some job writes itself; the columns that a job copies come after the last one."""


def _passthrough(input_schema: pa.Schema, columns: ColumnMap, wish: str | Sequence[str], own: set[str]) -> list[str]:
    if wish == "none":
        return []
    everything = wish == "all"
    there = list(input_schema.names)
    names = [name for name in there if name != columns.get(IMAGES)] if everything else list(dict.fromkeys(wish))
    known = set(there)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, there, n=1) or there[:50]
            raise ConfigError(f"output.passthrough: the input has no column {name!r}; did you mean {', '.join(near)}?")
    if everything:
        names = [name for name in names if not (name in own and columns.get("id" if name == "request_id" else name) == name)]
    for name in names:
        if name in own:
            others = ",".join(other for other in names if other not in own)
            raise ConfigError(
                f"output.passthrough: the input's column {name!r} has the name of an output column; rename it in the input "
                f"or leave it out: output.passthrough=[{others}]"
            )
    return names


def _copied_field(field: pa.Field, names: Sequence[str]) -> pa.Field:
    try:
        copied = pa.field(field.name, plain_type(field.type))
        _try_copy(field.type, copied.type)
    except (ValueError, pa.ArrowNotImplementedError, OSError) as error:
        others = ",".join(name for name in names if name != field.name)
        raise InputError(
            f"column {field.name!r} has type {field.type}: {error}; cast it, or leave it out: output.passthrough=[{others}]"
        ) from None
    return copied


@cache
def _try_copy(kind: pa.DataType, copied: pa.DataType) -> None:
    """Cast, select and write an empty column of this type, as the writer will do with rows. Raises ArrowNotImplementedError or
    OSError if Arrow cannot, before any row is computed."""
    none = pa.nulls(0, pa.int64())  # pa.array would import pandas, where that is installed
    column = pa.nulls(0, kind).cast(copied).take(none)
    pq.write_table(pa.table({"column": column}), pa.BufferOutputStream())
