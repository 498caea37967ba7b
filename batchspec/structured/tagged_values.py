"""Arguments of tool calls as text between tags: strings as they are, all other values as JSON.

The reader says by the parameter's types what a text is (`tool_calls.form.typed_value`): a string is written only if it is read
as a string. Texts that hold the closing tag are not written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from batchspec.structured.call_parameters import Schema, alternatives_of, listed_in, strings_of
from batchspec.structured.char_dfa import CharDfa
from batchspec.structured.regex import regex_node
from batchspec.structured.regular import ANY, Alt, Node, Repeat, Seq, text
from batchspec.tool_calls.form import typed_value, types_of

_READ_AS = {
    "integer": r"\s*-?[0-9](?s:.*)", "number": r"\s*-?[0-9](?s:.*)", "boolean": r"\s*(?i:true|false)\s*",
    "null": r"\s*(?i:null|none)\s*", "object": r"\s*\{(?s:.*)", "array": r"\s*\[(?s:.*)",
}
"""Texts that are read, or might be, as a value of each type that is not text."""


def tagged_value(schema: Schema, closing: str, as_json: Callable[[Schema], Node]) -> Node:
    """The texts of a parameter. closing: the tag after it; as_json: the node of a schema's JSON texts. Raises BadSchema."""
    types = set(types_of(schema, schema))
    return Alt(tuple(_alternative(one, types, closing, as_json) for one in alternatives_of(schema)))


def _alternative(schema: Schema, types: set[str], closing: str, as_json: Callable[[Schema], Node]) -> Node:
    if (values := listed_in(schema)) is not None:
        return _listed(values, types, closing)
    if schema.get("type", "string") != "string":
        return as_json(schema)
    found = strings_of(schema)
    for kind in types - {"string"}:
        found = found.without(CharDfa.of(regex_node(_READ_AS[kind])))
    return found.without(holding(closing)).node(lambda chars: chars)


def _listed(values: list[Any], types: set[str], closing: str) -> Node:
    """Those of the values that are read as what they are."""
    texts = [(value, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for value in values]
    own = types or {"string"}
    return Alt(tuple(text(one) for value, one in texts if closing not in one and json.loads(typed_value(one, own)) == value))


def holding(part: str) -> CharDfa:
    """All texts that hold this one."""
    anything = Repeat(ANY, 0, None)
    return CharDfa.of(Seq((anything, text(part), anything)))
