"""Lines for the user about an input: columns with the name of an option that no row reads, texts for a chat model that are not
given to it as chats, what requests leave out, keys of sampling in a greedy job, and tools whose calls stay text."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from batchspec.config.decode_schema import DecodeConfig
from batchspec.config.schema import RunConfig
from batchspec.config.vllm_names import NAMES, OF_REQUESTS
from batchspec.data.dataset.column_types import is_list
from batchspec.data.dataset.columns import IMAGES, PROMPTS, TYPES, ColumnMap, must_be_mapped
from batchspec.data.dataset.openai_requests import defaults_note
from batchspec.data.dataset.reader import Source
from batchspec.records import LEAST_TEMPERATURE
from batchspec.tasks.registry import task_of
from batchspec.tool_calls.registry import FORMS

if TYPE_CHECKING:
    from batchspec.packing.admit import Admission
    from batchspec.text.tokenizer import Tokenizer

READ_ROWS = 8192
"""Rows whose cells are in memory at a time."""
_ADAPTERS = ("model.adapter", "model.adapters")
_OPTIONS = {item.name: f"decode.{item.name}" for item in fields(DecodeConfig)} | {
    name: key for name, key in NAMES.items() if key.startswith("decode.") or key in (*_ADAPTERS, "input.template_kwargs")
}
"""Names of options of a row, batchspec's and those of other programs -> batchspec's key."""
_WRITTEN = dict.fromkeys(("logprobs", "top_logprobs"), "output.logprobs") | {"prompt_logprobs": "output.prompt_logprobs"}
"""The same of options that are also columns of a job's output, as lists."""
_COLUMNS = {"image": IMAGES}
"""Usual names of columns that are no options -> batchspec's."""


def input_notes(config: RunConfig, admission: Admission, source: Source, tokenizer: Tokenizer | None) -> list[tuple[str, str]]:
    """(label, line) of each note that applies."""
    columns, filled = admission.columns, source.filled_by_requests
    notes = [
        ("columns", _unread_columns(config, columns, source)),
        ("length", admission.length_note),
        ("chat", _chat_note(config, admission, source, tokenizer)),
        ("chat", dropped_note(tokenizer)),
        ("reasoning", _reasoning_note(config, admission, tokenizer)),
        ("requests", "" if filled is None else defaults_note(filled, config.decode)),
        ("greedy", _greedy_note(config, columns)),
        ("samples", _samples_note(config, columns, source)),
        ("tools", _calls_note(admission, source, config.model.tool_calls)),
    ]
    return [(label, line) for label, line in notes if line]


def _greedy_note(config: RunConfig, columns: ColumnMap) -> str:
    """One line if keys choose among tokens that are sampled, and no row is."""
    decode, usual = config.decode, DecodeConfig()
    given = {key: getattr(decode, key) for key in ("top_k", "top_p", "min_p") if getattr(decode, key) != getattr(usual, key)}
    if not given or not task_of(config).decodes or decode.temperature >= LEAST_TEMPERATURE or "temperature" in columns.names:
        return ""
    keys = ", ".join(f"decode.{key}={value:g}" for key, value in given.items())
    heat = f"decode.temperature={decode.temperature:g} is greedy"
    return f"{keys} without effect, since {heat}: set decode.temperature, or choose decode=sampled"


def _samples_note(config: RunConfig, columns: ColumnMap, source: Source) -> str:
    """One line if some rows ask by columns of theirs for several completions at temperature 0, which are equal. `check_samples`
    refuses a job without other rows. Columns of another type than numbers are not looked at.
    """
    usual = {"n": config.decode.n, "temperature": config.decode.temperature}
    own = {name: columns.names[name] for name in usual if name in columns.names}
    numbers = all(_is_number(source.schema.field(column).type) for column in own.values())
    if not own or not numbers or not task_of(config).decodes or ("n" not in own and usual["n"] == 1):
        return ""
    if "temperature" not in own and usual["temperature"] >= LEAST_TEMPERATURE:
        return ""
    num_rows = 0
    for shard in source.reading([*own.values()]).shards(READ_ROWS):
        cells = {
            name: pc.fill_null(pc.cast(shard.table[column], pa.float32(), safe=False), usual[name])
            for name, column in own.items()
        }
        n, temperature = (cells.get(name, pa.scalar(value, pa.float32())) for name, value in usual.items())
        equal = pc.and_(pc.greater(n, 1), pc.less(temperature, LEAST_TEMPERATURE))
        num_rows += pc.sum(equal).as_py()
    if not num_rows:
        return ""
    rows = "1 row asks" if num_rows == 1 else f"{num_rows:,} rows ask"
    return f"{rows} for several completions at temperature 0, which are all equal: give them a temperature above 0, or n=1"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind))


def _calls_note(admission: Admission, source: Source, setting: str) -> str:
    """One line if rows have tools and calls stay text because no form of them is known. setting: model.tool_calls."""
    column = admission.columns.get("tools")
    if setting != "auto" or column is None or admission.tool_form is not None or admission.has_channels:
        return ""
    if not any(map(has_value, source.column(column))):
        return ""
    return (
        f"column {column!r}: calls of these tools stay in the text of `completion`, because the chat template writes none of the "
        f"known forms ({', '.join(FORMS)}); model.tool_calls=NAME chooses one"
    )


def _unread_columns(config: RunConfig, columns: ColumnMap, source: Source) -> str:
    """What to do about columns that have a value and the name of an option, in any case, and that no row reads.

    A name that input.columns gives, also as null, was decided about.
    """
    read, said = set(columns.read), []
    for field in source.schema:
        if field.name in read or not (advice := _advice(config, field)):
            continue
        if any(map(has_value, source.column(field.name))):
            said.append(f"column {field.name!r} has no effect: {advice}")
    return "; ".join(said)


def _advice(config: RunConfig, field: pa.Field) -> str:
    """What a column should be called instead of the option's name that it has; empty if it has none."""
    name = _COLUMNS.get(name := field.name.casefold(), name)
    key = _OPTIONS.get(name) or ("" if is_list(field.type) else _WRITTEN.get(name, ""))
    own = "adapter" if key in _ADAPTERS else name if name in TYPES else key.rpartition(".")[2]
    if own in TYPES:
        if own in config.input.columns or field.name in ("id", *PROMPTS):  # of an earlier job: any other input has them read
            return ""
        mapped = f"input.columns.{own}={field.name}"
        if must_be_mapped(name):
            return f"if answers are to follow it, map it, {mapped}; if it is data, input.columns.{own}=null"
        return f"batchspec's name is {own!r}; map it, {mapped}"
    return f"batchspec's name is the key {key}, for all rows" if key else OF_REQUESTS.get(name, "")


def _chat_note(config: RunConfig, admission: Admission, source: Source, tokenizer: Tokenizer | None) -> str:
    columns = admission.columns
    if columns.prompt_kind != "prompt" or config.input.chat or not task_of(config).decodes:
        return ""
    if tokenizer is None or not tokenizer.has_chat_template:
        return ""
    if (column := columns.prompt_column) is None:
        first = admission.templates.sources["prompt"]
    else:
        first = next((_text(values.drop_null()[0]) for values in source.column(column) if has_value(values)), "")
    if any(token in first for token in tokenizer.special_ids):  # the template was applied already
        return ""
    return "prompts are taken as text; this model has a chat template: input.chat=true makes each of them a user turn"


def dropped_note(tokenizer: Tokenizer | None) -> str:
    """One line if admitted chats had fields of messages that the chat template leaves out, as most templates do."""
    if tokenizer is None or not tokenizer.chats.dropped_keys:
        return ""
    return f"the chat template leaves out fields that messages of chats have: {', '.join(sorted(tokenizer.chats.dropped_keys))}"


def _reasoning_note(config: RunConfig, admission: Admission, tokenizer: Tokenizer | None) -> str:
    """One line if the chat template writes reasoning, and the tokenizer has no tokens by which it is told from the answer."""
    is_chat = admission.columns.prompt_kind == "messages" or config.input.chat
    if tokenizer is None or not is_chat or admission.settings.think is not None or config.model.think_tokens != "auto":
        return ""
    example = tokenizer.chats.example_of_reasoning(config.input.template_kwargs)
    if not example:
        return ""
    return (
        f"reasoning stays in the text of `completion`: the chat template writes it as {example!r}, and these marks are no single "
        "tokens of this tokenizer; model.think_tokens=[BEGIN,END] names tokens"
    )


def _text(cell: pa.Scalar) -> str:
    """Of a prompt, which may not be valid UTF-8: such a row becomes an error row later."""
    return cell.as_buffer().to_pybytes().decode("utf-8", "replace") if isinstance(cell, pa.StringScalar) else str(cell)


def has_value(values: pa.Array) -> bool:
    """Whether any value is neither null nor an empty list."""
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return bool(pc.any(pc.greater(pc.list_value_length(values), 0)).as_py())
    return bool(values.null_count < len(values))
