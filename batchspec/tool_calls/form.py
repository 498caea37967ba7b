"""The interface of a form of tool calls, and what the forms share: reading JSON, and the tools of a row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Protocol

from batchspec.data.dataset.json_text import BadJson, members, parse

_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"boolean": {"true": "true", "false": "false"}, "null": {"null": "null", "none": "null"}}
MAX_REFERENCES = 16
"""Maximum number of `$ref` that are followed to the types of a parameter."""


@dataclass(frozen=True, slots=True)
class Found:
    """A call in a text."""

    begin: int
    end: int
    """The call, its marks included, is text[begin:end]."""
    name: str
    arguments: str
    """JSON text of an object."""


class ToolForm(Protocol):
    """How a model writes tool calls. Instances can be pickled."""

    @property
    def name(self) -> str:
        """As in model.tool_calls."""

    def find(self, text: str, tools: Tools) -> list[Found]:
        """The complete calls in a text that has its special tokens, in order. What is no complete call is not among them."""


class Tools:
    """The tools of a row, from the JSON text of OpenAI's list; a function may also lack the object around it."""

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def _parameters(self) -> dict[str, Any]:
        """Name -> JSON Schema of the arguments."""
        found, tools = {}, parse(self._text)
        for tool in tools if isinstance(tools, list) else ():
            function = (tool.get("function") or tool) if isinstance(tool, dict) else None
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                found[function["name"]] = function.get("parameters")
        return found

    @property
    def names(self) -> frozenset[str]:
        """Raises BadJson."""
        return frozenset(self._parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def typed(self, name: str, arguments: Mapping[str, str], *, untyped_is_json: bool = False) -> str:
        """Arguments that are given as text, as JSON text of an object.

        untyped_is_json  read a value as JSON if it is JSON and the tool's schema says no type; else it is text
        """
        schema = self._parameters.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        values = []
        for key, text in arguments.items():
            own = properties.get(key) if isinstance(properties, dict) else None
            value = typed_value(text, set(types_of(own, schema)), untyped_is_json=untyped_is_json)
            values.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
        return "{" + ", ".join(values) + "}"


def typed_value(text: str, types: set[str], *, untyped_is_json: bool = False) -> str:
    """JSON text of a value: of one of the types of JSON Schema that are not text, if it has that form; else of a string."""
    plain = text.strip()
    if not types and untyped_is_json and (found := _json_value(plain)) is not None:
        return found
    if number := _NUMBER.fullmatch(plain):
        whole = number[3] is None and (number[2] is None or not number[2].strip(".0"))
        if "integer" in types and whole:
            return number[1]
        if "number" in types:
            return plain
    for kind, words in _WORDS.items():
        if kind in types and plain.lower() in words:
            return words[plain.lower()]
    for kind, bracket in (("object", "{"), ("array", "[")):
        if kind in types and plain.startswith(bracket) and (found := _json_value(plain)) is not None:
            return found
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any, root: Any, depth: int = 0) -> Iterator[str]:
    """The types that a parameter's schema allows; none if it does not say."""
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return
    declared = schema.get("type")
    yield from (kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str))
    if schema.get("nullable") is True:
        yield "null"
    listed = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if declared is None:
        yield from (_type_of(value) for value in listed)
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            yield from types_of(part, root, depth + 1)
    if "$ref" in schema and (target := _target(schema, root)) is not None:
        yield from types_of(target, root, depth + 1)


def _target(schema: Mapping[str, Any], root: Any) -> dict[str, Any] | None:
    """What `$ref` names; None if it is not there."""
    reference, target = schema["$ref"], root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        target = target.get(step) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else None


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def past_space(text: str, at: int) -> int:
    """The index of the first character from `at` on that is not white space."""
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def json_end(text: str, at: int) -> int | None:
    """The index after the JSON value that begins at `at`; None if none does."""
    try:
        return _JSON.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return None


def _json_value(text: str) -> str | None:
    return text if json_end(text, 0) == len(text) else None


def object_at(text: str, at: int) -> tuple[dict[str, str], int] | None:
    """The JSON text of each member of the object that begins at `at`, and the index after it; None if there is none."""
    if not text.startswith("{", at) or (end := json_end(text, at)) is None:
        return None
    try:
        return {name: bytes(value).decode().strip() for name, value in members(text[at:end].encode()).items()}, end
    except BadJson:
        return None


def named_call(found: Mapping[str, str]) -> tuple[str, str] | None:
    """Name and arguments of a call that is a JSON object {"name", "arguments" or "parameters"}; None if it is no call."""
    function = found
    if "name" not in found and (inner := object_at(found.get("function", ""), 0)) is not None:
        function = inner[0]
    try:
        name = parse(function.get("name", "null"))
    except BadJson:
        return None
    arguments = object_text(function.get("arguments", function.get("parameters")))
    return (name, arguments) if isinstance(name, str) and name and arguments is not None else None


def object_text(value: str | None) -> str | None:
    """JSON text of an object, which may be written as a string that holds it; `{}` for none; None if it is no object."""
    if value is None or value == "null":
        return "{}"
    if value.startswith('"'):
        try:
            value = str(parse(value)).strip()
        except BadJson:
            return None
    found = object_at(value, 0)
    return value if found is not None and found[1] == len(value) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse, parse_int=str, parse_float=str)
