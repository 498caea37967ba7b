"""anyOf, oneOf, not, if and dependencies as alternatives: a value satisfies the keyword if it satisfies one alternative.

An alternative is a list of schemas; a value satisfies it if it satisfies all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from batchspec.structured.json_schema.apart import Apart
from batchspec.structured.json_schema.document import Document
from batchspec.structured.json_schema.leaves import (
    NOT_ANY,
    NOT_FIT,
    NOT_THERE,
    SOME_KEY,
    BadSchema,
    Leaf,
    Parts,
    list_of,
    listed_values,
    types_of,
    written_types,
)
from batchspec.structured.json_schema.negation import Negation
from batchspec.structured.json_schema.objects import NAME_KEYWORDS, named_keys
from batchspec.structured.json_schema.validity import fits, same

DEPENDING = ("dependentRequired", "dependentSchemas", "dependencies")
COMBINING: tuple[Any, ...] = ("anyOf", NOT_ANY, "oneOf", "not", "if", *DEPENDING, SOME_KEY)
"""Keywords with alternatives, in the order in which they are replaced: the names for SOME_KEY are known at the end."""
MAX_TRIGGERS = 6
"""Maximum number of properties with dependencies; further ones are not written unless they are required."""


class Alternatives:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._apart, self._negation = Apart(document), Negation(document)

    def of(self, leaf: Leaf, key: Any, others: Sequence[Leaf]) -> tuple[Mapping[Any, Any], list[Parts]]:
        """The leaf without the keyword, and the alternatives that replace it. others: leaves that hold too. Raises BadSchema."""
        where, schema = leaf
        if key == "if":
            return self._document.without(schema, "if", "then", "else"), self._if(leaf)
        if key in DEPENDING:
            return self._dependent(leaf, key, others)
        rest = self._document.without(schema, key)
        if key == SOME_KEY:
            return rest, self._some_key(leaf, others)
        if key in ("anyOf", NOT_ANY):
            return rest, [[part] for part in list_of(schema, key, where)]
        if key == "oneOf":
            return rest, self._one_of(leaf, [*others, Leaf(where, rest)])
        if any(listed_values(one.schema) is not None for one in (leaf, *others)):
            return rest, [[(where, self._document.made(schema, NOT_FIT, lambda: {NOT_FIT: ("", schema["not"])}))]]
        refused = f"{where}/not: what it leaves out is not supported; leave it out, or write what is allowed"
        return rest, [[self._negated((f"{where}/not", schema["not"]), refused)]]

    def _one_of(self, leaf: Leaf, context: Sequence[Leaf]) -> list[Parts]:
        """Each part, without the values of the others that could fit it."""
        parts, alternatives, hopeless = list_of(leaf.schema, "oneOf", leaf.where), list[Parts](), list[str]()
        for i, part in enumerate(parts):
            if part[1] is False:
                continue
            overlapping, count = list[int](), -1
            while count < len(overlapping):  # excluding one part may bring keys and types of others into play
                count, also = len(overlapping), [parts[j] for j in overlapping]
                overlapping += [
                    j
                    for j, other in enumerate(parts)
                    if j != i and j not in overlapping and not self._apart.from_part([*context, part], other, also)
                ]
            alternative = [part]
            for j in overlapping:
                said = f"{leaf.where}/oneOf: one value could fit part {min(i, j)} and part {max(i, j)}"
                alternative.append(self._negated(parts[j], f"{said}; use anyOf, or give each a type or a const of its own"))
            alternatives.append(alternative)
            flat = self._document.flat([*context, *alternative])
            if overlapping and (flat is None or is_hopeless(flat.leaves)):
                hopeless.append(said)
        if alternatives and len(hopeless) == len(alternatives):
            raise BadSchema(f"{hopeless[0]}, and none fits one alone; use anyOf")
        return alternatives

    def _if(self, leaf: Leaf) -> list[Parts]:
        """If the negation of the condition is not supported, only values that fit the condition are written."""
        where, schema = leaf
        place, condition = f"{where}/if", schema["if"]
        found = self._negation.of(place, condition)
        if found is None:
            said = f"{place}: values that fail it are not written, and no others are left; write it another way"
            found = self._document.made(schema, (NOT_FIT, "if"), lambda: {NOT_FIT: (said, condition)})
        then, other = (f"{where}/then", schema.get("then", True)), (f"{where}/else", schema.get("else", True))
        return [[(place, condition), then], [(place, found), other]]

    def _dependent(self, leaf: Leaf, key: str, others: Sequence[Leaf]) -> tuple[Mapping[Any, Any], list[Parts]]:
        """Objects and other values; then by the first property with dependencies: it is absent, or present and they hold."""
        where, schema = leaf
        if not isinstance(schema[key], dict):
            raise BadSchema(f"{where}/{key} must be an object; correct it")
        made, without = self._document.made, self._document.without(schema, key)
        if not schema[key]:
            return without, [[]]
        types, is_said = written_types([leaf, *others]), any("type" in one.schema for one in (leaf, *others))
        if types != ["object"] or not is_said:
            parts = made(schema, (key, *types), lambda: _by_type(types, key, leaf, is_said))
            return without, [[(where, one)] for one in parts]
        (name, needed), *more = schema[key].items()
        rest = made(schema, (key, "rest"), lambda: {**without, key: dict(more)} if more else without)
        absent = made(schema, (key, "absent"), lambda: {NOT_THERE: [name]})
        names = [name, *needed] if isinstance(needed, list) else [name]
        present = made(schema, (key, "present"), lambda: {"required": names})
        brought = [] if isinstance(needed, list) else [(f"{where}/{key}/{name}", needed)]
        if len(more) < MAX_TRIGGERS or name in named_keys([leaf, *others])[1]:
            return rest, [[(where, absent)], [(where, present), *brought]]
        said = f"{where}/{key}: of optional properties with dependencies only the last {MAX_TRIGGERS} are written; require others"
        left_out = made(schema, (key, NOT_FIT), lambda: {NOT_FIT: (said, {"not": schema})})
        return rest, [[(where, absent)], [(where, left_out)]]

    def _some_key(self, leaf: Leaf, others: Sequence[Leaf]) -> list[Parts]:
        """One of the named properties has such a name and value; if none is named, all properties have."""
        where, (name, value) = leaf.where, leaf.schema[SOME_KEY]
        made, named = self._document.made, named_keys([*others, leaf])[0]
        found = [
            made(leaf.schema, (SOME_KEY, key), partial(dict, required=[key], properties={key: value}))
            for key in named
            if self._surely_fits(key, where, name)
        ]
        if not named and isinstance(name, dict) and name.keys() <= NAME_KEYWORDS:
            every = {"type": "object", "minProperties": 1, "propertyNames": name, "additionalProperties": value}
            found.append(made(leaf.schema, SOME_KEY, lambda: every))
        said = f"{where}: values that fail it by a property that is not named are not written; name one"
        found.append(made(leaf.schema, NOT_FIT, lambda: {NOT_FIT: (said, True)}))
        return [[(where, one)] for one in found]

    def _surely_fits(self, value: Any, where: str, schema: Any) -> bool:
        try:
            return fits(value, where, schema, self._document)
        except BadSchema:
            return False

    def _negated(self, part: tuple[str, Any], refused: str) -> tuple[str, Any]:
        found = self._negation.of(*part)
        if found is None:
            raise BadSchema(refused)
        return part[0], found


def _by_type(types: Sequence[str], key: str, leaf: Leaf, is_said: bool) -> list[Any]:
    """Schemas for objects with the keyword, for values of the other types that are written, and for those that are not."""
    found: list[Any] = [{"type": "object", key: leaf.schema[key]}] if "object" in types else []
    others = [name for name in types if name != "object"]
    found += [{"type": others}] if others else []
    return found if is_said else [*found, {NOT_FIT: (without_type(leaf.where, types), {"type": types})}]


def without_type(where: str, types: Sequence[str]) -> str:
    """What is said of values that are not written because no type is named."""
    written = f"only {' or '.join(types)} is written" if types else "only the types of its keywords are written"
    return f"{where}/type: without it {written}, and none fits; name the types that may occur"


def is_hopeless(leaves: Sequence[Leaf]) -> bool:
    """Whether no value fits all leaves, as far as types and required properties show it."""
    if types_of(leaves) == []:
        return True
    required = {
        name
        for _, schema in leaves
        if isinstance(schema.get("required"), list)
        for name in schema["required"]
        if isinstance(name, str)
    }
    for name in required:
        inner: list[Any] = [
            Leaf(where, schema["properties"][name])
            for where, schema in leaves
            if isinstance(schema.get("properties"), dict) and name in schema["properties"]
        ]
        if any(one.schema is False for one in inner) or any(name in schema.get(NOT_THERE, ()) for _, schema in leaves):
            return types_of(leaves) == ["object"]
        inner = [one for one in inner if isinstance(one.schema, dict)]
        if len(inner) > 1 and types_of(leaves) == ["object"] and (types_of(inner) == [] or _no_value(inner)):
            return True
    return False


def _no_value(leaves: Sequence[Leaf]) -> bool:
    """Whether their lists of values have no value in common."""
    lists = [values for _, schema in leaves if (values := listed_values(schema)) is not None]
    return len(lists) > 1 and not any(all(any(same(value, one) for one in other) for other in lists[1:]) for value in lists[0])
