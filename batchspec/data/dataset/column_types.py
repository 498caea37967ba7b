"""The types of Arrow that a column of the input may have, by the name that its option declares (`config/row_options.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

TURNS = (("role", "content"), ("from", "value"))
"""Fields of a message, OpenAI's and ShareGPT's."""


def is_text(kind: pa.DataType | None) -> bool:
    if kind is not None and pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def is_list(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _is_messages(kind: pa.DataType) -> bool:
    if is_text(kind):  # JSON text: each cell is checked at admission
        return True
    if not is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return any(all(name in fields and is_text(fields[name]) for name in pair[:1]) and pair[1] in fields for pair in TURNS)


def _is_id(kind: pa.DataType) -> bool:
    return is_text(kind) or bool(pa.types.is_integer(kind))


def _is_number(kind: pa.DataType) -> bool:
    # Whole numbers may be floats: pandas turns a column with gaps into floats, and one 2.5 makes a column of JSON lines one of
    # floats. Admission checks the values.
    return any(test(kind) for test in (pa.types.is_integer, pa.types.is_floating))


def _is_token_ids(kind: pa.DataType) -> bool:
    return is_list(kind) and _is_number(kind.value_type)


def _is_texts(kind: pa.DataType) -> bool:
    return is_text(kind) or (is_list(kind) and is_text(kind.value_type))


def _is_object(kind: pa.DataType) -> bool:
    return is_text(kind) or bool(pa.types.is_struct(kind))


def _is_biases(kind: pa.DataType) -> bool:
    return _is_object(kind) or bool(pa.types.is_map(kind))


def _is_ngrams(kind: pa.DataType) -> bool:
    return _is_object(kind) or _is_number(kind)


def _is_tools(kind: pa.DataType) -> bool:
    return _is_object(kind) or (is_list(kind) and _is_object(kind.value_type))


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return _is_bytes(fields.get("bytes")) or is_text(fields.get("path"))
    return _is_bytes(kind) or is_text(kind)


def _is_bytes(kind: pa.DataType | None) -> bool:
    return kind in (pa.binary(), pa.large_binary(), pa.binary_view())


def _is_images(kind: pa.DataType) -> bool:
    return _is_image(kind.value_type if is_list(kind) else kind)


@dataclass(frozen=True, slots=True)
class ColumnType:
    """What the cells of a column may be."""

    words: str
    """The types that it accepts, for messages."""
    fits: Callable[[pa.DataType], bool]
    json: tuple[str, ...]
    """The kinds of values that it accepts in a column of JSON text (`json_kinds`)."""
    written: pa.DataType
    """The type in which requests of OpenAI's are written to such a column."""

    @property
    def may_be_list(self) -> bool:
        return "list" in self.json


COLUMN_TYPES = {
    "id": ColumnType("string or integer", _is_id, ("text", "number"), pa.string()),
    "messages": ColumnType(
        "list<struct<role: string, content: string>>, ShareGPT's list<struct<from, value>>, JSON text", _is_messages,
        ("list", "text"), pa.list_(pa.struct([("role", pa.string()), ("content", pa.large_string())])),
    ),
    "token_ids": ColumnType("list of integers", _is_token_ids, ("list",), pa.list_(pa.int32())),
    "images": ColumnType(
        "bytes, struct<bytes, path>, a path, a data URL, or a list of these", _is_images, ("text", "list", "object"),
        pa.list_(pa.string()),
    ),
    "integer": ColumnType("integer", _is_number, ("number",), pa.int64()),
    "number": ColumnType("float or integer", _is_number, ("number",), pa.float64()),
    "boolean": ColumnType("boolean", pa.types.is_boolean, ("bool",), pa.bool_()),
    "text": ColumnType("string", is_text, ("text",), pa.string()),
    "texts": ColumnType("list of strings, or string", _is_texts, ("text", "list"), pa.list_(pa.string())),
    "json": ColumnType("JSON string", is_text, ("object", "text"), pa.string()),
    "object": ColumnType("JSON string or struct", _is_object, ("object", "text"), pa.string()),
    "biases": ColumnType("JSON string, map or struct of numbers", _is_biases, ("object", "text"), pa.string()),
    "ngrams": ColumnType("integer, JSON string or struct", _is_ngrams, ("number", "object", "text"), pa.string()),
    "tools": ColumnType("JSON string, struct or list of structs", _is_tools, ("text", "list", "object"), pa.string()),
}
"""Name of a type -> what it accepts."""
