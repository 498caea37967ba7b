"""The negation of a schema as a schema: it describes some of the values that do not fit, those that can be written.

A value does not fit if it fails one keyword; each keyword whose failure can be written is one alternative. Other keywords are
left out: fewer values are written then, all of them right. No value fails a keyword that the declared draft does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from batchspec.structured.json_schema.leaves import (
    KEYWORDS,
    NOT_PATTERNS,
    NOT_THERE,
    NOT_TYPES,
    NOT_VALUES,
    Document,
    check_built,
    list_of,
    names_of,
)

MAX_ALTERNATIVES = 30
"""Maximum number of alternatives of one negation; further ones are left out."""
_SIZES = {
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1), "maxProperties": ("object", "minProperties", 1),
}  # fmt: skip
_BOUNDS = {
    "minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum",
}  # fmt: skip
Schema = Mapping[Any, Any]


class Negation:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._inside: list[int] = []

    def of(self, where: str, schema: Any) -> Any:
        """A schema, the same object each time, all of whose values are not valid by `schema`; None: none is built."""
        if isinstance(schema, bool):
            return not schema
        return self._document.made(schema, "negation", lambda: self._made(where, schema))

    def _made(self, where: str, schema: Any) -> Any:
        alternatives = self._alternatives(where, schema)
        if alternatives is None:
            return None
        return {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0] if alternatives else False

    def _alternatives(self, where: str, schema: Any) -> list[Any] | None:
        if isinstance(schema, bool):
            return [] if schema else [True]
        check_built(schema, where)
        if id(schema) in self._inside:
            return None
        self._inside.append(id(schema))
        only_ref = "$ref" in schema and self._document.is_old
        keys = [
            key for key in schema if key in KEYWORDS and key not in self._document.ignored and (key == "$ref" or not only_ref)
        ]
        found = [one for key in keys for one in self._of_keyword(key, schema, where)]
        self._inside.pop()
        return found[:MAX_ALTERNATIVES] if found or not keys else None

    def _of_keyword(self, key: Any, schema: Schema, where: str) -> Iterable[Any]:
        item = schema[key]
        match key:
            case "$ref":
                return self._alternatives(where, self._document.named(item, where)) or []
            case "type":
                return [{NOT_TYPES: names_of(item, where)}]
            case "const":
                return [{NOT_VALUES: [item]}]
            case "enum" if isinstance(item, list):
                return [{NOT_VALUES: item}]
            case "required" if isinstance(item, list):
                return [{"type": "object", NOT_THERE: [name]} for name in item]
            case "properties" if isinstance(item, dict):
                return [
                    {"type": "object", "required": [name], "properties": {name: one}}
                    for name, inner in item.items()
                    for one in self._alternatives(f"{where}/properties/{name}", inner) or []
                ]
            case "pattern" if isinstance(item, str):
                return [{"type": "string", NOT_PATTERNS: [item]}]
            case "items" if isinstance(item, dict) and "prefixItems" not in schema:
                return [{"type": "array", "contains": one} for one in self._alternatives(f"{where}/items", item) or []]
            case "not":
                return [item]
            case "allOf":
                return [one for place, part in list_of(schema, key, where) for one in self._alternatives(place, part) or []]
            case "anyOf" | "oneOf":  # of oneOf those that fit no part
                parts = [self.of(place, part) for place, part in list_of(schema, key, where)]
                return [] if any(part is None for part in parts) else [{"allOf": parts}]
            case "if":
                return self._of_if(schema, where)
        if key in _SIZES and isinstance(item, int | float) and not isinstance(item, bool):
            kind, other, more = _SIZES[key]
            return [{"type": kind, other: int(item) + more}] if item + more >= 0 and item == int(item) else []
        if key in _BOUNDS and isinstance(item, int | float) and not isinstance(item, bool):
            is_open = schema.get(f"exclusive{key.capitalize()}") is True  # of draft-04
            other = {"minimum": "maximum", "maximum": "minimum"}[key] if is_open else _BOUNDS[key]
            return [{"type": "number", other: item}]
        return []

    def _of_if(self, schema: Schema, where: str) -> list[Any]:
        """Values that fit the condition and not `then`, or neither the condition nor `else`."""
        then, condition = self.of(f"{where}/then", schema.get("then", True)), self.of(f"{where}/if", schema["if"])
        other = self.of(f"{where}/else", schema.get("else", True))
        found = [] if then is None else [{"allOf": [schema["if"], then]}]
        return found if condition is None or other is None else [*found, {"allOf": [condition, other]}]
