"""Schemas that hold at once, as leaves: dictionaries without `$ref` and `allOf`, each with its path in the document.

Nothing is merged: a value must fit every leaf. A leaf keeps its identity, so that the same leaves again mean the same values, and
what is made of a schema (the rest of it, its negation) is made once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

MAX_INSIDE = 500
NOT_BUILT = {
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "divisibleBy", "extends", "disallow",
}  # fmt: skip
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
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "integer": (),
    "boolean": (),
    "null": (),
}  # fmt: skip
TYPES = tuple(BY_TYPE)
NOT_TYPES, NOT_VALUES, NOT_PATTERNS, NOT_THERE = ("not", "type"), ("not", "enum"), ("not", "pattern"), ("not", "required")
"""Keys of schemas that are made as negations: lists of types, values, patterns, and names of properties that are not there. They
are not text, so no document has them."""
KEYWORDS = {
    "$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "enum", "const", "type",
    *(key for keys in BY_TYPE.values() for key in keys), NOT_TYPES, NOT_VALUES, NOT_PATTERNS, NOT_THERE,
}  # fmt: skip
_SINCE = {
    "draft-06": {"const", "contains", "propertyNames"}, "draft-07": {"if", "then", "else"},
    "2019-09": {"dependentRequired", "dependentSchemas", "minContains", "maxContains"}, "2020-12": {"prefixItems"},
}  # fmt: skip
"""Keywords that an earlier draft does not have."""
_BEFORE = {"2019-09": {"dependencies"}, "2020-12": {"additionalItems"}}
"""Keywords that this draft no longer has."""


class BadSchema(ValueError):
    """The schema is not valid, or holds something unsupported; the message says where and what."""


class Leaf(NamedTuple):
    where: str
    schema: Mapping[Any, Any]


Parts = Sequence[tuple[str, Any]]
"""Places and schemas that hold at once."""


class Flat(NamedTuple):
    leaves: tuple[Leaf, ...]
    named: str | None
    """The reference that was followed, or None."""

    @property
    def key(self) -> frozenset[int]:
        """Equal where the leaves are the same."""
        return frozenset(id(leaf.schema) for leaf in self.leaves)


class Document:
    """A schema with all that its references name."""

    def __init__(self, root: Any) -> None:
        self._root = root
        inner = root.values() if isinstance(root, dict) else ()
        self._has_inner_base = any(_has_base(part) for part in inner)
        """References count from an inner $id, not from the root."""
        self._made: dict[tuple[Any, ...], Any] = {}
        self._sources: list[Any] = []
        """Keeps alive the objects whose ids are keys of `_made`."""
        drafts = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")
        declared = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        at = next((i for i, draft in enumerate(drafts) if draft in declared), len(drafts) - 1)
        self.is_old = at < 3
        """Draft-07 or before: `$ref` hides the keywords beside it."""
        self.is_first = at == 0 or "draft-03" in declared
        """Draft-04 or before: 1.0 is not an integer."""
        self.is_newest = at == len(drafts) - 1
        self.ignored = {key for draft in drafts[at + 1 :] for key in _SINCE.get(draft, ())}
        """Keywords that validators of the declared draft ignore. They are obeyed, and nothing is inferred from them."""
        self.ignored |= {key for draft in drafts[: at + 1] for key in _BEFORE.get(draft, ())}

    def named(self, target: Any, where: str) -> Any:
        """The schema that a reference names by a JSON pointer from the root. Raises BadSchema."""
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            said = "is not a pointer within the schema; put what it names into $defs and write #/$defs/NAME"
            raise BadSchema(f"{where}/$ref={json.dumps(target)[:60]} {said}")
        if self._has_inner_base:
            raise BadSchema(f"{where}/$ref={target}: a schema with an $id inside of it is not supported; take the inner $id out")
        found: Any = self._root
        for part in unquote(target).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise BadSchema(f"{where}/$ref={target}: the schema has no such part; correct it") from None
        return found

    def flat(self, parts: Parts) -> Flat | None:
        """The leaves of schemas that hold at once, in their order; None if one of them is false. Raises BadSchema."""
        leaves, seen, named = dict[int, Leaf](), set[int](), None
        todo = list(reversed(parts))
        while todo:
            where, schema = todo.pop()
            if schema is False:
                return None
            if schema is True or id(schema) in seen:
                continue
            check_built(schema, where)
            if "items" in schema and "prefixItems" in schema.keys() & self.ignored:  # to validators `items` is for all elements
                raise BadSchema(f"{where}/prefixItems is not of the declared draft: take out $schema, or write a list into items")
            seen.add(id(schema))
            if "$ref" not in schema and "allOf" not in schema:
                if schema.keys() & KEYWORDS:
                    leaves[id(schema)] = Leaf(where, schema)
                continue
            inner = list[tuple[str, Any]]()
            if "$ref" in schema:
                inner.append((str(schema["$ref"]), self.named(schema["$ref"], where)))
                named = named or str(schema["$ref"])
            inner.append((where, self.without(schema, "$ref", "allOf")))
            inner += list_of(schema, "allOf", where) if "allOf" in schema else []
            todo += reversed(inner)
        return Flat(tuple(leaves.values()), named)

    def without(self, schema: Mapping[Any, Any], *keys: str) -> Mapping[Any, Any]:
        """The keywords of a schema but these; the same object each time."""
        kept = KEYWORDS - set(keys)
        found: Mapping[Any, Any] = self.made(schema, keys, lambda: {key: value for key, value in schema.items() if key in kept})
        return found

    def made(self, source: Any, name: object, make: Callable[[], Any]) -> Any:
        """The result of `make` for a schema and a name, computed once."""
        key = (id(source), name)
        if key not in self._made:
            self._sources.append(source)
            self._made[key] = make()
        return self._made[key]


def check_built(schema: Any, where: str) -> None:
    """Raises BadSchema for a value that is not a schema, or has a keyword that is not supported."""
    if not isinstance(schema, dict):
        raise BadSchema(f"{where or 'the schema'} is {json.dumps(schema)[:40]}, not an object; correct it")
    refused = next((key for key in schema if key in NOT_BUILT), None)
    if refused is not None:
        raise BadSchema(f"{where}/{refused}: this keyword is not supported; leave it out")


def list_of(schema: Mapping[Any, Any], key: str, where: str) -> list[tuple[str, Any]]:
    """The schemas of allOf, anyOf, oneOf, with their places. Raises BadSchema."""
    parts = schema[key]
    if not isinstance(parts, list) or not parts:
        raise BadSchema(f"{where}/{key} must be a list of schemas; correct it")
    return [(f"{where}/{key}/{i}", part) for i, part in enumerate(parts)]


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
    if not left_out:
        return found
    left_out |= {"number"} if "integer" in left_out else {"integer"} if "number" in left_out else set()
    return [name for name in (TYPES if found is None else found) if name not in left_out]


def written_types(leaves: Sequence[Leaf]) -> list[str]:
    """The types that are written: if none is named, the type whose keywords occur; values of other types are valid too."""
    said = types_of(leaves)
    keys = {key for leaf in leaves for key in leaf.schema}
    implied = next((name for name, own in BY_TYPE.items() if not keys.isdisjoint(own)), None)
    if NOT_PATTERNS in keys:
        implied = "string"
    if all("type" not in leaf.schema for leaf in leaves) and implied is not None:
        return [implied] if said is None or implied in said else []
    return [name for name in TYPES if name != "integer"] if said is None else said


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


def _has_base(part: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(part.get("$id"), str) or any(map(_has_base, part.values()))
    return isinstance(part, list) and any(map(_has_base, part))
