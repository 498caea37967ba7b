"""Lines for the user about an input: columns with the name of an option that no row reads, texts for a chat model that are not
given to it as chats, what requests leave out, and tools whose calls stay text."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from batchspec.config.decode_schema import DecodeConfig
from batchspec.config.schema import RunConfig
from batchspec.config.vllm_names import NAMES, OF_REQUESTS
from batchspec.dataset.columns import NAMED_ONLY, TYPES, ColumnMap, is_list
from batchspec.dataset.openai_requests import defaults_note
from batchspec.dataset.reader import Source
from batchspec.tool_calls.registry import FORMS

if TYPE_CHECKING:
    from batchspec.model.tokenizer import Tokenizer
    from batchspec.packing.admit import Admission

_ADAPTERS = ("model.adapter", "model.adapters")
_OPTIONS = {item.name: f"decode.{item.name}" for item in fields(DecodeConfig)} | {
    name: key for name, key in NAMES.items() if key.startswith("decode.") or key in (*_ADAPTERS, "input.template_kwargs")
}
"""Names of options of a row, batchspec's and those of other programs -> batchspec's key."""
_WRITTEN = dict.fromkeys(("logprobs", "top_logprobs"), "output.logprobs") | {"prompt_logprobs": "output.prompt_logprobs"}
"""The same of options that are also columns of a job's output, as lists."""


def input_notes(config: RunConfig, admission: Admission, source: Source, tokenizer: Tokenizer | None) -> list[tuple[str, str]]:
    """(label, line) of each note that applies."""
    columns, filled = admission.columns, source.filled_by_requests
    notes = [
        ("columns", _unread_columns(config, columns, source)),
        ("chat", _chat_note(config, columns, source, tokenizer)),
        ("requests", "" if filled is None else defaults_note(filled, config.decode)),
        ("tools", _calls_note(admission, source, config.model.tool_calls)),
    ]
    return [(label, line) for label, line in notes if line]


def _calls_note(admission: Admission, source: Source, setting: str) -> str:
    """One line if rows have tools and calls stay text because no form of them is known. setting: model.tool_calls."""
    column = admission.columns.get("tools")
    if setting != "auto" or column is None or admission.has_calls(admission.columns):
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
    read, said = set(columns.names.values()), []
    for field in source.schema:
        if field.name in read or not (advice := _advice(config, field)):
            continue
        if any(map(has_value, source.column(field.name))):
            said.append(f"column {field.name!r} has no effect: {advice}")
    return "; ".join(said)


def _advice(config: RunConfig, field: pa.Field) -> str:
    """What a column should be called instead of the option's name that it has; empty if it has none."""
    name = field.name.casefold()
    key = _OPTIONS.get(name) or ("" if is_list(field.type) else _WRITTEN.get(name, ""))
    own = "adapter" if key in _ADAPTERS else name if name in TYPES else key.rpartition(".")[2]
    if own in TYPES:
        if own in config.input.columns:
            return ""
        mapped = f"input.columns.{own}={field.name}"
        if name in NAMED_ONLY:
            return f"if answers are to follow it, map it, {mapped}; if it is data, input.columns.{own}=null"
        return f"batchspec's name is {own!r}; map it, {mapped}"
    return f"batchspec's name is the key {key}, for all rows" if key else OF_REQUESTS.get(name, "")


def _chat_note(config: RunConfig, columns: ColumnMap, source: Source, tokenizer: Tokenizer | None) -> str:
    if columns.prompt_kind != "prompt" or config.input.chat or config.decode.score != "none":
        return ""
    if tokenizer is None or not tokenizer.has_chat_template:
        return ""
    first = next((str(values.drop_null()[0]) for values in source.column(columns.prompt_column) if has_value(values)), "")
    if any(token in first for token in tokenizer.special_ids):  # the template was applied already
        return ""
    return "prompts are taken as text; this model has a chat template: input.chat=true makes each of them a user turn"


def has_value(values: pa.Array) -> bool:
    """Whether any value is neither null nor an empty list."""
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return bool(pc.any(pc.greater(pc.list_value_length(values), 0)).as_py())
    return bool(values.null_count < len(values))
