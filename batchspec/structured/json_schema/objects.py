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
from batchspec.structured.json_schema.document import Document
from batchspec.structured.json_schema.leaves import (
    KEYWORDS,
    NOT_PATTERNS,
    NOT_THERE,
    NOT_TYPES,
    NOT_VALUES,
    BadSchema,
    Leaf,
    Parts,
    count_of,
)
from batchspec.structured.json_schema.members import members_node
from batchspec.structured.json_schema.strings import language, listed, matching
from batchspec.structured.json_schema.validity import fits, found_in
from batchspec.structured.json_schema.values import (
    ANY_STRING,
    COLON,
    MAX_DEPTH,
    any_object,
    any_value,
    escaped,
    literal,
    wrapped,
)
from batchspec.structured.regular import ANY, NOTHING, Alt, LeftOut, Node, Repeat, Seq, text

MAX_OVERLAPS = 4
"""Keys that match several patterns are written if there are at most this many patterns."""
NAME_KEYWORDS = {
    "type", "pattern", "minLength", "maxLength", "format", "enum", "const", NOT_TYPES, NOT_VALUES, NOT_PATTERNS
}
"""The supported keywords of schemas for the names of properties."""


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
                raise BadSchema(f"{where}/patternProperties: validators disagree on {pattern!r} and {key!r}; rewrite it")
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
    if most is not None and most < max(least, len(required)):
        return NOTHING
    if most == 0:
        return text("{}")
    members = list[tuple[Node, bool]]()
    for key in named:
        value = _named_value(key, leaves, reading)
        if isinstance(value, LeftOut) or value != NOTHING:
            members.append((Seq((literal(key), COLON, value)), key in required))
        elif key in required:
            return NOTHING
    other = _other(leaves, named, reading)
    others_left_out = bool(least) and _is_open(leaves)
    if least > len(members) and not others_left_out:
        return NOTHING
    place = next((where for where, schema in leaves if "minProperties" in schema), "")
    left_out = LeftOut((), f"{place}/minProperties={least}: other properties than the named ones are not written; name more")
    if other is None and not members:
        return left_out if least else text("{}")
    if not members and not least and most is None and isinstance(other, _AnyKey):
        return any_object(other.value)
    found = Seq((ANY_STRING, COLON, other.value)) if isinstance(other, _AnyKey) else other
    node = wrapped("{", members_node(members, found, least, most, leaves), "}")
    return Alt((node, left_out)) if others_left_out else node


def _named_value(key: str, leaves: Sequence[Leaf], reading: Reading) -> Node:
    """The values of a named property. NOTHING itself if it must not be there."""
    inner = inner_schemas(leaves, key)
    is_said = any(key in schema.get("properties", {}) for _, schema in leaves)
    if _is_forbidden(key, leaves, reading.document):
        value: Node = NOTHING
    else:
        value = reading.value(inner) if inner else any_value(MAX_DEPTH if is_said else MAX_DEPTH - 1)
    try:
        inner_schemas(leaves, key, proof=True)
    except BadSchema as error:
        value = LeftOut((), str(error)) if value == NOTHING else Alt((value, LeftOut((), str(error))))
    return value


def _is_open(leaves: Sequence[Leaf]) -> bool:
    """Whether properties that are not named may be valid."""
    return not any(schema.get("additionalProperties") is False for _, schema in leaves) or any(
        schema.get("patternProperties") for _, schema in leaves
    )


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
    if flat is None:
        return (Leaf(place, {NOT_TYPES: ["string"]}),)
    if any(leaf.schema.keys() & KEYWORDS - NAME_KEYWORDS for leaf in flat.leaves):
        known = sorted(name for name in NAME_KEYWORDS if isinstance(name, str))
        raise BadSchema(f"{place}: only {', '.join(known)} are supported; leave the others out")
    return flat.leaves


def _of(schema: Mapping[Any, Any], key: str, where: str) -> Mapping[str, Any]:
    found = schema.get(key, {})
    if not isinstance(found, dict):
        raise BadSchema(f"{where}/{key} is {json.dumps(found)[:40]}, not an object; correct it")
    return found
