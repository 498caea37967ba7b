"""anyOf, oneOf, not, if and dependencies as alternatives: a value satisfies the keyword if it satisfies one alternative.

An alternative is a list of schemas; a value satisfies it if it satisfies all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchspec.structured.json_schema.apart import Apart
from batchspec.structured.json_schema.leaves import NOT_THERE, BadSchema, Document, Leaf, Parts, list_of, listed_values, types_of
from batchspec.structured.json_schema.negation import Negation
from batchspec.structured.json_schema.validity import same

COMBINING = ("anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies")
MAX_TRIGGERS = 6
"""Maximum number of properties with dependencies; further ones are not written unless they are required."""


class Alternatives:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._apart, self._negation = Apart(document), Negation(document)

    def of(self, leaf: Leaf, key: str, others: Sequence[Leaf]) -> tuple[Mapping[Any, Any], list[Parts]]:
        """The leaf without the keyword, and the alternatives that replace it. others: leaves that hold too. Raises BadSchema."""
        where, schema = leaf
        if key == "if":
            return self._document.without(schema, "if", "then", "else"), self._if(leaf)
        if key in ("dependentRequired", "dependentSchemas", "dependencies"):
            return self._dependent(leaf, key)
        rest = self._document.without(schema, key)
        if key == "anyOf":
            return rest, [[part] for part in list_of(schema, key, where)]
        if key == "oneOf":
            return rest, self._one_of(leaf, [*others, Leaf(where, rest)])
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
        condition = (f"{where}/if", schema["if"])
        found = self._negation.of(*condition)
        then: Parts = [condition, (f"{where}/then", schema.get("then", True))]
        return [then] if found is None else [then, [(f"{where}/if", found), (f"{where}/else", schema.get("else", True))]]

    def _dependent(self, leaf: Leaf, key: str) -> tuple[Mapping[Any, Any], list[Parts]]:
        """Alternatives by the first property with dependencies: it is absent, or it is present and its dependencies hold."""
        where, schema = leaf
        if not isinstance(schema[key], dict):
            raise BadSchema(f"{where}/{key} must be an object; correct it")
        (name, needed), *others = schema[key].items() if schema[key] else [("", [])]
        made = self._document.made

        def without_first() -> dict[Any, Any]:
            rest = {one: item for one, item in schema.items() if one != key}
            return {**rest, key: dict(others)} if others else rest

        rest = made(schema, (key, "rest"), without_first)
        if not schema[key]:
            return rest, [[]]
        absent = made(schema, (key, "absent"), lambda: {"type": "object", NOT_THERE: [name]})
        names = [name, *needed] if isinstance(needed, list) else [name]
        present = made(schema, (key, "present"), lambda: {"type": "object", "required": names})
        brought = [] if isinstance(needed, list) else [(f"{where}/{key}/{name}", needed)]
        alternatives: list[Parts] = [[(where, present), *brought]]
        if name not in schema.get("required", ()):
            alternatives = [[(where, absent)], *(alternatives if len(others) < MAX_TRIGGERS else [])]
        return rest, alternatives

    def _negated(self, part: tuple[str, Any], refused: str) -> tuple[str, Any]:
        found = self._negation.of(*part)
        if found is None:
            raise BadSchema(refused)
        return part[0], found


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
