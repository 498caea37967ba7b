"""JSON Schema as nodes of `regular.py`: every text that is written is valid; not every valid text can be written.

What is narrower than the standard: properties come in the schema's order; there are none besides those it names, unless it
names none; one space may follow a colon or a comma, and no other white space is written; whole numbers have at most 15 digits,
and so do fractions; a value without a type is nested at most MAX_DEPTH levels deep. A schema that is named inside of itself
becomes a rule, of any depth. A keyword of the standard that could make a written text invalid and is not built is refused by its
name. Annotations and what the standard does not know, names of formats included, are ignored, as validators do.
Source: https://json-schema.org/draft/2020-12, and draft-07's items, definitions and dependencies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from batchspec.structured.json_values import (
    ANY_STRING,
    COLON,
    COMMA,
    FORMATS,
    STANDARD_FORMATS,
    any_object,
    any_value,
    escaped,
    integer,
    literal,
    number,
    string,
    wrapped,
)
from batchspec.structured.merge import BadSchema, merged, same
from batchspec.structured.regex import BadRegex, regex_node
from batchspec.structured.regular import EMPTY, NOTHING, Alt, Joined, Members, Node, Ref, Repeat, Seq, text
from batchspec.structured.rules import Rules

MAX_DEPTH = 3
MAX_INSIDE = 500
NOT_BUILT = {
    "not", "if", "then", "else", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "contains",
    "minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems", "multipleOf", "$dynamicRef", "$recursiveRef",
    "divisibleBy", "extends", "disallow",
}  # fmt: skip
"""Keywords of the drafts that decide whether a value is valid."""
BY_TYPE: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "boolean": (),
    "null": (),
}
TYPES = tuple(BY_TYPE)
KEYWORDS = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const", "type", *(key for keys in BY_TYPE.values() for key in keys)}


def schema_rules(schema: Any) -> Rules:
    """The JSON texts of a schema. Raises BadSchema for one that is not valid, or has a keyword that is not built."""
    reader = _Reader(schema)
    return Rules(reader.value(schema, "", ()), reader.rules)


class _Reader:
    def __init__(self, root: Any) -> None:
        self._root = root
        inner = root.values() if isinstance(root, dict) else ()
        self._has_inner_base = any(_has_base(part) for part in inner)
        """References count from an inner $id, not from the root."""
        self.rules: dict[str, Node] = {}
        """What is named inside of itself."""
        self._inside: list[str] = []
        self._named_inside: set[str] = set()

    def value(self, schema: Any, where: str, above: tuple[str, ...]) -> Node:
        """above: references that this schema is inside of."""
        if schema is True:
            return any_value(MAX_DEPTH)
        if schema is False:
            return NOTHING
        if not isinstance(schema, dict):
            raise BadSchema(f"{where or 'the schema'} is {json.dumps(schema)[:40]}, not an object; correct it")
        refused = next((key for key in schema if key in NOT_BUILT), None)
        if refused is not None:
            raise BadSchema(f"{where}/{refused}: this keyword is not built; leave it out")
        schema = {key: item for key, item in schema.items() if key in KEYWORDS}
        if "$ref" in schema:
            return self._reference(schema, where, above)
        for key in ("allOf", "anyOf", "oneOf"):
            if key in schema:
                return self._combined(key, schema, where, above)
        if "const" in schema or "enum" in schema:
            return self._listed(schema, where)
        types = schema.get("type", self._implied(schema))
        types = [types] if isinstance(types, str) else types
        if types is None:
            return any_value(MAX_DEPTH)
        if not isinstance(types, list) or not types or any(name not in TYPES for name in types):
            raise BadSchema(f"{where}/type is {json.dumps(types)[:60]}; it must be of {', '.join(TYPES)}")
        return Alt(tuple(self._typed(name, schema, where, above) for name in types))

    def _implied(self, schema: Mapping[str, Any]) -> str | None:
        """The type whose keywords a schema without a type has: values of other types are valid too, and are not written."""
        return next((name for name, keys in BY_TYPE.items() if any(key in schema for key in keys)), None)

    def _reference(self, schema: Mapping[str, Any], where: str, above: tuple[str, ...]) -> Node:
        target = schema["$ref"]
        found = self._named(target, where)
        rest = {key: item for key, item in schema.items() if key != "$ref"}
        name = f"{target} {json.dumps(rest, sort_keys=True)}" if rest else str(target)
        if name in self.rules or name in self._inside:
            self._named_inside.add(name)
            return Ref(name)
        if len(self._inside) > MAX_INSIDE:
            raise BadSchema(f"{where}/$ref={target}: references are nested more than {MAX_INSIDE} levels deep; write them flat")
        self._inside.append(name)
        node = self.value(merged(found, rest, f"{where}/$ref"), target, (*above, target))
        self._inside.pop()
        if name not in self._named_inside:
            return node
        self.rules[name] = node
        return Ref(name)

    def _named(self, target: Any, where: str) -> Any:
        """What a reference names, as a JSON pointer from the root."""
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            said = "is no pointer within the schema; put what it names into $defs and write #/$defs/NAME"
            raise BadSchema(f"{where}/$ref={json.dumps(target)[:60]} {said}")
        if self._has_inner_base:
            raise BadSchema(f"{where}/$ref={target}: a schema with an $id inside of it is not built; take the inner $id out")
        found: Any = self._root
        for part in unquote(target).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise BadSchema(f"{where}/$ref={target}: the schema has no such part; correct it") from None
        return found

    def _combined(self, key: str, schema: Mapping[str, Any], where: str, above: tuple[str, ...]) -> Node:
        parts, place = schema[key], f"{where}/{key}"
        if not isinstance(parts, list) or not parts:
            raise BadSchema(f"{place} must be a list of schemas; correct it")
        rest = {name: item for name, item in schema.items() if name != key}
        parts = [self._resolved(part, place, above) for part in parts]
        if key == "allOf":
            for part in parts:
                rest = merged(rest, part, place)
            return self.value(rest, where, above)
        parts = [merged(rest, part, place) for part in parts]
        if key == "oneOf" and not _exclusive(parts):
            raise BadSchema(
                f"{place}: one value could fit several of these; use anyOf, or give each a type or a const of its own"
            )
        return Alt(tuple(self.value(part, f"{place}/{i}", above) for i, part in enumerate(parts)))

    def _resolved(self, part: Any, where: str, above: tuple[str, ...]) -> Any:
        """A part of allOf, anyOf, oneOf: what it refers to where other keywords are to be merged in; a recursive one stays."""
        seen = list(above)
        while isinstance(part, dict) and isinstance(part.get("$ref"), str) and part["$ref"] not in seen:
            seen.append(part["$ref"])
            found = self._named(part["$ref"], where)
            part = merged(found, {key: item for key, item in part.items() if key != "$ref"}, where)
        return part

    def _listed(self, schema: Mapping[str, Any], where: str) -> Node:
        others = sorted(schema.keys() - {"const", "enum", "type"})
        if others:
            raise BadSchema(f"{where}/{others[0]} beside const or enum is not built; leave it out")
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list):
            raise BadSchema(f"{where}/enum must be a list; correct it")
        if "const" in schema and "enum" in schema:
            values = [value for value in values if any(same(value, one) for one in schema["enum"])]
        types = schema.get("type", list(TYPES))
        types = [types] if isinstance(types, str) else types
        return Alt(tuple(literal(value) for value in values if any(_is(value, name) for name in types)))

    def _typed(self, name: str, schema: Mapping[str, Any], where: str, above: tuple[str, ...]) -> Node:
        match name:
            case "object":
                return self._object(schema, where, above)
            case "array":
                return self._array(schema, where, above)
            case "string":
                return self._string(schema, where)
            case "number" | "integer":
                return _bounded(name, schema, where)
            case "boolean":
                return Alt((text("true"), text("false")))
        return text("null")

    def _object(self, schema: Mapping[str, Any], where: str, above: tuple[str, ...]) -> Node:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if (
            not isinstance(properties, dict)
            or not isinstance(required, list)
            or not all(isinstance(one, str) for one in required)
        ):
            raise BadSchema(f"{where}: properties must be an object and required a list of names; correct them")
        more = schema.get("additionalProperties", True)
        _check_patterns(schema.get("patternProperties", {}), [*properties, *required], where)
        least, most = _count(schema, "minProperties", where), _count(schema, "maxProperties", where)
        if not properties and not required:
            if least or (most is not None and most > 0):
                raise BadSchema(f"{where}: minProperties and maxProperties without properties are not built; leave them out")
            if more is False or most == 0:
                return text("{}")
            inner = any_value(MAX_DEPTH - 1) if more is True else self.value(more, f"{where}/additionalProperties", above)
            return any_object(inner)
        if (least or 0) > len(required) or (most is not None and most < len({*properties, *required})):
            raise BadSchema(f"{where}: minProperties and maxProperties that properties and required leave open are not built")
        if more is False and (absent := [one for one in required if one not in properties]):
            raise BadSchema(f"{where}: {absent[0]!r} is required, and additionalProperties=false forbids it; correct one of them")
        items = []
        for key in dict.fromkeys([*properties, *required]):
            inner = (
                self.value(properties[key], f"{where}/properties/{key}", above)
                if key in properties
                else (any_value(MAX_DEPTH - 1) if more is True else self.value(more, f"{where}/additionalProperties", above))
            )
            items.append((Seq((literal(key), COLON, inner)), key in required))
        return wrapped("{", Members(tuple(items), COMMA), "}")

    def _array(self, schema: Mapping[str, Any], where: str, above: tuple[str, ...]) -> Node:
        items, first = schema.get("items", True), schema.get("prefixItems", [])
        if isinstance(items, list):  # draft-07
            items, first = schema.get("additionalItems", True), items
        if schema.get("uniqueItems"):
            raise BadSchema(f"{where}/uniqueItems is not built: values written before would have to be remembered; leave it out")
        least, most = _count(schema, "minItems", where) or 0, _count(schema, "maxItems", where)
        if most is not None and most < least:
            return NOTHING
        fixed = [self.value(one, f"{where}/prefixItems/{i}", above) for i, one in enumerate(first[:most])]
        rest = any_value(MAX_DEPTH - 1) if items is True else self.value(items, f"{where}/items", above)
        if not fixed and (most is None or most > 0) and least <= 1 and most is None:
            return wrapped("[", Alt((Joined(rest, COMMA), *((EMPTY,) if least == 0 else ()))), "]")
        return wrapped("[", _elements(fixed, rest, least, most), "]")

    def _string(self, schema: Mapping[str, Any], where: str) -> Node:
        least, most = _count(schema, "minLength", where), _count(schema, "maxLength", where)
        kinds = [key for key in ("pattern", "format") if key in schema and (key == "pattern" or schema[key] in STANDARD_FORMATS)]
        if not kinds:
            return ANY_STRING if least is None and most is None else string(least or 0, most)
        if len(kinds) > 1 or least or most is not None:
            raise BadSchema(
                f"{where}/{kinds[0]} beside {kinds[-1] if len(kinds) > 1 else 'a length'} is not built; leave one out"
            )
        value = schema[kinds[0]]
        if kinds[0] == "format":
            if value not in FORMATS:
                raise BadSchema(
                    f"{where}/format={json.dumps(value)[:40]} is not built; use one of {', '.join(FORMATS)}, or leave it out"
                )
            return wrapped('"', regex_node(FORMATS[value], escaped), '"')
        try:
            return wrapped('"', regex_node(str(value), escaped, anywhere=True), '"')
        except BadRegex as error:
            raise BadSchema(f"{where}/pattern: {error}") from None


def _has_base(part: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(part.get("$id"), str) or any(map(_has_base, part.values()))
    return isinstance(part, list) and any(map(_has_base, part))


def _check_patterns(patterns: Any, keys: list[str], where: str) -> None:
    """patternProperties says nothing about keys that match none of its patterns, and no others are written."""
    place = f"{where}/patternProperties"
    if patterns and not keys:
        raise BadSchema(f"{place} without properties is not built; name the properties, or use additionalProperties")
    for pattern in patterns:
        try:
            found = next((key for key in keys if re.search(pattern, key)), None)
        except re.error as error:
            raise BadSchema(f"{place}: {pattern!r} is no regular expression ({error})") from None
        if found is not None:
            raise BadSchema(f"{place}: {pattern!r} matches the property {found!r}, which is not built; leave it out")


def _elements(fixed: list[Node], rest: Node, least: int, most: int | None) -> Node:
    """Elements of an array: first `fixed`, then any of `rest`; least .. most of them together."""
    tail: Node = EMPTY
    repeated = Seq((COMMA, rest))
    count = max(len(fixed), 1)
    if most is None or most > count:
        tail = Repeat(repeated, max(0, least - count), None if most is None else most - count)
    elements = fixed or [rest]
    if most == 0:
        return EMPTY
    for i in range(len(elements) - 1, -1, -1):
        one = Seq((*((COMMA,) if i else ()), elements[i], tail))
        tail = one if i < least else Alt((EMPTY, one))
    return tail


def _bounded(name: str, schema: Mapping[str, Any], where: str) -> Node:
    low, high, above, below = (schema.get(key) for key in BY_TYPE["number"])
    for key, value in zip(BY_TYPE["number"], (low, high, above, below), strict=True):
        if isinstance(value, bool):
            raise BadSchema(f"{where}/{key} of draft-04 is not built; write the bound as a number")
        if value is not None and not isinstance(value, int | float):
            raise BadSchema(f"{where}/{key} must be a number; correct it")
        if name == "number" and value is not None and value != int(value):
            raise BadSchema(f"{where}/{key}={value}: bounds of a number that are not whole are not built; use a whole one")
    return integer(low, high, above, below) if name == "integer" else number(low, high, above, below)


def _count(schema: Mapping[str, Any], key: str, where: str) -> int | None:
    value = schema.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value)):
        raise BadSchema(f"{where}/{key} must be a whole number, at least 0; correct it")
    return None if value is None else int(value)


def _is(value: Any, name: str) -> bool:
    """Whether a JSON value is of this type."""
    if name in ("number", "integer"):
        return not isinstance(value, bool) and isinstance(value, int | float) and (name == "number" or value == int(value))
    kind = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}.get(name)
    return kind is not None and isinstance(value, kind)


def _exclusive(parts: list[Any]) -> bool:
    """Whether no value can fit two of these schemas: by type, by listed values, or by a required property's listed values."""
    return all(_apart(a, b) for i, a in enumerate(parts) for b in parts[:i])


def _apart(a: Any, b: Any) -> bool:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    values = _values(a), _values(b)
    if values[0] is not None and values[1] is not None:
        return not any(x == y for x in values[0] for y in values[1])
    types = _types(a), _types(b)
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    shared = (
        {key for key in a.get("required", []) if key in b.get("required", [])} if types[0] == types[1] == {"object"} else set()
    )
    return any(_apart(a.get("properties", {}).get(key), b.get("properties", {}).get(key)) for key in shared)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type")
    found = {types} if isinstance(types, str) else set(types or ())
    values = _values(schema)
    if values is not None:
        found = {name for name in TYPES for value in values if _is(value, name)}
    return found | ({"integer"} if "number" in found else set())
