"""Keys and columns that would have no effect with this input, model, drafter or device are refused by name.

The user set it for a reason, and the output would not show that it changed nothing. A column that no row reads and that is named
like an option is not refused, because it may be data: the user is told (`input_notes.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from batchspec.config.key import value_of
from batchspec.config.schema import RunConfig
from batchspec.data.dataset.columns import ColumnMap
from batchspec.data.dataset.reader import Source
from batchspec.errors import ConfigError, InputError
from batchspec.packing.input_notes import has_value
from batchspec.records import LEAST_TEMPERATURE

if TYPE_CHECKING:
    from batchspec.model.spec import ModelSpec

OF_CHATS = ("input.system", "input.final_assistant", "input.template_kwargs", "input.template_date", "model.chat_template")
"""Keys that only chats read."""
CHAT_COLUMNS = ("system", "tools", "template_kwargs", "final_assistant", "tool_choice", "parallel_tool_calls")
"""Columns that only chats read. If prompts are text and `input.chat` is false, rows that fill them are error rows."""
DECODED_COLUMNS = (
    "max_new_tokens", "min_new_tokens", "n", "stop", "bad_words", "schema", "regex", "choice", "grammar", "response_format",
    "thinking_token_budget", "synthetic_len", "tool_choice", "parallel_tool_calls", "num_logprobs",
)
"""Columns about the length, the end and the form of an answer, which a scored row does not have."""


def check_columns(config: RunConfig, columns: ColumnMap, source: Source) -> None:
    """Raises InputError for a mapped column that no row can use. A column without any value asks for nothing."""
    if columns.prompt_kind == "prompt_ids":
        _refuse(columns, source, CHAT_COLUMNS, "applies to chats, and the prompts of this input are prompt_ids")
    if (score := config.decode.score) != "none":
        names = tuple(name for name in DECODED_COLUMNS if (name, score) != ("choice", "choices"))
        _refuse(columns, source, names, f"applies to answers, and decode.score={score} writes none")


def _refuse(columns: ColumnMap, source: Source, names: tuple[str, ...], why: str) -> None:
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
    if decode.score != "none" or decode.temperature >= LEAST_TEMPERATURE or (decode.n == 1 and column is None):
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
        raise ConfigError(
            "ablation.sharded_draft=true has no effect with cluster.tensor_parallel=1: there is one GPU per copy of the model; "
            "remove the key"
        )


def check_keys_of_input(config: RunConfig, columns: ColumnMap, source: Source) -> None:
    """Raises ConfigError for a key that this input leaves without effect."""
    kind, usual, decode = columns.prompt_kind, RunConfig(), config.decode
    if kind == "prompt_ids" and config.input.chat:
        raise ConfigError("input.chat=true applies to text, and the prompts of this input are prompt_ids; remove the key")
    if kind != "messages" and not config.input.chat:
        for key in OF_CHATS:
            if (value := value_of(config, key)) != value_of(usual, key):
                instead = "set input.chat=true or remove the key" if kind == "prompt" else "remove the key"
                column = columns.prompt_column
                without = "input.prompt makes" if column is None else f"column {column!r} ({kind}) has"
                raise ConfigError(f"{key}={value} applies to chats, and {without} none; {instead}")
    if columns.adds_turn and config.input.final_assistant != usual.input.final_assistant:
        raise ConfigError(
            f"input.final_assistant={config.input.final_assistant} has no effect, because the user turn of input.prompt follows "
            "each answer; remove one"
        )
    if config.input.drop and source.filled_by_requests is None:
        raise ConfigError(
            f"input.drop={config.input.drop} is for OpenAI's batch requests, JSON lines with custom_id and body, and the input "
            "has none; remove the key"
        )
    if config.model.tool_calls != "auto" and (columns.get("tools") is None or kind == "prompt_ids"):
        raise ConfigError(
            f"model.tool_calls={config.model.tool_calls} has no effect without the column `tools`; name it, "
            "input.columns.tools=COLUMN, or remove the key"
        )
    if decode.thinking_closing and decode.thinking_token_budget is None and columns.get("thinking_token_budget") is None:
        raise ConfigError(
            "decode.thinking_closing has no effect without a thinking budget; set decode.thinking_token_budget, add a column "
            "thinking_token_budget, or remove the key"
        )


def check_keys_of_model(config: RunConfig, spec: ModelSpec, *, thinks: bool) -> None:
    """Raises ConfigError for a key that this model leaves without effect.

    thinks  whether its outputs have reasoning blocks
    """
    output = config.output
    if output.reasoning_in_messages and output.messages != "full":
        raise ConfigError(
            f"output.reasoning_in_messages=true has no effect with output.messages={output.messages}, which leaves answers out "
            "of messages; remove one"
        )
    if output.reasoning_in_messages and not thinks:
        raise ConfigError(
            "output.reasoning_in_messages=true needs think tokens, and the tokenizer has no known ones; "
            "name the model's, as in model.think_tokens=[<think>,</think>], or remove the key"
        )
    correlation = config.packing.expert_correlation
    if correlation != RunConfig().packing.expert_correlation and spec.experts is None:
        raise ConfigError(
            f"packing.expert_correlation={correlation} applies to experts (MoE), and the model has none; remove the key"
        )
