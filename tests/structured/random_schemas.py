"""Random JSON schemas of nested keywords, and values that may be valid by them, from a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

DRAFTS = (
    "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2019-09/schema",
)
NAMES = ("a", "b", "c", "x-a", "kind")
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
PATTERNS = ("^a", "b$", "^x-", "^[a-c]{1,3}$", "^(?!a)", r"^\w+$", "^a|^b", r"\d", r"^[^\d\w]$", "^.{2}$", "^(kind|c)$")
FORMATS: dict[str, tuple[str, ...]] = {
    "date": ("2024-05-06", "2024-13-01"), "time": ("10:20:30Z", "10:20"), "date-time": ("2024-05-06T10:20:30Z", "2024-05-06"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"), "ipv4": ("1.2.3.4", "1.2.3"),
    "ipv6": ("1:2:3:4:5:6:7:8", "1:2"), "email": ("a@b.cd", "ab"), "hostname": ("ab.c", "-a"), "uri": ("http://a.b/c", "a b"),
    "duration": ("P1D", "1D"), "json-pointer": ("/a/b", "a/b"), "own": ("x",),
}
PLAIN = (None, True, False, 0, 1, 2, 3, -1, 7, 0.5, 1.5, 2.5, -2.0, 0.1, "", "a", "b", "ab", "abc", "c1", "x-a", "é", "-", "zzzz")


class RandomSchemas:
    """Schemas with a draft, or of the newest one without it. A schema's own values guide `values`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def document(self) -> Any:
        """A whole schema, which may refer to two others, and these to each other."""
        rng = self.random
        found = self.schema(rng.choice((1, 2, 2, 3)))
        if isinstance(found, bool):
            return found
        found["$defs"] = {name: self.schema(1) for name in ("d", "e")} if "$ref" in json.dumps(found) else {}
        if not found["$defs"]:
            del found["$defs"]
        if rng.random() < 0.25:
            found = {"$schema": rng.choice(DRAFTS), **found}
        return found

    def schema(self, depth: int, usual: Sequence[str] = ()) -> Any:
        """usual: types that it probably has."""
        rng, kind = self.random, self.random.random()
        if kind < 0.04:
            return rng.random() < 0.5
        if kind < 0.10:
            return {"enum": [self.value(1) for _ in range(rng.randint(1, 4))]}
        if kind < 0.14:
            return {"const": self.value(1)}
        if kind < 0.18:
            return {"$ref": rng.choice(("#/$defs/d", "#/$defs/d", "#/$defs/e", "#"))}
        found: dict[str, Any] = {}
        types = rng.sample(TYPES, rng.choice((1, 1, 1, 2, 2, 3)))
        if depth > 0 and rng.random() < 0.5:
            types[0] = rng.choice(("object", "object", "array"))
        if usual and rng.random() < 0.7:
            types = list(dict.fromkeys([rng.choice(usual), *types[1:]]))
        if rng.random() < 0.75:
            found["type"] = types[0] if len(types) == 1 else types
        for name in types if rng.random() < 0.85 else ():
            found |= self._of_type(name, depth)
        for _ in range(rng.choice((0, 0, 1, 1, 2)) if depth > 0 else 0):
            found |= self._combined(depth - 1, types)
        if rng.random() < 0.1:
            found |= rng.choice(({"enum": [self.value(1) for _ in range(4)]}, {"$ref": "#/$defs/d"}, self._of_type("object", 1)))
        return found

    def _of_type(self, name: str, depth: int) -> dict[str, Any]:
        rng = self.random
        known: dict[str, Callable[[], Any]] = {}

        def inner() -> Any:
            return self.schema(depth - 1) if depth > 0 else rng.choice(({}, True, {"type": "integer"}, {"const": "a"}))

        def some() -> list[str]:
            return rng.sample(NAMES, rng.randint(1, 2))

        match name:
            case "object":
                known = {
                    "properties": lambda: {one: inner() for one in rng.sample(NAMES, rng.randint(1, 4))}, "required": some,
                    "additionalProperties": lambda: False if rng.random() < 0.6 else inner(),
                    "patternProperties": lambda: {rng.choice(PATTERNS): inner() for _ in range(rng.randint(1, 2))},
                    "minProperties": lambda: rng.randint(0, 3), "maxProperties": lambda: rng.randint(0, 3),
                    "propertyNames": lambda: rng.choice(({"pattern": rng.choice(PATTERNS)}, {"maxLength": 1}, {"enum": ["a"]})),
                    "dependentRequired": lambda: {one: some() for one in some()},
                    "dependentSchemas": lambda: {one: inner() for one in some()},
                    "dependencies": lambda: {one: rng.choice((some, inner))() for one in some()},
                }
            case "array":
                known = {
                    "items": inner, "prefixItems": lambda: [inner() for _ in range(rng.randint(1, 2))],
                    "minItems": lambda: rng.randint(0, 3), "maxItems": lambda: rng.randint(0, 3), "contains": inner,
                    "minContains": lambda: rng.randint(0, 2), "uniqueItems": lambda: rng.random() < 0.7,
                }
            case "string":
                known = {
                    "minLength": lambda: rng.randint(0, 3), "maxLength": lambda: rng.randint(0, 4),
                    "pattern": lambda: rng.choice(PATTERNS), "format": lambda: rng.choice(tuple(FORMATS)),
                }
            case "number" | "integer":
                known = {
                    "minimum": lambda: rng.choice((-3, 0, 0.5, 2)), "maximum": lambda: rng.choice((0, 0.75, 1, 3.25, 5)),
                    "exclusiveMinimum": lambda: rng.choice((-1.5, 0, 2)), "exclusiveMaximum": lambda: rng.choice((0.1, 1, 3)),
                    "multipleOf": lambda: rng.choice((2, 3, 0.5, 0.1)),
                }
        names = rng.sample(list(known), min(len(known), rng.choice((1, 1, 2, 2, 3))))
        if name == "object" and rng.random() < 0.6:
            names = ["properties", *names]
        return {one: known[one]() for one in names}

    def _combined(self, depth: int, usual: Sequence[str]) -> dict[str, Any]:
        rng = self.random

        def one() -> Any:
            return self.schema(depth, usual)

        def several() -> list[Any]:
            return [one() for _ in range(rng.randint(1, 3))]

        match rng.randint(0, 4):
            case 0:
                return {"anyOf": several()}
            case 1 if rng.random() < 0.3:  # closed objects of different optional names, as real schemas have them
                names = rng.sample(NAMES, 2)
                return {"oneOf": [{"properties": {name: self.schema(0)}, "additionalProperties": False} for name in names]}
            case 1:
                return {"oneOf": several()}
            case 2:
                return {"allOf": several()}
            case 3:
                return {"not": one()}
        found = {"if": one(), "then": one(), "else": one()}
        return {key: item for key, item in found.items() if key == "if" or rng.random() < 0.7}

    def value(self, depth: int = 2) -> Any:
        """Any value over NAMES and PLAIN."""
        rng = self.random
        kind = rng.random() if depth else 1.0
        if kind < 0.3:
            return {one: self.value(depth - 1) for one in rng.sample(NAMES, rng.randint(0, 3))}
        if kind < 0.45:
            return [self.value(depth - 1) for _ in range(rng.randint(0, 3))]
        return copy.copy(rng.choice(PLAIN))

    def values(self, schema: Any, count: int) -> list[Any]:
        """Different values, most of them put together by the schema's own parts."""
        found: dict[str, Any] = {}
        for i in range(count):
            one = self.value() if i % 4 == 0 else self._guided(schema, schema, 4)
            if i % 4 == 3:
                one = self._changed(one)
            found.setdefault(json.dumps(one, sort_keys=True), one)
        return list(found.values())

    def _changed(self, value: Any) -> Any:
        """The value with a part more, less or another."""
        rng = self.random
        if isinstance(value, dict):
            left_out = rng.sample(sorted(value), min(len(value), rng.randint(0, 1)))
            more = {rng.choice(NAMES): self.value(1)} if rng.random() < 0.5 else {}
            return {name: item for name, item in value.items() if name not in left_out} | more
        if isinstance(value, list):
            return [*value, *([self.value(1)] if rng.random() < 0.5 else value[:1])] if rng.random() < 0.7 else value[1:]
        if isinstance(value, str):
            return value + rng.choice(("", "a", "b", "1"))
        return value if value is None or isinstance(value, bool) else value + rng.choice((0.5, 1, -1))

    def _guided(self, schema: Any, root: Any, depth: int) -> Any:
        """A value by one of the schema's parts, or by its own keywords."""
        rng = self.random
        if not isinstance(schema, dict) or depth < 0:
            return self.value(1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "$ref" in schema:
            names = schema["$ref"].split("/")[1:]
            target = root if not names else root.get("$defs", {}).get(names[-1])
            return self._guided(target, root, depth - 1)
        parts = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())]
        parts += [schema[key] for key in ("then", "else", "if") if key in schema]
        guides = [schema, *(rng.sample(parts, 1) if parts and rng.random() < 0.8 else ())]
        names = [guide["type"] for guide in guides if isinstance(guide, dict) and "type" in guide]
        kinds = [one for name in names for one in ([name] if isinstance(name, str) else name)]
        if not kinds:
            kinds = (
                ["object"] if any("properties" in one or "required" in one for one in guides if isinstance(one, dict)) else [""]
            )
        kind = rng.choice(kinds)
        if kind == "object":
            return self._object([one for one in guides if isinstance(one, dict)], root, depth)
        if len(guides) == 2 and rng.random() < 0.5:
            return self._guided(guides[1], root, depth - 1)
        return self._of_kind(kind, schema, root, depth)

    def _object(self, guides: list[Mapping[str, Any]], root: Any, depth: int) -> dict[str, Any]:
        rng, found = self.random, dict[str, Any]()
        for guide in guides:
            required = guide.get("required", [])
            for name, inner in guide.get("properties", {}).items():
                if name in required or rng.random() < 0.5:
                    found[name] = self._guided(inner, root, depth - 1)
            for name in required:
                found.setdefault(name, self.value(1))
        return found

    def _of_kind(self, kind: str, schema: Mapping[str, Any], root: Any, depth: int) -> Any:
        rng = self.random
        if kind == "array":
            first = [self._guided(one, root, depth - 1) for one in schema.get("prefixItems", ())]
            wanted = [self._guided(schema["contains"], root, depth - 1)] if "contains" in schema else []
            more = [self._guided(schema.get("items"), root, depth - 1) for _ in range(rng.randint(0, 3))]
            return (first + wanted + more)[: rng.randint(0, 4)] if rng.random() < 0.5 else wanted + more
        if kind == "string":
            return rng.choice((*FORMATS.get(schema.get("format", ""), ()), "a", "ab", "b", "ba", "abc", "x-b", "a1", "--", ""))
        if kind in ("number", "integer"):
            return rng.choice((-3, -1, 0, 1, 2, 3, 4, 6)) + (0 if kind == "integer" else rng.choice((0, 0.5, 0.1, 0.25)))
        return {"null": None, "boolean": rng.random() < 0.5}.get(kind, self.value(1))
