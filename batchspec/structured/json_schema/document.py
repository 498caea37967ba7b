"""A whole schema: what its references name, what its draft ignores, and the leaves of schemas that hold at once.

A leaf keeps its identity, so that the same leaves again mean the same values, and what is made of a schema (the rest of it, its
negation) is made once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote

from batchspec.structured.json_schema.leaves import KEYWORDS, BadSchema, Leaf, Parts, check_built, list_of

MAX_INSIDE = 500
"""Maximum number of references inside of one another."""
_SINCE = {
    "draft-06": {"const", "contains", "propertyNames"}, "draft-07": {"if", "then", "else"},
    "2019-09": {"dependentRequired", "dependentSchemas", "minContains", "maxContains"}, "2020-12": {"prefixItems"},
}
"""Keywords that an earlier draft does not have."""
_BEFORE = {"2019-09": {"dependencies"}, "2020-12": {"additionalItems"}}
"""Keywords that this draft no longer has."""


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
        self.disagreed: str | None = None
        """The place of a value that is not written because only some validators accept it."""
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

    def ignores(self, key: Any, schema: Mapping[Any, Any]) -> bool:
        """Whether validators of the declared draft ignore a keyword of a schema."""
        if self.is_old and "$ref" in schema and key != "$ref":
            return True
        if key in ("exclusiveMinimum", "exclusiveMaximum"):
            return self.is_first and not isinstance(schema[key], bool)
        return key in self.ignored or (key == "items" and self.is_newest and isinstance(schema[key], list))

    @cached_property
    def of_no_draft(self) -> str | None:
        """A keyword that is obeyed although validators of the declared draft ignore it, with its place in the schema."""
        return next(
            (f"{where}/{key}" for where, one in self._inner() for key in one if key in KEYWORDS and self.ignores(key, one)), None
        )

    @cached_property
    def has_readings(self) -> bool:
        """Whether a value may be valid for some validators alone: they differ in the draft, or in whether they check formats."""
        return self.of_no_draft is not None or any("format" in one for _, one in self._inner())

    def _inner(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """All dictionaries of the document, with their places."""
        todo = [("", self._root)]
        while todo:
            where, one = todo.pop()
            if isinstance(one, dict):
                yield where, one
                todo += [(f"{where}/{key}", item) for key, item in one.items()]
            elif isinstance(one, list):
                todo += [(f"{where}/{i}", item) for i, item in enumerate(one)]

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

    def without(self, schema: Mapping[Any, Any], *keys: Any) -> Mapping[Any, Any]:
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


def _has_base(part: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(part.get("$id"), str) or any(map(_has_base, part.values()))
    return isinstance(part, list) and any(map(_has_base, part))
