"""input.columns: which column of the dataset has which meaning, and the types allowed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from batchspec.data.dataset.untyped_columns import is_csv, json_kinds
from batchspec.errors import ConfigError, InputError

PROMPTS = ("messages", "prompt", "prompt_ids")
TURNS = (("role", "content"), ("from", "value"))
"""Fields of a message, OpenAI's and ShareGPT's."""
CHAT_NAMES = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")
PROMPT_NAMES = ("prompt", "question", "instruction", "text", "input", "query", "content")
"""Usual names of columns of chats and prompts, for advice in error messages."""
SEPARATORS = (";", "\t", "|")
"""Separators of files that are called CSV but do not use commas."""
_JSON = {
    "id": ("text", "number"), "messages": ("list", "text"), "prompt": ("text",), "prompt_ids": ("list",),
    "schema": ("object", "text"), "regex": ("text",), "choice": ("list", "text"), "grammar": ("text",),
    "response_format": ("object", "text"), "adapter": ("text",),
    "stop": ("text", "list"), "bad_words": ("text", "list"), "system": ("text",),
    "tools": ("text", "list", "object"), "template_kwargs": ("object", "text"),
    "logit_bias": ("object", "text"), "final_assistant": ("text",),
    "tool_choice": ("text", "object"), "parallel_tool_calls": ("bool",),
}
"""Kinds of JSON values allowed in a column of JSON text; columns that are not listed take numbers."""


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def is_list(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _is_id(kind: pa.DataType) -> bool:
    return is_text(kind) or bool(pa.types.is_integer(kind))


def _is_number(kind: pa.DataType) -> bool:
    # Whole numbers may be floats: pandas turns a column with gaps into floats, and one 2.5 makes a column of JSON lines one of
    # floats. Admission checks the values.
    return any(test(kind) for test in (pa.types.is_integer, pa.types.is_floating))


def _is_messages(kind: pa.DataType) -> bool:
    if is_text(kind):  # JSON text: each cell is checked at admission
        return True
    if not is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return any(all(name in fields and is_text(fields[name]) for name in pair[:1]) and pair[1] in fields for pair in TURNS)


def _is_token_ids(kind: pa.DataType) -> bool:
    return is_list(kind) and _is_number(kind.value_type)


def _is_stop(kind: pa.DataType) -> bool:
    return is_text(kind) or (is_list(kind) and is_text(kind.value_type))


def _is_object(kind: pa.DataType) -> bool:
    return is_text(kind) or bool(pa.types.is_struct(kind))


def _is_biases(kind: pa.DataType) -> bool:
    return _is_object(kind) or bool(pa.types.is_map(kind))


def _is_tools(kind: pa.DataType) -> bool:
    return _is_object(kind) or (is_list(kind) and _is_object(kind.value_type))


TYPES: Mapping[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "id": (_is_id, "string or integer"),
    "messages": (_is_messages, "list<struct<role: string, content: string>>, ShareGPT's list<struct<from, value>>, JSON text"),
    "prompt": (is_text, "string"),
    "prompt_ids": (_is_token_ids, "list of integers"),
    "max_new_tokens": (_is_number, "integer"),
    "min_new_tokens": (_is_number, "integer"),
    "temperature": (_is_number, "float or integer"),
    "top_p": (_is_number, "float or integer"),
    "top_k": (_is_number, "integer"),
    "min_p": (_is_number, "float or integer"),
    "repetition_penalty": (_is_number, "float or integer"),
    "presence_penalty": (_is_number, "float or integer"),
    "frequency_penalty": (_is_number, "float or integer"),
    "logit_bias": (_is_biases, "JSON string, map or struct of numbers"),
    "seed": (_is_number, "integer"),
    "n": (_is_number, "integer"),
    "thinking_token_budget": (_is_number, "integer"),
    "num_logprobs": (_is_number, "integer"),
    "stop": (_is_stop, "list of strings, or string"),
    "bad_words": (_is_stop, "list of strings, or string"),
    "schema": (is_text, "JSON string"),
    "regex": (is_text, "string"),
    "choice": (_is_stop, "list of strings"),
    "grammar": (is_text, "string"),
    "response_format": (is_text, "JSON string"),
    "adapter": (is_text, "string"),
    "system": (is_text, "string"),
    "tools": (_is_tools, "JSON string, struct or list of structs"),
    "tool_choice": (_is_object, "string, JSON string or struct"),
    "parallel_tool_calls": (pa.types.is_boolean, "boolean"),
    "template_kwargs": (_is_object, "JSON string or struct"),
    "final_assistant": (is_text, "string: error, continue or drop"),
    "synthetic_len": (_is_number, "integer"),
}
"""batchspec's names: a test of the column's type, and the text for the types that it accepts."""
LISTS = ("messages", "prompt_ids", "stop", "bad_words", "choice", "tools")
"""Columns whose cells may be lists."""
NAMED_ONLY = ("schema", "regex", "choice", "grammar")
"""Columns that input.columns must name, because many datasets have a column of that name with another meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMap:
    """batchspec's names and the dataset's columns that they are mapped to."""

    names: Mapping[str, str]
    prompt_kind: str
    """messages, prompt or prompt_ids: the one that is mapped, or prompt if input.prompt makes it."""
    templates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The dataset's columns that each template of rows reads: those of `prompt` (input.prompt) and `system` (input.system)."""

    def get(self, name: str) -> str | None:
        """The dataset's column for one of batchspec's names; None if it is not mapped."""
        return self.names.get(name)

    @property
    def read(self) -> list[str]:
        """The dataset's columns that are read, some of them perhaps twice."""
        return [*self.names.values(), *(column for columns in self.templates.values() for column in columns)]

    @property
    def adds_turn(self) -> bool:
        """Whether input.prompt makes a user turn that follows the row's chat."""
        return self.prompt_kind == "messages" and "prompt" in self.templates

    @property
    def prompt_column(self) -> str | None:
        """The column of the prompts; None if input.prompt makes them."""
        return self.names.get(self.prompt_kind)


def map_columns(schema: pa.Schema, columns: Mapping[str, str | None], *, template: bool = False) -> ColumnMap:
    """Map batchspec's names to columns: each to the column of the same name, unless `columns` (input.columns) says otherwise.

    A name mapped to None is left out; so is one of NAMED_ONLY that `columns` does not name. Optional columns may have the null
    type (all rows empty). Raises ConfigError for a name that batchspec does not know, InputError for a column that does not
    exist, a wrong type, or not exactly one prompt.

    template  whether input.prompt makes the prompts, so that no column may be one; or the next user turns of the chats that
              `columns` names
    """
    for name in columns:
        if name not in TYPES:
            near = difflib.get_close_matches(name, TYPES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the names are {', '.join(TYPES)}"
            raise ConfigError(f"input.columns.{name}: batchspec has no column of that name; {hint}")
    taken = set(columns.values())
    there = set(schema.names)
    by_themselves = [name for name in TYPES if name not in (*columns, *NAMED_ONLY)]
    names = {name: name for name in by_themselves if name in there and name not in taken}
    names |= {name: column for name, column in columns.items() if column is not None}
    for name, column in names.items():
        if column not in there:
            raise InputError(
                f"input.columns.{name}={column}: the input has no such column; its columns are {', '.join(schema.names[:50])}"
            )
        field = schema.field(column)
        fits, allowed = TYPES[name]
        if not (_fits(field, name, fits) or (pa.types.is_null(field.type) and name not in ("id", *PROMPTS))):
            kinds = json_kinds(field)
            kind = f"no type that fits: each cell is {' or '.join(sorted(kinds))}" if kinds else f"type {field.type}"
            advice = "write its cells as JSON text" if "JSON" in allowed and pa.types.is_nested(field.type) else "cast it"
            raise InputError(
                f"column {column!r} is mapped to {name} but has {kind}; allowed: {allowed}; "
                f"{advice} or set input.columns.{name}=null"
            )
    return ColumnMap(names=names, prompt_kind=_only_prompt(names, schema, template=template, named="messages" in columns))


def _fits(field: pa.Field, name: str, fits: Callable[[pa.DataType], bool]) -> bool:
    kinds = json_kinds(field)
    if kinds:
        return any(kind in kinds for kind in _JSON.get(name, ("number",)))
    if is_list(field.type) and pa.types.is_null(field.type.value_type):  # every list is empty or has only nulls
        return name in LISTS
    return fits(field.type) or (is_csv(field) and name != "prompt_ids")


def _only_prompt(names: Mapping[str, str], schema: pa.Schema, *, template: bool, named: bool) -> str:
    """The kind of the prompts. named: whether input.columns names the chats, to which a template then adds a turn."""
    prompts = [name for name in PROMPTS if name in names]
    if template and prompts == ["messages"] and named:
        return "messages"
    if template and prompts:
        listed = " and ".join(f"{name} (column {names[name]!r})" for name in prompts)
        hidden = " ".join(f"input.columns.{name}=null" for name in prompts)
        turn = "; or input.columns.messages=messages to add a user turn to its chats" if prompts == ["messages"] else ""
        raise InputError(
            f"exactly one prompt is allowed but input.prompt is given beside {listed}; set {hidden} (the template may read that "
            f"column nevertheless), or remove input.prompt{turn}"
        )
    if template:
        return "prompt"
    if not prompts:
        raise InputError(_no_prompt(schema))
    if len(prompts) > 1:
        listed = " and ".join(f"{name} (column {names[name]!r})" for name in prompts)
        raise InputError(
            f"exactly one prompt column is allowed but {listed} are mapped; set input.columns.{prompts[-1]}=null to read "
            f"{prompts[0]}, or input.columns.{prompts[0]}=null to read {prompts[-1]}"
        )
    return prompts[0]


def _no_prompt(schema: pa.Schema) -> str:
    """The message for an input without a prompt column: it suggests the key that maps the likely one."""
    names = set(schema.names)
    if {"custom_id", "body"} <= names:
        return (
            "the input holds OpenAI's batch requests as columns; give their JSON lines, whose keys are custom_id, method, url "
            "and body alone"
        )
    (only, *others) = schema
    if not others and is_csv(only) and (mark := next((mark for mark in SEPARATORS if mark in only.name), "")):
        return (
            f"the CSV header {only.name!r} is one column, because batchspec reads commas alone and it has {mark!r}; "
            f"convert the file: polars.read_csv(FILE, separator={mark!r}, infer_schema=False).write_csv(NEW)"
        )
    if any(names >= set(pair) for pair in TURNS) and not names & set(PROMPT_NAMES) - {"content"}:
        return (
            "the rows are messages, not chats; a row holds a whole chat in its column messages, and in Python rows may be a list "
            "of chats, [[{role, content}, ...], ...]"
        )
    chats = [name for name in CHAT_NAMES if name in names and _fits(schema.field(name), "messages", _is_messages)]
    texts = [name for name in PROMPT_NAMES if name in names and _fits(schema.field(name), "prompt", is_text)]
    advice = f"messages={chats[0]}" if chats else f"prompt={texts[0] if texts else 'COLUMN'}"
    listed = ", ".join(schema.names[:50]) + (f" and {len(schema) - 50:,} more" if len(schema) > 50 else "")
    return (
        f"no column is mapped to messages, prompt or prompt_ids; the input's columns are {listed}; "
        f"name one, e.g. input.columns.{advice}"
    )
