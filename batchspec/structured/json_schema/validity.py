"""Whether a value is valid by a schema, as JSON Schema says: for values that a schema lists, and for proofs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from batchspec.console.text import quoted
from batchspec.structured.json_schema.document import Document
from batchspec.structured.json_schema.formats import FORMATS
from batchspec.structured.json_schema.leaves import (
    NOT_ANY,
    NOT_FIT,
    NOT_PATTERNS,
    NOT_THERE,
    NOT_TYPES,
    NOT_VALUES,
    SOME_KEY,
    BadSchema,
    check_built,
    names_of,
)

MAX_NESTED = 100


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def is_of(value: Any, name: str, of: Document) -> bool:
    """Whether a JSON value is of this type by the declared draft."""
    if name == "integer" and of.is_first and isinstance(value, float):
        return False
    if name in ("number", "integer"):
        return not isinstance(value, bool) and isinstance(value, int | float) and (name == "number" or value % 1 == 0)
    kind = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}.get(name)
    return kind is not None and isinstance(value, kind)


def found_in(pattern: Any, where: str, value: str) -> tuple[bool, bool]:
    """Whether a pattern matches somewhere in a text: surely, and possibly. Raises BadSchema for an invalid pattern."""
    try:
        found = [re.search(pattern, value, flags) is not None for flags in (0, re.ASCII)]
        strict = re.search(re.sub(r"\$$", r"\\Z", pattern), value) is not None
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise BadSchema(f"{where}: {pattern!r} is not a regular expression ({error})") from None
    return all(found) and strict, any(found)


def fits(value: Any, where: str, schema: Any, of: Document, *, proof: bool = False) -> bool:
    """Whether the value is valid, for all validators.

    proof  for validators that obey only the keywords of the declared draft, and check no formats
    Raises BadSchema for keywords that are not supported, and if validators may disagree on a pattern.
    """
    try:
        if not _fits(value, where, schema, of, True, 0):
            return False
        if not proof and of.has_readings and not _fits(value, where, schema, of, False, 0):
            of.disagreed = of.disagreed or where
            return False
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise BadSchema(f"{where}: a keyword has a value of a wrong type ({error}); correct it") from None
    return True


def _fits(value: Any, where: str, schema: Any, of: Document, proof: bool, depth: int) -> bool:
    if isinstance(schema, bool):
        return schema
    check_built(schema, where)
    if depth > MAX_NESTED:
        raise BadSchema(f"{where}: a listed value is compared with schemas nested more than {MAX_NESTED} levels deep")
    check = _Check(value, where, of, proof, depth + 1)
    return all(check.keyword(key, item, schema) for key, item in schema.items() if not (proof and of.ignores(key, schema)))


class _Check:
    def __init__(self, value: Any, where: str, of: Document, proof: bool, depth: int) -> None:
        self._value, self._where, self._of, self._proof, self._depth = value, where, of, proof, depth

    def _fits(self, value: Any, schema: Any) -> bool:
        return _fits(value, self._where, schema, self._of, self._proof, self._depth)

    def keyword(self, key: Any, item: Any, schema: Mapping[Any, Any]) -> bool:
        value = self._value
        match key:
            case "$ref":
                return self._fits(value, self._of.named(item, self._where))
            case "allOf":
                return all(self._fits(value, one) for one in item)
            case "anyOf":
                return any(self._fits(value, one) for one in item)
            case "oneOf":
                return sum(self._fits(value, one) for one in item) == 1
            case "not":
                return not self._fits(value, item)
            case "if":
                return self._fits(value, schema.get("then" if self._fits(value, item) else "else", True))
            case "const":
                return same(value, item)
            case "enum":
                return any(same(value, one) for one in item)
            case "type":
                return any(is_of(value, one, self._of) for one in names_of(item, self._where))
        if key == NOT_TYPES:
            return not any(is_of(value, one, self._of) for one in item)
        if key == NOT_VALUES:
            return not any(same(value, one) for one in item)
        if key == NOT_ANY:
            return any(self._fits(value, one) for one in item)
        if key == NOT_FIT:
            return not self._fits(value, item[1])
        if key == SOME_KEY:
            return isinstance(value, dict) and any(
                self._fits(name, item[0]) and self._fits(inner, item[1]) for name, inner in value.items()
            )
        if key == NOT_THERE:
            return not isinstance(value, dict) or not any(name in value for name in item)
        if key == NOT_PATTERNS:
            return not isinstance(value, str) or not any(found_in(one, self._where, value)[1] for one in item)
        if isinstance(value, str):
            return self._string(value, key, item)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _number(value, key, item, schema)
        if isinstance(value, list):
            return self._array(value, key, item, schema)
        return self._object(value, key, item, schema) if isinstance(value, dict) else True

    def _string(self, value: str, key: Any, item: Any) -> bool:
        match key:
            case "minLength":
                return bool(len(value) >= item)
            case "maxLength":
                return bool(len(value) <= item)
            case "pattern":
                return self._matches(item, value)
            case "format":
                return self._proof or item not in FORMATS or re.fullmatch(FORMATS[item], value) is not None
        return True

    def _matches(self, pattern: str, value: str) -> bool:
        sure, possible = found_in(pattern, f"{self._where}/pattern", value)
        if sure != possible:
            raise BadSchema(f"{self._where}/pattern: validators disagree on whether {pattern!r} matches {quoted(value)}")
        return sure

    def _array(self, value: list[Any], key: Any, item: Any, schema: Mapping[Any, Any]) -> bool:
        first = [] if "prefixItems" in self._of.ignored else schema.get("prefixItems", [])
        old = isinstance(schema.get("items"), list)
        match key:
            case "minItems":
                return bool(len(value) >= item)
            case "maxItems":
                return bool(len(value) <= item)
            case "uniqueItems":
                return not item or not any(same(a, b) for i, a in enumerate(value) for b in value[:i])
            case "prefixItems":
                return all(map(self._fits, value, item))
            case "items" if old:
                return all(map(self._fits, value, item))
            case "items":
                return all(self._fits(one, item) for one in value[len(first) :])
            case "additionalItems" if old:
                return all(self._fits(one, item) for one in value[len(schema["items"]) :])
            case "contains":
                count = sum(self._fits(one, item) for one in value)
                least, most = schema.get("minContains", 1), schema.get("maxContains", len(value))
                if "minContains" in self._of.ignored:
                    least, most = (1, len(value)) if self._proof else (max(1, least), most)
                return bool(least <= count <= most)
        return True

    def _object(self, value: dict[str, Any], key: Any, item: Any, schema: Mapping[Any, Any]) -> bool:
        match key:
            case "required":
                return all(name in value for name in item)
            case "minProperties":
                return bool(len(value) >= item)
            case "maxProperties":
                return bool(len(value) <= item)
            case "properties":
                return all(self._fits(value[name], one) for name, one in item.items() if name in value)
            case "patternProperties":
                return all(
                    self._fits(one, inner)
                    for pattern, inner in item.items()
                    for name, one in value.items()
                    if self._matches(pattern, name)
                )
            case "additionalProperties":
                named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
                more = [
                    name for name in value if name not in named and not any(self._matches(pattern, name) for pattern in patterns)
                ]
                return all(self._fits(value[name], item) for name in more)
            case "propertyNames":
                return all(self._fits(name, item) for name in value)
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                return all(
                    all(one in value for one in needed) if isinstance(needed, list) else self._fits(value, needed)
                    for name, needed in item.items()
                    if name in value
                )
        return True


def _number(value: float, key: Any, item: Any, schema: Mapping[Any, Any]) -> bool:
    match key:
        case "minimum":
            return bool(value > item if schema.get("exclusiveMinimum") is True else value >= item)
        case "maximum":
            return bool(value < item if schema.get("exclusiveMaximum") is True else value <= item)
        case "exclusiveMinimum":
            return isinstance(item, bool) or value > item
        case "exclusiveMaximum":
            return isinstance(item, bool) or value < item
        case "multipleOf":
            quotient = Fraction(value) / Fraction(item) if isinstance(item, int) else Fraction(value / item)
            return quotient.denominator == 1
    return True
