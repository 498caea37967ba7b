"""JSON Schema as nodes of `structured/regular.py`: every text that is written is valid; not every valid text can be written.

It is narrower than the standard: properties come in the schema's order; there are no others, unless the schema names none or
gives patterns of keys; one space may follow a colon or a comma, and no other white space is written; whole numbers have
at most 15 digits, and so do fractions; a value without a type is nested at most MAX_DEPTH levels deep. A schema that refers to
itself may be nested to any depth. If no type is named, values of those types are written that the keywords are about. A keyword
of the standard that could make a written text invalid and is not supported is refused by its name. Annotations and unknown
keywords, names of formats included, are ignored, as validators do.
Source: https://json-schema.org/draft/2020-12, and draft-04 to draft-07 where they differ.

Where that is narrower, a `LeftOut` node says so if nothing is written. So a schema is impossible only if it is proved that no
value is valid; it is refused if values are valid and none can be written (`emptiness.py`).

Schemas that hold at once are not merged: the values of all their leaves are built (`leaves.py`). A leaf with anyOf, oneOf,
not, if or dependencies is replaced by alternatives. An alternative is a list of schemas, and a value must satisfy all of them
(`alternatives.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchspec.structured.emptiness import Texts, texts_of
from batchspec.structured.json_schema.alternatives import COMBINING, Alternatives, is_hopeless, without_type
from batchspec.structured.json_schema.arrays import array_node
from batchspec.structured.json_schema.document import MAX_INSIDE, Document, Flat
from batchspec.structured.json_schema.leaves import (
    NOT_ANY,
    NOT_FIT,
    NOT_VALUES,
    BadSchema,
    Leaf,
    Parts,
    listed_values,
    written_types,
)
from batchspec.structured.json_schema.numbers import number_node
from batchspec.structured.json_schema.objects import object_node
from batchspec.structured.json_schema.strings import string_node
from batchspec.structured.json_schema.validity import fits, is_of
from batchspec.structured.json_schema.values import MAX_DEPTH, any_value, literal
from batchspec.structured.regular import NOTHING, Alt, Impossible, LeftOut, Node, Ref, TooLarge, text
from batchspec.structured.rules import Rules

MAX_ALTERNATIVES = 20_000
"""Maximum number of combinations of the alternatives of leaves that hold at once, in the whole schema."""

WRONG_TYPES = (TypeError, AttributeError, LookupError, ArithmeticError, ValueError)
"""The exceptions that a keyword causes if its value has a wrong type that no check has refused."""


def schema_rules(schema: Any) -> Rules:
    """The JSON texts of a schema. Raises BadSchema for one that is not valid or has a keyword that is not supported;
    Impossible if it is proved that no value is valid; TooLarge.
    """
    reader = _Reader(schema)
    try:
        rules = Rules(reader.value([("", schema)]), reader.rules)
        found, said = texts_of(rules)
        if found is Texts.SOME:
            return rules
        said = said or _of_some_validators(reader.document)
        raise BadSchema(said) if said else Impossible("no text matches")
    except (BadSchema, TooLarge, Impossible):
        raise
    except WRONG_TYPES as error:
        raise BadSchema(f"a keyword of the schema has a value of a wrong type ({error}); correct it") from error


def _of_some_validators(document: Document) -> str:
    """Where values were left out that only some validators accept, and what to do; empty if nowhere."""
    if document.disagreed is not None:
        return f"{document.disagreed}: a listed value is valid only for validators that ignore its format or draft; correct it"
    place = document.of_no_draft
    return "" if place is None else f"{place}: it is obeyed though the declared draft has none, and no value fits; take it out"


class _Reader:
    """Implements `Reading`."""

    def __init__(self, root: Any) -> None:
        self.document = Document(root)
        self._alternatives = Alternatives(self.document)
        self._num_alternatives = 0
        self.rules: dict[str, Node] = {}
        """The schemas that references name: a finite automaton inlines them, a lazy one has each once."""
        self._names: dict[frozenset[int], str] = {}
        """Names of rules by their leaves, including rules that are being built."""
        self._num_inside = 0
        self._opened: list[str] = []
        """Rules that are being built, since the last object or array was entered."""

    def value(self, parts: Parts) -> Node:
        """The values that fit all of these schemas, inside of an object or an array. Raises BadSchema and TooLarge."""
        opened, self._opened = self._opened, []
        try:
            return self._value(parts)
        finally:
            self._opened = opened

    def _value(self, parts: Parts) -> Node:
        flat = self.document.flat(parts)
        if flat is None:
            return NOTHING
        if not flat.leaves:
            return any_value(MAX_DEPTH)
        return self._built(flat.leaves) if flat.named is None else self._of_reference(flat, flat.named)

    def _of_reference(self, flat: Flat, target: str) -> Node:
        name = self._names.get(flat.key)
        if name in self._opened:
            said = f"{flat.leaves[0].where}/$ref={target}: it leads back to itself, so that validators would not end; take it out"
            return LeftOut((), said)
        if name is None:
            if self._num_inside > MAX_INSIDE:
                where = flat.leaves[0].where
                raise BadSchema(f"{where}/$ref={target}: references are nested more than {MAX_INSIDE} deep; write them flat")
            name = self._names[flat.key] = f"{target} {len(self._names)}"
            self._num_inside += 1
            self._opened.append(name)
            try:
                self.rules[name] = self._built(flat.leaves)
            except BadSchema as error:  # which may leave out only an alternative, and rules that name this one stay
                self.rules[name] = LeftOut((), str(error))
                raise
            finally:
                self._opened.pop()
                self._num_inside -= 1
        return Ref(name)

    def _built(self, leaves: Sequence[Leaf]) -> Node:
        if is_hopeless(leaves):
            return NOTHING
        lists = any(listed_values(leaf.schema) is not None for leaf in leaves)
        keys = COMBINING[:-1] if lists else COMBINING
        combining = next(((i, key) for key in keys for i, leaf in enumerate(leaves) if key in leaf.schema), None)
        if combining is not None:
            return self._combined(leaves, *combining)
        if any("const" in leaf.schema or "enum" in leaf.schema for leaf in leaves):
            return self._listed(leaves)
        not_fit = next((schema[NOT_FIT] for _, schema in leaves if NOT_FIT in schema), None)
        if not_fit is not None:
            return LeftOut((), not_fit[0])
        types = written_types(leaves)
        found = [self._typed(name, leaves) for name in types]
        if not any("type" in leaf.schema for leaf in leaves):
            found.append(LeftOut((), without_type(leaves[0].where, types)))
        return Alt(tuple(found))

    def _combined(self, leaves: Sequence[Leaf], number: int, key: Any) -> Node:
        leaf, before, after = leaves[number], leaves[:number], leaves[number + 1 :]
        rest, alternatives = self._alternatives.of(leaf, key, [*before, *after])
        self._num_alternatives += len(alternatives)
        if self._num_alternatives > MAX_ALTERNATIVES:
            raise BadSchema(
                f"{leaf.where}/{key}: its parts and those of other keywords combine to more than {MAX_ALTERNATIVES:,}; "
                "simplify it"
            )
        found = list[Node]()
        for alternative in alternatives:
            try:
                found.append(self._value([*before, (leaf.where, rest), *alternative, *after]))
            except BadSchema as error:
                if key != NOT_ANY:
                    raise
                found.append(LeftOut((), str(error)))
        return Alt(tuple(found))

    def _listed(self, leaves: Sequence[Leaf]) -> Node:
        where, schema = next(leaf for leaf in leaves if "const" in leaf.schema or "enum" in leaf.schema)
        values = listed_values(schema)
        if values is None:
            raise BadSchema(f"{where}/enum must be a list; correct it")
        return Alt(tuple(literal(value) for value in values if all(fits(value, *leaf, self.document) for leaf in leaves)))

    def _typed(self, name: str, leaves: Sequence[Leaf]) -> Node:
        values = [value for leaf in leaves for value in leaf.schema.get(NOT_VALUES, ()) if is_of(value, name, self.document)]
        match name:
            case "object" | "array" if values:
                raise BadSchema(f"{leaves[0].where}/not with listed objects or arrays is not supported; leave them out")
            case "object":
                return object_node(leaves, self)
            case "array":
                return array_node(leaves, self)
            case "string":
                return string_node(leaves)
            case "number" | "integer":
                return number_node(name, leaves)
            case "boolean":
                return Alt(tuple(literal(value) for value in (True, False) if value not in values))
        return text("null") if not values else NOTHING
