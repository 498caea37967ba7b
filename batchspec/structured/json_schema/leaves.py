"""Schemas that hold at once, as leaves: dictionaries without `$ref` and `allOf`, each with its path in the document.

Nothing is merged: a value must fit every leaf.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from batchspec.errors import OneLine

NOT_BUILT = {
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "divisibleBy", "extends", "disallow",
}
"""Keywords of the drafts that decide whether a value is valid, and are not supported."""
BY_TYPE: dict[str, tuple[str, ...]] = {
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
        "propertyNames", "dependencies", "dependentRequired", "dependentSchemas",
    ),
    "array": (
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains",
        "maxContains",
    ),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "integer": (),
    "boolean": (),
    "null": (),
}
TYPES = tuple(BY_TYPE)
NOT_TYPES, NOT_VALUES, NOT_PATTERNS, NOT_THERE = ("not", "type"), ("not", "enum"), ("not", "pattern"), ("not", "required")
"""Keys of schemas that are made as negations: lists of types, values, patterns, and names of properties that are not there. They
are not text, so no document has them."""
NOT_ANY = ("not", "anyOf")
"""The same for the alternatives of a negation: those that are not supported are left out."""
NOT_FIT = ("not", "schema")
"""The same for a schema that does not hold, by which only listed values are written: (what is said of others, schema)."""
SOME_KEY = ("not", "properties")
"""The same for a property that is there: (schema of its name, schema of its value)."""
KEYWORDS = {
    "$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "enum", "const", "type", "format",
    *(key for keys in BY_TYPE.values() for key in keys),
    NOT_TYPES, NOT_VALUES, NOT_PATTERNS, NOT_THERE, NOT_ANY, NOT_FIT, SOME_KEY,
}


class BadSchema(OneLine, ValueError):
    """The schema is not valid, or holds something unsupported; the message says where and what."""


class Leaf(NamedTuple):
    where: str
    schema: Mapping[Any, Any]


Parts = Sequence[tuple[str, Any]]
"""Places and schemas that hold at once."""


def check_built(schema: Any, where: str) -> None:
    """Raises BadSchema for a value that is not a schema, or has a keyword that is not supported."""
    if not isinstance(schema, dict):
        raise BadSchema(f"{where or 'the schema'} is {json.dumps(schema)[:40]}, not an object; correct it")
    refused = next((key for key in schema if key in NOT_BUILT), None)
    if refused is not None:
        raise BadSchema(f"{where}/{refused}: this keyword is not supported; leave it out")


def list_of(schema: Mapping[Any, Any], key: Any, where: str) -> list[tuple[str, Any]]:
    """The schemas of allOf, anyOf, oneOf or NOT_ANY, with their places. Raises BadSchema."""
    parts = schema[key]
    if not isinstance(parts, list) or not parts:
        raise BadSchema(f"{where}/{key} must be a list of schemas; correct it")
    return [(where if key == NOT_ANY else f"{where}/{key}/{i}", part) for i, part in enumerate(parts)]


def names_of(types: Any, where: str) -> list[str]:
    """The types of the keyword `type`. Raises BadSchema."""
    found = [types] if isinstance(types, str) else types
    if not isinstance(found, list) or not found or any(name not in TYPES for name in found):
        raise BadSchema(f"{where}/type is {json.dumps(types)[:60]}; it must be of {', '.join(TYPES)}")
    return found


def listed_values(schema: Mapping[Any, Any]) -> list[Any] | None:
    """The values that const or enum lists; None without either, and if enum is not a list."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def types_of(leaves: Iterable[Leaf]) -> list[str] | None:
    """The types that all leaves allow; None if none of them names types."""
    found: list[str] | None = None
    for where, schema in leaves:
        if "type" in schema:
            own = names_of(schema["type"], where)
            if found is None:
                found = own
            else:
                both = [name for name in found if name in own or (name == "integer" and "number" in own)]
                found = both + [name for name in own if name == "integer" and "number" in found and name not in both]
    left_out = {name for _, schema in leaves for name in schema.get(NOT_TYPES, ())}
    left_out |= {"integer"} if "number" in left_out else set()  # numbers that are not whole are left by "integer" alone
    return [name for name in (TYPES if found is None else found) if name not in left_out] if left_out else found


def is_not_whole(leaves: Iterable[Leaf]) -> bool:
    """Whether the numbers must not be whole."""
    return any("integer" in schema.get(NOT_TYPES, ()) for _, schema in leaves)


def written_types(leaves: Sequence[Leaf]) -> list[str]:
    """The types that are written: if none is named, those whose keywords occur; values of other types are valid too."""
    said = types_of(leaves)
    if said is not None and any("type" in leaf.schema for leaf in leaves):
        return said
    keys = {key for leaf in leaves for key in leaf.schema}
    implied = [name for name, own in BY_TYPE.items() if not keys.isdisjoint(own)]
    implied = implied or (["string"] if keys & {"format", NOT_PATTERNS} else [])
    allowed = [name for name in (TYPES if said is None else said) if name != "integer"]
    return [name for name in allowed if name in implied] if implied else allowed


def count_of(leaves: Iterable[Leaf], key: str, choose: Callable[[list[int]], int]) -> int | None:
    """The tightest limit of all leaves, as minLength; None: there is none. Raises BadSchema."""
    found = list[int]()
    for where, schema in leaves:
        value = schema.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise BadSchema(f"{where}/{key} must be a whole number, at least 0; correct it")
        found.append(int(value))
    return choose(found) if found else None
