"""Arguments of tool calls in Gemma 4's notation: JSON, but keys are plain words, and a string is between marks, without escapes.

A string that holds the mark is not written. Values whose schema says nothing are nested at most MAX_DEPTH levels deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from batchspec.structured.call_parameters import (
    Schema,
    alternatives_of,
    check_keywords,
    listed_in,
    parameters_of,
    strings_of,
    with_definitions,
)
from batchspec.structured.json_schema.leaves import KEYWORDS, BadSchema, Leaf, count_of
from batchspec.structured.json_schema.values import MAX_DEPTH, any_number, wrapped
from batchspec.structured.regex import regex_node
from batchspec.structured.regular import EMPTY, NOTHING, Alt, Joined, Members, Node, Repeat, Seq, text
from batchspec.structured.tagged_values import holding

QUOTE = '<|"|>'
MAX_NESTED = 16
"""Maximum nesting of the objects and lists that schemas describe."""
_COMMA = text(",")
_KEY = re.compile(r"[^\s:{}\[\],]+")
_ANY_KEY = regex_node(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_OBJECT = {"type", "additionalProperties"}
_OF_ARRAY = {"type", "items", "minItems", "maxItems"}


class Gemma4Values:
    """quote: the node of the mark around strings; as_json: the node of a schema's JSON texts."""

    def __init__(self, quote: Node, as_json: Callable[[Schema], Node]) -> None:
        self._quote, self._as_json = quote, as_json

    def object(self, schema: Schema, depth: int = 0) -> Node:
        """The objects of a schema. Raises BadSchema, Impossible, TooLarge."""
        if not schema.get("properties"):
            return self._of_any_keys(schema, depth)
        members = tuple(
            (self._member(name, self._value(one, depth + 1)), required) for name, one, required in parameters_of(schema)
        )
        return wrapped("{", Members(members, _COMMA), "}")

    def _member(self, name: str, value: Node) -> Node:
        if not _KEY.fullmatch(name) or QUOTE in name:
            raise BadSchema(f"property {name!r} is no plain word, which this model's calls need; rename it")
        return Seq((text(f"{name}:"), value))

    def _of_any_keys(self, schema: Schema, depth: int) -> Node:
        stated = {key: value for key, value in schema.items() if value not in ({}, [])}
        check_keywords(stated, _OF_OBJECT, "an object without properties")
        inner = schema.get("additionalProperties", True)
        if inner is False:
            return text("{}")
        value = self._anything(MAX_DEPTH - 1) if inner is True else self._value(with_definitions(inner, schema), depth + 1)
        return wrapped("{", Alt((EMPTY, Joined(Seq((_ANY_KEY, text(":"), value)), _COMMA))), "}")

    def _value(self, schema: Schema, depth: int) -> Node:
        if depth > MAX_NESTED:
            raise BadSchema(f"schemas nested more than {MAX_NESTED} levels deep are not supported in this form of calls")
        return Alt(tuple(self._alternative(one, depth) for one in alternatives_of(schema)))

    def _alternative(self, schema: Schema, depth: int) -> Node:
        if (values := listed_in(schema)) is not None:
            return self._listed(values)
        match schema.get("type"):
            case "object":
                return self.object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case None if not schema.keys() & KEYWORDS:
                return self._anything(MAX_DEPTH)
            case None | "string":
                return self._string(schema)
        return self._as_json(schema)

    def _string(self, schema: Schema) -> Node:
        inside = strings_of(schema).without(holding(QUOTE)).node(lambda chars: chars)
        return Seq((self._quote, inside, self._quote))

    def _array(self, schema: Schema, depth: int) -> Node:
        check_keywords(schema, _OF_ARRAY, "a list")
        leaf, items = [Leaf("", schema)], schema.get("items", True)
        least, most = count_of(leaf, "minItems", max) or 0, count_of(leaf, "maxItems", min)
        most = 0 if items is False else most
        if most is not None and most < least:
            return NOTHING
        if most == 0:
            return text("[]")
        if isinstance(items, list):
            raise BadSchema("a list of items is not supported in this form of calls; write one schema")
        item = self._anything(MAX_DEPTH - 1) if items is True else self._value(with_definitions(items, schema), depth + 1)
        rest = Repeat(Seq((_COMMA, item)), max(least - 1, 0), None if most is None else most - 1)
        return wrapped("[", Alt((*((EMPTY,) if least == 0 else ()), Seq((item, rest)))), "]")

    def _anything(self, depth: int) -> Node:
        """Any value with lists and objects nested at most `depth` levels deep."""
        plain = (self._string({}), any_number(), text("true"), text("false"), text("null"))
        if depth == 0:
            return Alt(plain)
        inner = self._anything(depth - 1)
        objects = Joined(Seq((_ANY_KEY, text(":"), inner)), _COMMA)
        return Alt((*plain, wrapped("[", Alt((EMPTY, Joined(inner, _COMMA))), "]"), wrapped("{", Alt((EMPTY, objects)), "}")))

    def _listed(self, values: Iterable[Any]) -> Node:
        return Alt(tuple(self._literal(value) for value in values if QUOTE not in json.dumps(value, ensure_ascii=False)))

    def _literal(self, value: Any) -> Node:
        match value:
            case str():
                return Seq((self._quote, text(value), self._quote))
            case dict():
                members = tuple((self._member(name, self._literal(one)), True) for name, one in value.items())
                return wrapped("{", Members(members, _COMMA), "}")
            case list():
                return wrapped("[", Members(tuple((self._literal(one), True) for one in value), _COMMA), "]")
        return text(json.dumps(value))
