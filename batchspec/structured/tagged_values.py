"""Arguments of tool calls as text between tags: strings as they are, all other values as JSON.

The reader says by the parameter's types what a text is (`tool_calls.form.typed_value`): a string is written only if it is read
as a string. Texts that hold the closing tag are not written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from batchspec.structured.char_dfa import CharDfa
from batchspec.structured.json_schema.leaves import KEYWORDS, BadSchema, Leaf
from batchspec.structured.json_schema.strings import language
from batchspec.structured.regex import regex_node
from batchspec.structured.regular import ANY, Alt, Node, Repeat, Seq, text
from batchspec.tool_calls.form import resolved, typed_value, types_of

DEFINITIONS = ("$defs", "definitions")
_OF_OBJECT = {"type", "properties", "required", "additionalProperties"}
_OF_STRING = {"type", "pattern", "minLength", "maxLength", "format"}
_READ_AS = {
    "integer": r"\s*-?[0-9](?s:.*)", "number": r"\s*-?[0-9](?s:.*)", "boolean": r"\s*(?i:true|false)\s*",
    "null": r"\s*(?i:null|none)\s*", "object": r"\s*\{(?s:.*)", "array": r"\s*\[(?s:.*)",
}
"""Texts that are read, or might be, as a value of each type that is not text."""
Schema = Mapping[str, Any]


def parameters_of(parameters: Schema | None) -> Iterator[tuple[str, Schema, bool]]:
    """Name, schema with what it refers to, and whether it is required, of each parameter of a tool. Raises BadSchema."""
    root = parameters or {}
    if other := sorted(root.keys() & {key for key in KEYWORDS if isinstance(key, str)} - _OF_OBJECT):
        raise BadSchema(f"{other[0]} of all arguments together is not supported in this form of calls; leave it out")
    own, required = root.get("properties") or {}, root.get("required") or []
    if not isinstance(own, dict) or not isinstance(required, list):
        raise BadSchema("properties must be an object and required a list of names; correct them")
    if missing := [name for name in required if name not in own]:
        raise BadSchema(f"required names {missing[0]!r}, which properties lack; correct it")
    shared = {key: root[key] for key in DEFINITIONS if key in root}
    for name, schema in own.items():
        if schema is not False:
            yield name, {**shared, **(schema if isinstance(schema, dict) else {})}, name in required


def tagged_value(schema: Schema, closing: str, as_json: Callable[[Schema], Node]) -> Node:
    """The texts of a parameter. closing: the tag after it; as_json: the node of a schema's JSON texts. Raises BadSchema."""
    types = set(types_of(schema, schema))
    found = [_of_branch(branch, types, closing, as_json) for branch in _branches(schema, schema)]
    return found[0] if len(found) == 1 else Alt(tuple(found))


def _branches(schema: Schema, root: Schema) -> Iterator[Schema]:
    """The alternatives of a schema, each of one type, or of none if it names none."""
    schema = resolved(schema, root)
    shared = {key: schema[key] for key in (*DEFINITIONS, "type") if key in schema}
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            if other := sorted(str(one) for one in schema.keys() & KEYWORDS - {key, "type"}):
                raise BadSchema(f"{other[0]} beside {key} is not supported in this form of calls; leave it out")
            for part in parts:
                yield from _branches({**shared, **part} if isinstance(part, dict) else shared, root)
            return
    listed = schema.get("type")
    kinds = listed if isinstance(listed, list) else [listed]
    for kind in [*kinds, *(["null"] if schema.get("nullable") is True else [])]:
        yield {key: value for key, value in schema.items() if key != "type"} | ({} if kind is None else {"type": kind})


def _of_branch(schema: Schema, types: set[str], closing: str, as_json: Callable[[Schema], Node]) -> Node:
    if "enum" in schema or "const" in schema:
        return _listed(schema, types, closing)
    if schema.get("type", "string") != "string":
        return as_json(schema)
    if other := sorted(str(key) for key in schema.keys() & KEYWORDS - _OF_STRING):
        raise BadSchema(f"{other[0]} of a string is not supported in this form of calls; leave it out")
    found = language([Leaf("", schema)])
    for kind in types - {"string"}:
        found = found.without(CharDfa.of(regex_node(_READ_AS[kind])))
    return found.without(_holding(closing)).node(lambda chars: chars)


def _listed(schema: Schema, types: set[str], closing: str) -> Node:
    """The listed values of the schema's type that are read as what they are."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list):
        raise BadSchema("enum must be a list; correct it")
    texts = [(value, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for value in values]
    own = types or {"string"}
    kept = [one for value, one in texts if closing not in one and json.loads(typed_value(one, own)) == value]
    return Alt(tuple(text(one) for one in kept))


def _holding(part: str) -> CharDfa:
    """All texts that hold this one."""
    anything = Repeat(ANY, 0, None)
    return CharDfa.of(Seq((anything, text(part), anything)))
