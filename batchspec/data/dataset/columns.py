"""input.columns: which column of the dataset has which meaning, and the types allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from batchspec.config.key import Column
from batchspec.config.row_options import ROW_OPTIONS
from batchspec.data.dataset.column_types import COLUMN_TYPES, TURNS, ColumnType, is_list
from batchspec.data.dataset.untyped_columns import is_csv, is_page, json_kinds
from batchspec.errors import ConfigError, InputError
from batchspec.tasks.base import PromptTexts
from batchspec.tasks.registry import TASKS

IMAGES = "images"
"""Name of the column of images, which is read only if input.columns names it, as text models run on data that has one; or if it
holds pages of PDFs."""
PROMPTS = ("messages", "prompt", "prompt_ids")
CHAT_NAMES = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")
PROMPT_NAMES = ("prompt", "question", "instruction", "text", "input", "query", "content")
"""Usual names of columns of chats and prompts, for advice in error messages."""
SEPARATORS = (";", "\t", "|")
"""Separators of files that are called CSV but do not use commas."""


def _type_of(column: Column) -> ColumnType:
    own = COLUMN_TYPES[column.type]
    return replace(own, words=column.words or own.words)


TYPES: dict[str, ColumnType] = {
    "id": COLUMN_TYPES["id"], "messages": COLUMN_TYPES["messages"], "prompt": COLUMN_TYPES["text"],
    "prompt_ids": COLUMN_TYPES["token_ids"], IMAGES: COLUMN_TYPES["images"],
    **{name: _type_of(option.column) for name, option in ROW_OPTIONS.items()},
}
"""batchspec's names of columns, and what their cells may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMap:
    """batchspec's names and the dataset's columns that they are mapped to."""

    names: Mapping[str, str]
    prompt_kind: str
    """messages, prompt or prompt_ids: the one that is mapped, or prompt if input.prompt makes it; or the main one of the texts of
    which the task makes prompts."""
    templates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The dataset's columns that each template of rows reads: those of `prompt` (input.prompt) and `system` (input.system)."""
    has_images: bool = False
    """Whether prompts may have images, in a column or in their chats."""

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


def map_columns(
    schema: pa.Schema, columns: Mapping[str, str | None], *, template: bool = False, texts: PromptTexts | None = None
) -> ColumnMap:
    """Map batchspec's names to columns: each to the column of the same name, unless `columns` (input.columns) says otherwise.

    A name mapped to None is left out; so is one that `columns` must name and does not. Optional columns may have the null
    type (all rows empty). Raises ConfigError for a name that batchspec does not know, InputError for a column that does not
    exist, a wrong type, or not exactly one prompt.

    template  whether input.prompt makes the prompts, so that no column may be one; or the next user turns of the chats that
              `columns` names
    texts     the columns that are the prompt; columns with the names of other prompts are data then
    """
    types = TYPES
    if texts is not None:
        types = {name: own for name, own in TYPES.items() if name not in PROMPTS}
        types |= dict.fromkeys(texts.names, COLUMN_TYPES["text"])
    for name, column in columns.items():
        if texts is not None and name in PROMPTS:
            if column is not None:
                raise ConfigError(
                    f"input.columns.{name}={column}: prompts are made of the columns {', '.join(texts.names)}; set "
                    f"input.columns.{name}=null"
                )
        elif name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the names are {', '.join(types)}"
            raise ConfigError(f"input.columns.{name}: batchspec has no column of that name; {hint}")
    taken = set(columns.values())
    there = set(schema.names)
    by_themselves = [name for name in types if name not in columns and not must_be_mapped(name)]
    names = {name: name for name in by_themselves if name in there and name not in taken}
    page = next((field.name for field in schema if is_page(field)), None)
    names |= {IMAGES: page} if page is not None and IMAGES not in columns else {}
    names |= {name: column for name, column in columns.items() if column is not None}
    for name, column in names.items():
        if column not in there:
            raise InputError(
                f"input.columns.{name}={column}: the input has no such column; its columns are {', '.join(schema.names[:50])}"
            )
        field = schema.field(column)
        allowed, needed = types[name].words, ("id", *PROMPTS) if texts is None else ("id", *texts.needed, texts.main)
        if not (_fits(field, types[name], name) or (pa.types.is_null(field.type) and name not in needed)):
            kinds = json_kinds(field)
            kind = f"no type that fits: each cell is {' or '.join(sorted(kinds))}" if kinds else f"type {field.type}"
            advice = "write its cells as JSON text" if "JSON" in allowed and pa.types.is_nested(field.type) else "cast it"
            raise InputError(
                f"column {column!r} is mapped to {name} but has {kind}; allowed: {allowed}; "
                f"{advice} or set input.columns.{name}=null"
            )
    if texts is not None:
        return ColumnMap(names=names, prompt_kind=_all_texts(names, schema, texts))
    return ColumnMap(names=names, prompt_kind=_only_prompt(names, schema, template=template, named="messages" in columns))


def _all_texts(names: Mapping[str, str], schema: pa.Schema, texts: PromptTexts) -> str:
    """The kind of prompts that are made of texts. Raises InputError if the input lacks one of them."""
    missing = next((name for name in (*texts.needed, texts.main) if name not in names), None)
    if missing is not None:
        raise InputError(
            f"no column is mapped to {missing}, and prompts are made of {', '.join((*texts.needed, texts.main))}; the input's "
            f"columns are {', '.join(schema.names[:50])}; name one, e.g. input.columns.{missing}=COLUMN"
        )
    return texts.main


def must_be_mapped(name: str) -> bool:
    """Whether a column of this name is read only if input.columns names it."""
    return name == IMAGES or (name in ROW_OPTIONS and ROW_OPTIONS[name].column.must_be_mapped)


def _fits(field: pa.Field, own: ColumnType, name: str) -> bool:
    kinds = json_kinds(field)
    if kinds:
        return any(kind in kinds for kind in own.json)
    if is_list(field.type) and pa.types.is_null(field.type.value_type):  # every list is empty or has only nulls
        return own.may_be_list
    return own.fits(field.type) or (is_csv(field) and name != "prompt_ids")


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
    if any(map(is_page, schema)):
        return "pages of PDFs have no prompts; set input.prompt=TEXT and input.chat=true, or take a recipe: +job=ocr"
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
    chats = [name for name in CHAT_NAMES if name in names and _fits(schema.field(name), TYPES["messages"], "messages")]
    texts = [name for name in PROMPT_NAMES if name in names and _fits(schema.field(name), TYPES["prompt"], "prompt")]
    advice = f"messages={chats[0]}" if chats else f"prompt={texts[0] if texts else 'COLUMN'}"
    listed = ", ".join(schema.names[:50]) + (f" and {len(schema) - 50:,} more" if len(schema) > 50 else "")
    return (
        f"no column is mapped to messages, prompt or prompt_ids; the input's columns are {listed}; "
        f"name one, e.g. input.columns.{advice}{_other_tasks(names)}"
    )


def _other_tasks(names: set[str]) -> str:
    """Advice about tasks that make prompts of columns which the input has."""
    made = {task.asked: (*task.texts.needed, task.texts.main) for task in TASKS.values() if task.texts is not None}
    fits = {asked: texts for asked, texts in made.items() if names.issuperset(texts)}
    return "".join(f", or set {asked}, which reads {' and '.join(texts)}" for asked, texts in fits.items())
