"""Objects of JSON Schema: the properties that are named, in the schema's order, then other keys where there may be some.

Other keys are written if no property is named, or if they match a pattern of patternProperties. Keys that are treated alike make
one region: those that match some of the patterns and none of the others. A named property is never written twice, nor as another
key. Another key may come twice: all its values fit, and a validator, which takes the last, counts it once; so the other keys
together count as one property for minProperties.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Protocol

from batchspec.structured.char_dfa import NO_TEXT, CharDfa
from batchspec.structured.json_schema.leaves import KEYWORDS, NOT_THERE, NOT_TYPES, BadSchema, Document, Leaf, Parts, count_of
from batchspec.structured.json_schema.strings import language, listed, matching
from batchspec.structured.json_schema.validity import fits, found_in
from batchspec.structured.json_schema.values import (
    ANY_STRING,
    COLON,
    COMMA,
    MAX_DEPTH,
    any_object,
    any_value,
    escaped,
    literal,
    wrapped,
)
from batchspec.structured.regex_syntax import ANY
from batchspec.structured.regular import EMPTY, NOTHING, Alt, Graph, Joined, Members, Node, Repeat, Seq, text

MAX_OVERLAPS = 4
"""Keys that match several patterns are written if there are at most this many patterns."""
MAX_COUNTED = 2_000
"""Maximum of the number of properties times the largest count."""


class Reading(Protocol):
    """Builds nodes for the schemas inside of an object or an array."""

    document: Document

    def value(self, parts: Parts) -> Node:
        """The values that fit all of these schemas."""


def inner_schemas(leaves: Sequence[Leaf], key: str, *, proof: bool = False) -> Parts:
    """Schemas for the value of a property. Raises BadSchema; for a proof also if validators may disagree on a pattern."""
    found = list[tuple[str, Any]]()
    for where, schema in leaves:
        own = _of(schema, "properties", where)
        if key in schema.get(NOT_THERE, ()):
            found.append((where, False))
        if key in own:
            found.append((f"{where}/properties/{key}", own[key]))
        surely = key in own
        for pattern, inner in _of(schema, "patternProperties", where).items():
            sure, possible = found_in(pattern, f"{where}/patternProperties", key)
            if proof and sure != possible:
                raise BadSchema(f"{where}/patternProperties: validators disagree on whether {pattern!r} matches {key!r}")
            surely |= sure
            found += [(f"{where}/patternProperties/{pattern}", inner)] if possible else []
        if not surely and schema.get("additionalProperties", True) is not True:
            found.append((f"{where}/additionalProperties", schema["additionalProperties"]))
    return found


def named_keys(leaves: Sequence[Leaf]) -> tuple[list[str], set[str]]:
    """The named properties, in their order, and those of them that are required. Raises BadSchema."""
    named, required = dict[str, None](), dict[str, None]()
    for where, schema in leaves:
        named |= dict.fromkeys(_of(schema, "properties", where))
        names = schema.get("required", [])
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise BadSchema(f"{where}: properties must be an object and required a list of names; correct them")
        required |= dict.fromkeys(names)
    return list(named | required), set(required)


def object_node(leaves: Sequence[Leaf], reading: Reading) -> Node:
    """The objects that all leaves allow. Raises BadSchema and TooLarge."""
    named, required = named_keys(leaves)
    least, most = count_of(leaves, "minProperties", max) or 0, count_of(leaves, "maxProperties", min)
    forbidden = {key for key in named if _is_forbidden(key, leaves, reading.document)}
    if forbidden & required or (most is not None and most < max(least, len(required))):
        return NOTHING
    if most == 0:
        return text("{}")
    members = list[tuple[Node, bool]]()
    for key in named:
        if key in forbidden:
            continue
        inner = inner_schemas(leaves, key)
        is_said = any(key in schema.get("properties", {}) for _, schema in leaves)
        value = reading.value(inner) if inner else any_value(MAX_DEPTH if is_said else MAX_DEPTH - 1)
        members.append((Seq((literal(key), COLON, value)), key in required))
    other = _other(leaves, named, reading)
    if other is None and not members:
        return NOTHING if least else text("{}")
    if not members and not least and most is None and isinstance(other, _AnyKey):
        return any_object(other.value)
    found = Seq((ANY_STRING, COLON, other.value)) if isinstance(other, _AnyKey) else other
    return wrapped("{", _members(members, found, least, most, leaves), "}")


def _is_forbidden(key: str, leaves: Sequence[Leaf], document: Document) -> bool:
    if any(schema is False for _, schema in inner_schemas(leaves, key)):
        return True
    return any(not fits(key, where, schema["propertyNames"], document) for where, schema in leaves if "propertyNames" in schema)


class _AnyKey:
    """Any key at all, and its value."""

    def __init__(self, value: Node) -> None:
        self.value = value


def _other(leaves: Sequence[Leaf], named: Sequence[str], reading: Reading) -> Node | _AnyKey | None:
    """A key that is not named, with its value; None if no such key may be written."""
    is_open = not named
    patterns = [(leaf, pattern) for leaf in leaves for pattern in _of(leaf.schema, "patternProperties", leaf.where)]
    if not patterns and not is_open:
        return None
    more = [
        (f"{where}/additionalProperties", schema["additionalProperties"])
        for where, schema in leaves
        if "additionalProperties" in schema
    ]
    more = [(where, schema) for where, schema in more if schema is not True]
    names = [leaf for where, schema in leaves if "propertyNames" in schema for leaf in _names(where, schema, reading)]
    left_out = [*named, *(name for leaf in leaves for name in leaf.schema.get(NOT_THERE, ()))]
    if not patterns and not names and not left_out:
        return None if any(schema is False for _, schema in more) else _AnyKey(_value(more, reading))
    keys = language(names) if names else CharDfa.of(Repeat(ANY, 0, None))
    keys = keys.without(listed(left_out)) if left_out else keys
    regions = list[Node]()
    for some in _chosen(patterns, with_none=is_open and (not patterns or any(schema is not False for _, schema in more))):
        inner = list[tuple[str, Any]]()
        for leaf in leaves:
            own = [pattern for one, pattern in some if one is leaf]
            inner += [(f"{leaf.where}/patternProperties/{one}", leaf.schema["patternProperties"][one]) for one in own]
            if not own and leaf.schema.get("additionalProperties", True) is not True:
                inner.append((f"{leaf.where}/additionalProperties", leaf.schema["additionalProperties"]))
        if any(schema is False for _, schema in inner):
            continue
        region = keys
        for leaf, pattern in patterns:
            place = f"{leaf.where}/patternProperties"
            if any(leaf is one and pattern == other for one, other in some):
                region = region.both(matching(pattern, place))
            else:
                region = region.without(matching(pattern, place, sure_=False))
        if region != NO_TEXT:
            regions.append(Seq((wrapped('"', region.node(escaped), '"'), COLON, _value(inner, reading))))
    return Alt(tuple(regions)) if regions else None


def _chosen(patterns: Sequence[tuple[Leaf, str]], *, with_none: bool) -> list[tuple[tuple[Leaf, str], ...]]:
    """The sets of patterns that a key may match."""
    most = len(patterns) if len(patterns) <= MAX_OVERLAPS else 1
    return [some for size in range(0 if with_none else 1, most + 1) for some in combinations(patterns, size)]


def _value(inner: Parts, reading: Reading) -> Node:
    return reading.value(inner) if inner else any_value(MAX_DEPTH - 1)


def _names(where: str, schema: Mapping[Any, Any], reading: Reading) -> tuple[Leaf, ...]:
    """The leaves of propertyNames, which are schemas of strings."""
    place = f"{where}/propertyNames"
    flat = reading.document.flat([(place, schema["propertyNames"])])
    built = {"type", "pattern", "minLength", "maxLength", "format"}
    if flat is None:
        return (Leaf(place, {NOT_TYPES: ["string"]}),)
    if any(leaf.schema.keys() & KEYWORDS - built for leaf in flat.leaves):
        raise BadSchema(f"{place}: only {', '.join(sorted(built))} are supported; leave the others out")
    return flat.leaves


def _members(
    items: Sequence[tuple[Node, bool]], other: Node | None, least: int, most: int | None, leaves: Sequence[Leaf]
) -> Node:  # fmt: skip
    """Members in this order, of which optional ones may be missing; then any number of `other`; least .. most in all.

    Members after the first begin with a comma. A state is the index of the next item, and how many were written, as far as
    it is counted.
    """
    num_required = sum(required for _, required in items)
    if most is not None and most >= len(items) and other is None:
        most = None
    if least <= num_required and most is None:
        more = [] if other is None else [(Joined(other, COMMA), False)]
        return Members((*items, *more), COMMA)
    named, cap = len(items), least if most is None else most
    if least > named + (other is not None) or cap * max(1, named) > MAX_COUNTED:
        where = next((where for where, schema in leaves if "minProperties" in schema or "maxProperties" in schema), "")
        raise BadSchema(
            f"{where}/minProperties={least}: this many properties are not written, because only {named} are named; name more"
        )
    cap = max(cap, 1)
    edges: list[list[tuple[Node, int]]] = [[] for _ in range((2 * named + 1) * (cap + 1))]

    def state(item: int, count: int) -> int:
        return 2 * item * (cap + 1) + count

    for number, (item, required) in enumerate(items):
        for count in range(cap + 1):
            if not required:
                edges[state(number, count)].append((EMPTY, state(number + 1, count)))
            if most is not None and count == most:
                continue
            before = state(number, count) + cap + 1
            after = count + 1
            if most is None and after >= cap:  # all that are no longer counted share the item
                before, after = state(number, cap) + cap + 1, cap
            edges[state(number, count)].append((COMMA if count else EMPTY, before))
            if (item, state(number + 1, after)) not in edges[before]:
                edges[before].append((item, state(number + 1, after)))
    final = set[int]()
    for count in range(cap + 1):
        last = state(named, count)
        if count >= least:
            final.add(last)
        if other is not None and count + 1 >= least and (most is None or count < most):
            left = None if most is None else most - count - 1
            tail = Seq((COMMA if count else EMPTY, other, Repeat(Seq((COMMA, other)), 0, left)))
            edges.append([])
            edges[last].append((tail, len(edges) - 1))
            final.add(len(edges) - 1)
    return Graph(tuple(map(tuple, edges)), frozenset(final))


def _of(schema: Mapping[Any, Any], key: str, where: str) -> Mapping[str, Any]:
    found = schema.get(key, {})
    if not isinstance(found, dict):
        raise BadSchema(f"{where}/{key} is {json.dumps(found)[:40]}, not an object; correct it")
    return found
