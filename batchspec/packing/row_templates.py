"""input.prompt and input.system as Jinja templates: each row's texts, made of the columns that the templates name.

They are rendered where chat templates are (`text/templates.py`), but what they read must be there: a field that the row lacks,
or a null whose value the template needs, makes an error row (`text/row_values.py`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
from jinja2.meta import find_referenced_templates
from jinja2.nodes import Output, Template, TemplateData

from batchspec.config.schema import InputConfig
from batchspec.data.dataset.columns import IMAGES, PROMPTS, ColumnMap, map_columns
from batchspec.data.dataset.json_text import BadJson, BadText
from batchspec.data.dataset.messages import USUAL_SYSTEM
from batchspec.data.dataset.untyped_columns import value_of
from batchspec.errors import BadRow, ConfigError, RendererKilled
from batchspec.process.local_files import fault_of, open_regular
from batchspec.tasks.base import PromptTexts
from batchspec.text.template_process import environment
from batchspec.text.templates import NullValue, Templates

JINJA = ("{{", "{%", "{#")
"""Marks of a template: a system prompt without any is plain text."""
_VALUES = {"prompt": "prompt", "system": USUAL_SYSTEM}
"""Template -> the row's value that it makes."""
_OWN_TURNS = ("system", "developer")


class RowTemplates:
    """The templates of a job's rows, if its keys hold any. It can be pickled: a copy has a rendering process of its own.

    Raises ConfigError for a template that is none or cannot be read, CapacityError if the rendering process is killed.
    """

    def __init__(self, input: InputConfig, texts: PromptTexts | None = None) -> None:
        """texts: the text columns from which the job's task makes prompts; None: it reads a column of prompts"""
        self._texts = texts
        self.sources: dict[str, str] = {}
        """Texts of the templates: `prompt`, `system`."""
        if input.prompt is not None:
            self.sources["prompt"] = _read(input.prompt[1:]) if input.prompt.startswith("@") else input.prompt
        if input.system is not None and any(mark in input.system for mark in JINJA):
            self.sources["system"] = input.system
        self.input = replace(input, system=None) if "system" in self.sources else input
        """The keys of `input`; system is None if it is a template."""
        self._templates = _StrictTemplates(self.sources, " and ".join(f"input.{name}" for name in self.sources))
        bare = environment(input.template_date, strict=True)
        self._functions, trees = {*bare.globals}, {name: bare.parse(source) for name, source in self.sources.items()}
        for name, tree in trees.items():
            if [*find_referenced_templates(tree)]:
                raise ConfigError(f"input.{name} includes another template, which is not supported; write its text out")
        if self.sources:
            self._templates.check()
        if "system" in trees and not self._templates.reads["system"] and _computes(trees["system"]):
            raise ConfigError(
                "input.system has marks of Jinja ({{, {%) and reads no column; if it is plain text, put it between {% raw %} and "
                "{% endraw %}"
            )

    def no_rows(self) -> pa.Table:
        """A table without rows that has the columns which the templates read, and the prompt's if no template makes it."""
        reads = dict.fromkeys(name for names in self._templates.reads.values() for name in names if name not in self._functions)
        columns = {name: pa.array([], pa.string()) for name in reads}
        if self._texts is not None:
            columns |= {self.input.columns.get(name) or name: pa.array([], pa.string()) for name in self._texts.names}
        elif "prompt" not in self.sources:
            kind = next((kind for kind in PROMPTS if self.input.columns.get(kind)), "prompt")
            ids_or_text = pa.list_(pa.int32()) if kind == "prompt_ids" else pa.string()
            columns |= {self.input.columns.get(kind) or kind: pa.array([], ids_or_text)}
        return pa.table(columns)

    def map_columns(
        self, schema: pa.Schema, *, requests: bool = False, named: Mapping[str, str | None] | None = None
    ) -> ColumnMap:
        """As `map_columns` of data/dataset/columns.py, with the columns that the templates read.

        requests  whether the rows are OpenAI's batch requests
        named     input.columns of these rows; None: the job's
        Raises ConfigError too, for a template that does not fit the input.
        """
        if "prompt" in self.sources and requests:
            raise ConfigError(
                "input.prompt makes prompts of columns, and the input holds OpenAI's batch requests, which have messages; remove "
                "the key"
            )
        names = self.input.columns if named is None else named
        columns = map_columns(schema, names, template="prompt" in self.sources, texts=self._texts)
        may_be_equal = columns.prompt_kind != "prompt" or columns.get(IMAGES) is not None
        return replace(columns, templates={name: self._columns(name, schema, may_be_equal) for name in self.sources})

    def _columns(self, name: str, schema: pa.Schema, may_be_equal: bool) -> tuple[str, ...]:
        """may_be_equal: rows differ by their chats, to which the prompt adds a turn, or by their images"""
        reads = self._templates.reads[name]
        for variable in reads:
            if variable not in schema.names and variable not in self._functions:
                names = {column.casefold(): column for column in schema.names}
                near = difflib.get_close_matches(variable.casefold(), names, n=1)
                hint = f"did you mean {names[near[0]]!r}? " if near else ""
                raise ConfigError(
                    f"input.{name} reads {variable!r}, and the input has no such column; {hint}its columns are "
                    f"{', '.join(schema.names[:50])}"
                )
        columns = tuple(variable for variable in reads if variable in schema.names)
        for column in columns:
            if _holds_bytes(kind := schema.field(column).type):
                raise ConfigError(f"input.{name} reads column {column!r}, whose type {kind} is no text; cast it or leave it out")
        if name == "prompt" and not columns and not may_be_equal:
            example = next((column for column in schema.names if column.isidentifier()), "COLUMN")
            raise ConfigError(
                f"input.prompt={self.input.prompt} reads no column, so that all prompts would be equal; write columns as "
                f"{{{{ {example} }}}}, or name the column that holds the prompts: input.columns.prompt={example}"
            )
        return columns

    def texts(self, columns: ColumnMap, table: pa.Table, place: int, row: Mapping[str, Any], *, chat: bool) -> dict[str, str]:
        """What the templates make of a row of the table: its prompt, and for a chat its USUAL_SYSTEM, if it has no system turn of
        its own.

        columns  those of `map_columns`
        row      the row's values under batchspec's names
        Raises BadRow.
        """
        names = [name for name in columns.templates if name != "system" or (chat and not _has_own_system(row))]
        return {_VALUES[name]: self._text(name, columns.templates[name], table, place) for name in names}

    def _text(self, name: str, columns: tuple[str, ...], table: pa.Table, place: int) -> str:
        variables = {column: _value(table, column, place) for column in columns}
        try:
            return self._templates.render(name, variables)
        except RendererKilled as error:
            said = f"input.{name} was not rendered ({error}); try resume=error"
            raise BadRow("template_error", said, retryable=True) from error
        except NullValue as null:
            raise BadRow(
                "null_column",
                f"{null} is null, and input.{name} needs its value; drop the row, or have the template say what to write then: "
                f"{{% if {null} %}}",
            ) from null
        except ValueError as error:
            said = " ".join(str(error).split())
            raise BadRow("template_error", f"input.{name} refuses the row ({said}); correct the row or the template") from error


class _StrictTemplates(Templates):
    strict = True

    def _bad(self, name: str, problem: str) -> ConfigError:
        plain = "; plain text with such marks goes between {% raw %} and {% endraw %}" if name == "system" else ""
        return ConfigError(f"input.{name} is no valid Jinja template{problem}; correct it{plain}")


def _read(path: str) -> str:
    """The template in a file; a line break at its end is the editor's."""
    try:
        with open_regular(os.path.expanduser(path)) as file:
            text = file.read().decode("utf-8")
    except (OSError, ValueError) as error:
        why, where = getattr(error, "strerror", None) or error, f"input.prompt=@{path}"
        refusal = ConfigError(f"{where}: cannot be read ({why}); give the path of a Jinja template after @")
        raise fault_of(error, where, refusal) from None
    return text.removesuffix("\n").removesuffix("\r")


def _computes(tree: Template) -> bool:
    """Whether a template does more than to leave out comments and write text."""
    return not all(
        isinstance(node, Output) and all(isinstance(part, TemplateData) for part in node.nodes) for node in tree.body
    )


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _holds_bytes(kind.value_type)
    if any(test(kind) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)):
        return True
    return pa.types.is_binary_view(kind) or any(_holds_bytes(kind.field(place).type) for place in range(kind.num_fields))


def _has_own_system(row: Mapping[str, Any]) -> bool:
    """Whether the row has a system prompt of its own, in its column or at the beginning of its chat."""
    messages = row.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    return row.get("system") is not None or (isinstance(first, dict) and first.get("role", first.get("from")) in _OWN_TURNS)


def _value(table: pa.Table, column: str, place: int) -> Any:
    """A cell as a template reads it: JSON text of JSON lines is parsed. Raises BadRow."""
    field = table.schema.field(column)
    try:
        value = value_of(table.column(column)[place].as_py(), field, optional=True)
    except UnicodeDecodeError:
        raise BadRow("bad_text", f"column {column!r} is not valid UTF-8; correct it") from None
    except BadJson as error:
        code = "bad_text" if isinstance(error, BadText) else "bad_json"
        raise BadRow(code, f"column {column!r}: {error}; correct it") from None
    except (ValueError, OverflowError) as error:  # such as a time in nanoseconds, which no Python object holds
        raise BadRow("bad_value", f"column {column!r} has no Python value ({error}); cast it to text") from None
    return dict(value) if pa.types.is_map(field.type) and value is not None else value
