"""The parameters of tools for forms of calls that are not JSON: their schemas, each divided into alternatives of one type.

Keywords that hold at once and cannot be put together are refused by name, so that what is written follows the whole schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchspec.structured.char_dfa import CharDfa
from batchspec.structured.json_schema.apart import Apart
from batchspec.structured.json_schema.document import Document
from batchspec.structured.json_schema.leaves import KEYWORDS, BadSchema, Leaf, names_of
from batchspec.structured.json_schema.strings import language
from batchspec.structured.json_schema.validity import fits, same
from batchspec.structured.regular import Impossible
from batchspec.tool_calls.form import MAX_REFERENCES

DEFINITIONS = ("$defs", "definitions", "$schema")
_OF_OBJECT = {"type", "properties", "required", "additionalProperties"}
_OF_STRING = {"type", "pattern", "minLength", "maxLength", "format"}
Schema = Mapping[str, Any]


def parameters_of(parameters: Schema | None) -> Iterator[tuple[str, Schema, bool]]:
    """Name, schema with what it refers to, and whether it is required, of each parameter of a tool. Raises BadSchema."""
    root = parameters or {}
    check_keywords(root, _OF_OBJECT, "all arguments together")
    own, required = root.get("properties") or {}, root.get("required") or []
    if not isinstance(own, dict) or not isinstance(required, list):
        raise BadSchema("properties must be an object and required a list of names; correct them")
    if missing := [name for name in required if name not in own]:
        raise BadSchema(f"required names {missing[0]!r}, which properties lack; correct it")
    for name, schema in own.items():
        if schema is not False:
            yield name, with_definitions(schema, root), name in required
        elif name in required:
            raise Impossible(f"parameter {name!r} is required, and no value of it is valid")


def with_definitions(schema: Any, root: Schema) -> Schema:
    """A schema inside of another, with what it may refer to; of true, one that allows everything."""
    shared = {key: root[key] for key in DEFINITIONS if key in root}
    return {**shared, **(schema if isinstance(schema, dict) else {})}


def alternatives_of(schema: Schema) -> Iterator[Schema]:
    """The alternatives of a schema, each of one type, or of none if it names none. Raises BadSchema."""
    schema = _followed(schema)
    key = next((one for one in ("anyOf", "oneOf") if isinstance(schema.get(one), list)), None)
    if key is not None:
        check_keywords(schema, {key, "type"}, f"a schema with {key}")
        rest = {name: value for name, value in schema.items() if name != key}
        parts = [part for part in schema[key] if part is not False]
        if key == "oneOf":
            _check_apart(parts, schema)
        for part in parts:
            yield from alternatives_of(_both(rest, part if isinstance(part, dict) else {}))
        return
    types = schema.get("type")
    for kind in types if isinstance(types, list) else [types]:
        yield {name: value for name, value in schema.items() if name != "type"} | ({} if kind is None else {"type": kind})


def check_keywords(schema: Schema, known: set[str], what: str) -> None:
    """Raises BadSchema if a keyword other than the known ones says which values are valid."""
    if other := sorted(str(key) for key in schema.keys() & KEYWORDS - known):
        raise BadSchema(f"{other[0]} of {what} is not supported in this form of calls; leave it out")


def strings_of(schema: Schema) -> CharDfa:
    """The strings of an alternative. Raises BadSchema and TooLarge."""
    check_keywords(schema, _OF_STRING, "a string")
    return language([Leaf("", schema)])


def listed_in(schema: Schema) -> list[Any] | None:
    """The values of an alternative that `enum` or `const` lists and that its other keywords allow; None if neither is there."""
    if "enum" not in schema and "const" not in schema:
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list):
        raise BadSchema("enum must be a list; correct it")
    return [value for value in values if fits(value, "", schema, Document(schema))]


def _followed(schema: Schema) -> Schema:
    """A schema without `$ref` at its top: with the keywords of what it refers to."""
    for _ in range(MAX_REFERENCES):
        if "$ref" not in schema:
            return schema
        target = _target(schema)
        schema = _both({key: value for key, value in schema.items() if key != "$ref"}, target)
    raise BadSchema(f"more than {MAX_REFERENCES} $ref that lead to one another are not supported; write them flat")


def _target(schema: Schema) -> Schema:
    name = schema["$ref"]
    if not str(name).startswith(tuple(f"#/{key}/" for key in DEFINITIONS)):
        raise BadSchema(f"$ref={json.dumps(name)[:60]} is not supported in this form of calls; put what it names into $defs")
    target = Document(schema).named(name, "")
    return target if isinstance(target, dict) else {}


def _both(first: Schema, second: Schema) -> Schema:
    """A schema for the values that are valid by both. Raises BadSchema if a keyword of both says something else in each."""
    found = {**second, **first}
    for key in sorted(str(key) for key in first.keys() & second.keys() & KEYWORDS):
        if key == "type":
            found[key] = _types_of_both(first[key], second[key])
        elif not same(first[key], second[key]):
            raise BadSchema(f"{key} of two schemas that hold at once is not supported in this form of calls; leave one out")
    return found


def _types_of_both(first: Any, second: Any) -> list[str]:
    ours, theirs = (set(names_of(types, "")) for types in (first, second))
    for one, other in ((ours, theirs), (theirs, ours)):
        one |= {"integer"} if "number" in one and "integer" in other else set()
    return sorted(ours & theirs)


def _check_apart(parts: Sequence[Any], schema: Schema) -> None:
    """Raises BadSchema if a value may fit two parts of oneOf."""
    apart = Apart(Document(schema))
    for i, part in enumerate(parts):
        for other in (*parts[:i], *parts[i + 1 :]):
            if not apart.from_part([("", part)], ("", other), []):
                raise BadSchema("oneOf whose parts may fit the same value is not supported in this form of calls; write anyOf")
