"""Proofs that no value fits two schemas, for oneOf.

Ours is the set of values that will be written, theirs all values that a validator accepts. Ours has only the keys that it names,
and texts that surely match; theirs has everything that its keywords do not exclude, and keywords that the declared draft does not
have exclude nothing. If ours has keywords whose alternatives are not chosen yet, these may add names, and types if no type is
given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from batchspec.structured.json_schema.arrays import element_schemas
from batchspec.structured.json_schema.document import Document
from batchspec.structured.json_schema.leaves import (
    NOT_ANY,
    TYPES,
    BadSchema,
    Leaf,
    Parts,
    check_built,
    count_of,
    list_of,
    listed_values,
    types_of,
    written_types,
)
from batchspec.structured.json_schema.numbers import bounds_of
from batchspec.structured.json_schema.objects import inner_schemas, named_keys
from batchspec.structured.json_schema.strings import language, possible_language
from batchspec.structured.json_schema.validity import fits, found_in
from batchspec.structured.regular import TooLarge

MAX_NESTED = 6
COMBINED: tuple[Any, ...] = (
    "anyOf", NOT_ANY, "oneOf", "not", "if", "then", "else", "dependencies", "dependentSchemas", "dependentRequired"
)


class _More(NamedTuple):
    """What alternatives that are not chosen yet may add: names of properties, and whether there are such alternatives at all."""

    names: frozenset[str]
    is_any: bool


class Apart:
    def __init__(self, document: Document) -> None:
        self._document = document

    def from_part(self, ours: Parts, theirs: tuple[str, Any], also: Parts) -> bool:
        """Whether it is proved that no value that is written for all of ours fits theirs. Raises BadSchema.

        also: schemas whose negations hold for ours too
        """
        more = _More(frozenset(self._all_names([one for _, one in also])), is_any=bool(also))
        return self._apart(ours, theirs, more, 0)

    def _apart(self, ours: Parts, theirs: tuple[str, Any], more: _More, depth: int) -> bool:
        if isinstance(theirs[1], bool):
            return not theirs[1]
        flat = self._document.flat(ours)
        if flat is None:
            return True
        if depth > MAX_NESTED:
            return False
        leaves = flat.leaves
        waiting = [leaf.schema[key] for leaf in leaves for key in COMBINED if key in leaf.schema]
        if waiting:
            more = _More(more.names | self._all_names(waiting), is_any=True)
        for i, (where, schema) in enumerate(leaves):
            key = next((key for key in ("anyOf", NOT_ANY, "oneOf") if key in schema), None)
            if key is not None:
                rest = [*leaves[:i], Leaf(where, self._document.without(schema, key)), *leaves[i + 1 :]]
                if all(self._apart([*rest, part], theirs, more, depth + 2) for part in list_of(schema, key, where)):
                    return True
        return any(self._from(leaves, leaf, more, depth) for leaf in self._their_leaves(*theirs))

    def _their_leaves(self, where: str, schema: Any) -> list[Leaf]:
        """Leaves that all hold for their values."""
        found, todo, seen = list[Leaf](), [(where, schema)], set[int]()
        while todo:
            place, one = todo.pop()
            if isinstance(one, bool) or id(one) in seen:
                found += [Leaf(place, {"not": {}})] if one is False else []
                continue
            check_built(one, place)
            seen.add(id(one))
            if "$ref" in one:
                todo.append((str(one["$ref"]), self._document.named(one["$ref"], place)))
                if self._document.is_old:
                    continue
            todo += list_of(one, "allOf", place) if "allOf" in one else []
            hidden = {"$ref", "allOf", *(key for key in one if self._document.ignores(key, one))}
            found.append(Leaf(place, {key: item for key, item in one.items() if key not in hidden}))
        return found

    def _from(self, ours: Sequence[Leaf], their: Leaf, more: _More, depth: int) -> bool:
        where, schema = their
        for key in ("anyOf", "oneOf"):
            if key in schema and all(self._apart(ours, part, more, depth + 1) for part in list_of(schema, key, where)):
                return True
        lists = [listed_values(leaf.schema) for leaf in ours]
        for values in (one for one in lists if one is not None):
            if not any(self._may_fit(value, where, schema) for value in values):
                return True
        if any(one is not None for one in lists):  # the listed values are written, whatever type other keywords imply
            return False
        types = set(self._types(ours, more))
        if "not" in schema and _fit_all(ours, types, schema["not"]):
            return True
        their_values = listed_values(schema)
        if their_values is not None and not any(
            all(self._may_fit(value, leaf.where, leaf.schema, proof=False) for leaf in ours) for value in their_values
        ):
            return True
        their_types = types_of([their])
        if their_types is not None:
            types &= {"number" if name == "integer" else name for name in their_types}
        return all(self._of_type(name, ours, their, more, depth) for name in types)

    def _may_fit(self, value: Any, where: str, schema: Any, *, proof: bool = True) -> bool:
        try:
            return fits(value, where, schema, self._document, proof=proof)
        except BadSchema:
            return True

    def _types(self, ours: Sequence[Leaf], more: _More) -> list[str]:
        found = types_of(ours) or list(TYPES) if more.is_any else written_types(ours)
        return ["number" if name == "integer" else name for name in found]

    def _of_type(self, name: str, ours: Sequence[Leaf], their: Leaf, more: _More, depth: int) -> bool:
        try:
            match name:
                case "object":
                    return self._objects(ours, their, more, depth)
                case "array":
                    return self._arrays(ours, their, more, depth)
                case "string":
                    return language(ours).both(possible_language([their])).is_empty
                case "number":
                    (low, high), (their_low, their_high) = bounds_of(ours), bounds_of([their])
                    pairs = ((low, their_high), (their_low, high))
                    return any(
                        a is not None and b is not None and (a[0] > b[0] or (a[0] == b[0] and (a[1] or b[1]))) for a, b in pairs
                    )
        except (BadSchema, TooLarge):
            pass
        return False

    def _objects(self, ours: Sequence[Leaf], their: Leaf, more: _More, depth: int) -> bool:
        (_, required), (_, theirs) = named_keys(ours), named_keys([their])
        may_write = self._may_write(ours, more)
        most = count_of([their], "maxProperties", min)
        if most is not None and most < len(required):
            return True
        for key in sorted(required | theirs):
            if key not in required and not may_write(key):
                return True
            inner = inner_schemas(ours, key)
            if any(self._apart(inner, part, more, depth + 1) for part in inner_schemas([their], key, proof=True)):
                return True
        return False

    def _may_write(self, ours: Sequence[Leaf], more: _More) -> Callable[[str], bool]:
        """A function that tells whether a key may be written: any one if none is named."""
        names = set(named_keys(ours)[0])
        if not names:
            return lambda key: True
        patterns = [pattern for leaf in ours for pattern in leaf.schema.get("patternProperties", {})]
        return lambda key: key in names or key in more.names or any(found_in(one, "", key)[1] for one in patterns)

    def _all_names(self, schemas: Any) -> set[str]:
        """All names and patterns of properties inside of schemas, at any depth, and of what they refer to."""
        names, todo, seen = set[str](), [schemas], set[int]()
        while todo:
            one = todo.pop()
            if id(one) in seen or not isinstance(one, dict | list | tuple):
                names |= {one} if isinstance(one, str) else set()
                continue
            seen.add(id(one))
            if isinstance(one, list | tuple):
                todo += one
                continue
            names |= {name for name in one if isinstance(name, str)}
            todo += one.values()
            if isinstance(one.get("$ref"), str):
                todo.append(self._document.named(one["$ref"], ""))
        return names

    def _arrays(self, ours: Sequence[Leaf], their: Leaf, more: _More, depth: int) -> bool:
        least, most = count_of(ours, "minItems", max) or 0, count_of(ours, "maxItems", min)
        their_least, their_most = count_of([their], "minItems", max) or 0, count_of([their], "maxItems", min)
        if (most is not None and most < their_least) or (their_most is not None and their_most < least):
            return True
        for place in range(min(max(least, their_least), MAX_NESTED)):
            inner = element_schemas(ours, place)
            if any(self._apart(inner, part, more, depth + 1) for part in element_schemas([their], place)):
                return True
        return False


def _fit_all(ours: Sequence[Leaf], types: set[str], schema: Any) -> bool:
    """Whether all of our values fit a schema of required names alone."""
    if schema is True or schema == {}:
        return True
    if not isinstance(schema, dict) or not schema.keys() <= {"required", "type", "description", "title"}:
        return False
    is_object = schema.get("type", "object") == "object" and types == {"object"}
    return is_object and set(named_keys([Leaf("", schema)])[0]) <= named_keys(ours)[1]
