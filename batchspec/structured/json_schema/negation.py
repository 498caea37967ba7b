"""The negation of a schema, as a schema: of the values that do not fit, those that can be written.

A value does not fit if it fails one keyword; each keyword whose failure can be written is one alternative. Values that fail only
other keywords are one more alternative (NOT_FIT), of which only listed values are written. No value fails a keyword that the
declared draft does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from batchspec.structured.json_schema.document import Document
from batchspec.structured.json_schema.leaves import (
    KEYWORDS,
    NOT_ANY,
    NOT_FIT,
    NOT_PATTERNS,
    NOT_THERE,
    NOT_TYPES,
    NOT_VALUES,
    SOME_KEY,
    check_built,
    list_of,
    names_of,
)

MAX_ALTERNATIVES = 30
"""Maximum number of alternatives of one negation; further ones are left out."""
MAX_NESTED_VALUES = 3
"""Maximum number of listed objects and arrays that are told from other values by their parts."""
_SIZES = {
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1), "maxProperties": ("object", "minProperties", 1),
}
_BOUNDS = {
    "minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum",
}
_BESIDE = {"then", "else", "minContains", "maxContains"}
"""Keywords that say nothing alone."""
Schema = Mapping[Any, Any]


class Negation:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._inside: list[int] = []

    def of(self, where: str, schema: Any) -> Any:
        """A schema, the same object each time, whose values are those that do not fit `schema`; None: none is built."""
        if isinstance(schema, bool):
            return not schema
        return self._document.made(schema, "negation", lambda: self._made(where, schema))

    def _made(self, where: str, schema: Any) -> Any:
        check_built(schema, where)
        if id(schema) in self._inside:
            return None
        self._inside.append(id(schema))
        keys = [key for key in schema if key in KEYWORDS and not self._document.ignores(key, schema)]
        found, left_out = list[Any](), None
        for key in keys:
            for one in self._of_keyword(key, schema, where):
                if one is None or (one is not False and len(found) == MAX_ALTERNATIVES):
                    left_out = left_out or f"{where}/{key}"
                elif one is not False:
                    found.append(one)
        self._inside.pop()
        if left_out is not None:
            if not found:
                return None
            said = f"{left_out}: values that fail it are not written, and no others are left; write what is allowed"
            found.append({NOT_FIT: (said, schema)})
        return {NOT_ANY: found} if len(found) > 1 else found[0] if found else False

    def _of_keyword(self, key: Any, schema: Schema, where: str) -> Iterator[Any]:
        """Schemas whose values together are those that fail a keyword; None stands for some that cannot be written."""
        item = schema[key]
        match key:
            case "$ref":
                yield self.of(str(item), self._document.named(item, where))
            case "type":
                yield {NOT_TYPES: names_of(item, where)}
            case "const":
                yield self._none_of([item], f"{where}/const")
            case "enum" if isinstance(item, list):
                yield self._none_of(item, f"{where}/enum")
            case "not":
                yield item
            case "allOf":
                yield from (self.of(place, part) for place, part in list_of(schema, key, where))
            case "anyOf" | "oneOf":
                parts = list_of(schema, key, where)
                yield self._each([self.of(place, part) for place, part in parts])
                if key == "oneOf":
                    yield from ({"allOf": [one, other]} for (_, one), (_, other) in combinations(parts, 2))
            case "if":
                yield self._each([schema["if"], self.of(f"{where}/then", schema.get("then", True))])
                other = self.of(f"{where}/else", schema.get("else", True))
                yield False if other is False else self._each([self.of(f"{where}/if", schema["if"]), other])
            case _ if key in _SIZES or key in _BOUNDS:
                yield self._of_limit(key, schema)
            case "pattern" if isinstance(item, str):
                yield {"type": "string", NOT_PATTERNS: [item]}
            case "required" | "properties" | "additionalProperties" | "patternProperties" | "propertyNames":
                yield from self._of_object(key, schema, where)
            case "dependentRequired" | "dependentSchemas" | "dependencies" if isinstance(item, dict):
                yield from self._of_dependencies(item, f"{where}/{key}")
            case "items" | "prefixItems" | "contains":
                yield from self._of_array(key, schema, where)
            case "uniqueItems" if item is False:
                return
            case _ if key not in _BESIDE:
                yield None

    def _each(self, schemas: list[Any]) -> Any:
        """The values that fit all of the schemas, which are negations or not; None if one could not be built."""
        if any(one is False for one in schemas):
            return False
        return None if any(one is None for one in schemas) else {"allOf": schemas}

    def _none_of(self, values: list[Any], place: str) -> Any:
        """Values other than these. Objects and arrays are compared part by part, unless there are many of them."""
        nested = [value for value in values if isinstance(value, dict | list)]
        if len(nested) > MAX_NESTED_VALUES:
            return {NOT_VALUES: values}
        plain = {NOT_VALUES: [value for value in values if not isinstance(value, dict | list)]}
        return self._each([plain, *(self.of(place, self._only(value)) for value in nested)])

    def _only(self, value: Any) -> Any:
        """A schema for one value, by keywords that the declared draft has."""
        if isinstance(value, dict):
            inner = {name: self._only(one) for name, one in value.items()}
            return {"type": "object", "required": list(value), "properties": inner, "additionalProperties": False}
        if isinstance(value, list):
            first = "items" if "prefixItems" in self._document.ignored else "prefixItems"
            return {"type": "array", first: [self._only(one) for one in value], "minItems": len(value), "maxItems": len(value)}
        return {"enum": [value]}

    def _of_limit(self, key: str, schema: Schema) -> Any:
        item = schema[key]
        if not isinstance(item, int | float) or isinstance(item, bool):
            return False if isinstance(item, bool) else None
        if key in _SIZES:
            kind, other, more = _SIZES[key]
            return {"type": kind, other: int(item) + more} if item + more >= 0 and item == int(item) else False
        is_open = schema.get(f"exclusive{key.capitalize()}") is True  # of draft-04
        other = {"minimum": "maximum", "maximum": "minimum"}[key] if is_open else _BOUNDS[key]
        return {"type": "number", other: item}

    def _of_object(self, key: str, schema: Schema, where: str) -> Iterator[Any]:
        item, place = schema[key], f"{where}/{key}"
        if key == "required" and isinstance(item, list):
            yield from ({"type": "object", NOT_THERE: [name]} for name in item)
        elif key == "additionalProperties":
            names, patterns = list(schema.get("properties", ())), list(schema.get("patternProperties", ()))
            yield self._some_key({NOT_VALUES: names, NOT_PATTERNS: patterns}, self.of(place, item))
        elif key == "propertyNames":
            yield self._some_key(self.of(place, item), True)
        elif not isinstance(item, dict):
            yield None
        elif key == "patternProperties":
            yield from (self._some_key({"pattern": name}, self.of(f"{place}/{name}", inner)) for name, inner in item.items())
        else:
            negated = ((name, self.of(f"{place}/{name}", inner)) for name, inner in item.items())
            for name, inner in negated:
                yield inner if inner in (None, False) else {"type": "object", "required": [name], "properties": {name: inner}}

    def _some_key(self, name: Any, value: Any) -> Any:
        """Objects with a property whose name and value fit these schemas."""
        if name is False or value is False:
            return False
        return None if name is None or value is None else {"type": "object", SOME_KEY: (name, value)}

    def _of_dependencies(self, item: Mapping[str, Any], place: str) -> Iterator[Any]:
        for name, needed in item.items():
            there = {"type": "object", "required": [name]}
            if isinstance(needed, list):
                yield from (there | {NOT_THERE: [one]} for one in needed)
            else:
                yield self._each([there, self.of(f"{place}/{name}", needed)])

    def _of_array(self, key: str, schema: Schema, where: str) -> Iterator[Any]:
        item, place = schema[key], f"{where}/{key}"
        if key == "contains":
            names = {"minContains", "maxContains"} & schema.keys() - self._document.ignored
            counts = {name: schema[name] for name in names}
            inner = self.of(place, item) if counts in ({}, {"minContains": 1}) else None
            yield False if counts == {"minContains": 0} else None if inner is None else {"type": "array", "items": inner}
        elif isinstance(item, list):
            for i, one in enumerate(item):
                inner = self.of(f"{place}/{i}", one)
                elements = [True] * i + [inner]
                yield inner if inner in (None, False) else {"type": "array", "prefixItems": elements, "minItems": i + 1}
        else:
            inner = self.of(place, item)
            first = schema.get("prefixItems") and "prefixItems" not in self._document.ignored
            yield inner if inner in (None, False) else None if first else {"type": "array", "contains": inner}
