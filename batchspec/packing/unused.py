"""Keys and columns that would have no effect with this input, model, drafter or device are refused by name.

The user set it for a reason, and the output would not show that it changed nothing. A column that no row reads and that is named
like an option is not refused, because it may be data: the user is told (`input_notes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from batchspec.config.key import ANSWERS, CHATS, Scope
from batchspec.config.no_effect import refuse_given
from batchspec.config.row_options import ROW_OPTIONS
from batchspec.config.schema import KEYS, RunConfig
from batchspec.data.dataset.columns import IMAGES, ColumnMap
from batchspec.data.dataset.reader import Source
from batchspec.data.dataset.untyped_columns import is_page
from batchspec.errors import ConfigError, InputError
from batchspec.packing.input_notes import has_value
from batchspec.records import LEAST_TEMPERATURE
from batchspec.tasks.registry import task_of

if TYPE_CHECKING:
    from batchspec.model.spec import ModelSpec


def check_columns(config: RunConfig, columns: ColumnMap, source: Source) -> None:
    """Raises InputError for a mapped column that no row can use. A column without any value asks for nothing."""
    if columns.prompt_kind == "prompt_ids":
        _refuse(columns, source, _of(CHATS), "applies to chats, and the prompts of this input are prompt_ids")
    if (task := task_of(config)).texts is not None:
        _refuse(columns, source, _of(CHATS), f"applies to chats, and the prompts of {task.asked} are none")
    if not task.decodes:
        names = [name for name in _of(ANSWERS) if name not in task.cells_read]
        _refuse(columns, source, names, f"applies to answers, and {task.asked} writes none")


def _of(scope: Scope) -> list[str]:
    """The columns that apply to nothing else."""
    return [name for name, option in ROW_OPTIONS.items() if scope in option.declared.applies_to]


def _refuse(columns: ColumnMap, source: Source, names: Sequence[str], why: str) -> None:
    for name in names:
        column = columns.get(name)
        if column is not None and any(map(has_value, source.column(column))):
            raise InputError(f"column {column!r} ({name}) {why}; ignore the column with input.columns.{name}=null")


def check_samples(config: RunConfig, columns: ColumnMap, source: Source) -> None:
    """Raises ConfigError or InputError if several completions of each row are asked for, and all of them would be equal.

    Single rows are not checked, and neither are OpenAI's requests, of which each has an n of its own: greedy rows get equal
    completions, and `input_notes.py` counts them.
    """
    decode, temperature, column = config.decode, columns.get("temperature"), columns.get("n")
    if not task_of(config).decodes or decode.temperature >= LEAST_TEMPERATURE or (decode.n == 1 and column is None):
        return
    if temperature is not None and any(map(_any_above_0, source.column(temperature))):
        return
    why = f"decode.temperature={decode.temperature:g} is greedy, which makes all completions of a row equal"
    if decode.n > 1:
        raise ConfigError(f"decode.n={decode.n}: {why}; choose decode=sampled, or remove decode.n")
    if column is None or source.filled_by_requests is not None:
        return
    given = [values.drop_null() for values in source.column(column)]
    if any(map(len, given)) and all(map(_all_above_1, given)):
        raise InputError(
            f"column {column!r} (n) asks for several completions of a row: {why}; choose decode=sampled, fill a column "
            "temperature, or ignore the column with input.columns.n=null"
        )


def _all_above_1(values: pa.Array) -> bool:
    """Whether all numbers are greater than 1; false for a column of another type."""
    return _is_numeric(values.type) and bool(pc.all(pc.greater(_comparable(values), 1), min_count=0).as_py())


def _any_above_0(values: pa.Array) -> bool:
    """Whether any number is above 0; true for a column of another type, such as a JSONL key with numbers and strings: its rows
    are checked one by one when they are admitted.
    """
    if values.null_count == len(values):
        return False
    return not _is_numeric(values.type) or bool(pc.any(pc.greater(_comparable(values), 0)).as_py())


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _comparable(values: pa.Array) -> pa.Array:
    return values.cast(pa.float32()) if pa.types.is_float16(values.type) else values


def check_keys_of_engine(config: RunConfig) -> None:
    """Raises ConfigError for a key that this number of GPUs leaves without effect."""
    if config.ablation.sharded_draft and config.cluster.tensor_parallel == 1:
        why = "has no effect with cluster.tensor_parallel=1: there is one GPU per copy of the model; remove the key"
        refuse_given(config, ["ablation.sharded_draft"], why)


def check_keys_of_input(config: RunConfig, columns: ColumnMap, source: Source) -> None:
    """Raises ConfigError for a key that this input leaves without effect."""
    kind = columns.prompt_kind
    if kind == "prompt_ids":
        why = "applies to text, and the prompts of this input are prompt_ids; remove the key"
        refuse_given(config, ["input.chat"], why)
    if kind != "messages" and not config.input.chat:
        instead = "set input.chat=true or remove the key" if kind == "prompt" else "remove the key"
        column = columns.prompt_column
        without = "input.prompt makes" if column is None else f"column {column!r} ({kind}) has"
        of_chats = [name for name, declared in KEYS.items() if CHATS in declared.applies_to]
        refuse_given(config, of_chats, f"applies to chats, and {without} none; {instead}")
    if kind != "prompt":
        why = f"is for prompts that are text, and those of this input are {kind}; remove the key"
        refuse_given(config, ["input.prompt_name"], why)
    if columns.adds_turn:
        why = "has no effect, because the user turn of input.prompt follows each answer; remove one"
        refuse_given(config, ["input.final_assistant"], why)
    if (images := columns.get(IMAGES)) is not None and is_page(source.schema.field(images)):
        why = "is for images that rows name, and those of this input are pages of PDFs; remove the key"
        refuse_given(config, ["input.image_root"], why)
    if source.filled_by_requests is None:
        why = "is for OpenAI's batch requests, JSON lines with custom_id and body, and the input has none; remove the key"
        refuse_given(config, ["input.drop"], why)
    if columns.get("tools") is None or kind == "prompt_ids":
        why = "has no effect without the column `tools`; name it, input.columns.tools=COLUMN, or remove the key"
        refuse_given(config, ["model.tool_calls"], why)
    if config.decode.thinking_token_budget is None and columns.get("thinking_token_budget") is None:
        refuse_given(
            config, ["decode.thinking_closing"],
            "has no effect without a thinking budget; set decode.thinking_token_budget, add a column thinking_token_budget, or "
            "remove the key",
        )


def check_keys_of_model(config: RunConfig, spec: ModelSpec, *, thinks: bool) -> None:
    """Raises ConfigError for a key that this model leaves without effect. thinks: whether its outputs have reasoning blocks."""
    messages = config.output.messages
    if messages != "full":
        why = f"has no effect with output.messages={messages}, which leaves answers out of messages; remove one"
        refuse_given(config, ["output.reasoning_in_messages"], why)
    if not thinks:
        refuse_given(
            config, ["output.reasoning_in_messages"],
            "needs think tokens, and the tokenizer has no known ones; name the model's, as in model.think_tokens="
            "[<think>,</think>], or remove the key",
        )
    if spec.experts is None:
        why = "applies to experts (MoE), and the model has none; remove the key"
        refuse_given(config, ["packing.expert_correlation"], why)
