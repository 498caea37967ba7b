"""A weaker schema for one that is refused: every value that is valid by the schema is valid by the weaker one.

What is ignored inside of `not` would make the schema stricter. So each part of a schema has a sign: `+` makes it weaker, `-`
stricter. Where a keyword is ignored, `+` leaves it out and `-` makes the schema around it false; `not` changes the sign. Keywords
that depend on a part in both directions (oneOf, if, maxContains) stay only if that part is unchanged.

References are followed: each pair of a target and a sign is one entry of the weaker schema's `$defs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

from batchspec.structured.json_schema.document import Document
from batchspec.structured.json_schema.leaves import BY_TYPE, KEYWORDS, NOT_BUILT, BadSchema

MAX_STEPS = 60
"""Number of refused keywords that are left out one after another; then all that are not CORE are."""
CORE = {
    "$ref", "type", "enum", "const", "anyOf", "allOf", "properties", "required", "additionalProperties", "items", "prefixItems",
    "additionalItems",
}
"""Keywords that are left out only if they are refused themselves."""
Path = tuple[str, ...]
Sign = Literal["+", "-"]
Found = TypeVar("Found")
_ONE = ("items", "additionalItems", "additionalProperties", "propertyNames", "then", "else")
_LISTS = ("allOf", "anyOf", "items", "prefixItems")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
"""Keywords whose schemas have the sign of the schema around them: one, a list of them, or a map."""
_BOTH_SIGNS = ("oneOf", "if", "contains", "not")
_TOGETHER: dict[str, tuple[str, ...]] = {
    "properties": ("additionalProperties",), "patternProperties": ("additionalProperties",),
    "prefixItems": ("items", "additionalItems"), "items": ("additionalItems",),
    "contains": ("minContains", "maxContains"), "minContains": ("contains", "maxContains"),
    "minimum": ("exclusiveMinimum",), "maximum": ("exclusiveMaximum",),
}
"""Keywords that would say more, or nothing, without this one."""
_NO_LIMIT = {"object": ("minProperties", 0), "array": ("minItems", 0), "string": ("minLength", 0)}
_OTHER: dict[Sign, Sign] = {"+": "-", "-": "+"}


def of_weaker(schema: Any, refused: BadSchema, build: Callable[[Any], Found], *, at_once: bool = False) -> Found:
    """What `build` makes of a schema that is weaker than a refused one: it leaves out only what is refused, as far as the
    messages of the errors name the place.

    at_once  leave out all keywords that are not CORE, which is faster
    Raises what `build` raises; BadSchema only if no weaker schema helps.
    """
    error = refused
    for step in range(MAX_STEPS if at_once else 0, MAX_STEPS + 3):
        schema = _next(schema, str(error).removeprefix("#"), step)
        if schema is None:
            break
        try:
            return build(schema)
        except BadSchema as again:
            error = again
    raise error


def _next(schema: Any, said: str, step: int) -> Any:
    """The schema without the keyword that a message is about, else without those around it, else without more; None: that
    changes nothing."""
    known = {"".join(f"/{part}" for part in path): path for path in places(schema)}
    around = max((place for place in _schemas(known) if said.startswith((f"{place}/", f"{place}:"))), key=len, default="")
    not_core = {path for path in known.values() if path[-1] not in CORE}
    tries: list[Set[Path]] = [
        {path for place, path in known.items() if said.startswith(place) and not said[len(place) :][:1].strip(":= ")},
        {path for path in known.values() if path[-1] == said.partition(" ")[0]},  # forms of calls that are not JSON name no place
        {path for place, path in known.items() if place.rpartition("/")[0] == around and path in not_core},
    ]
    tries = tries if step < MAX_STEPS else []
    for dropped in (*tries, not_core, {path for path in known.values() if path != ("type",)}):
        if dropped and (found := weaker(schema, dropped)) != schema:
            return found
    return None


def _schemas(known: Mapping[str, Path]) -> Set[str]:
    """The places of the schemas that have keywords."""
    return {place.rpartition("/")[0] for place in known}


def places(schema: Any, at: Path = ()) -> Iterator[Path]:
    """The paths of all keywords of a schema and of the schemas inside of it, `$defs` included."""
    if not isinstance(schema, dict):
        return
    for key in schema.keys() & (KEYWORDS | NOT_BUILT):
        yield (*at, key)
    for path, inner in _inside(schema, at):
        yield from places(inner, path)


def _inside(schema: Mapping[str, Any], at: Path) -> Iterator[tuple[Path, Any]]:
    """The schemas inside of one, with their paths."""
    for key, item in schema.items():
        if key in (*_ONE, *_BOTH_SIGNS) and isinstance(item, dict | bool):
            yield (*at, key), item
        elif key in (*_LISTS, "oneOf") and isinstance(item, list):
            yield from (((*at, key, str(i)), one) for i, one in enumerate(item))
        elif key in (*_MAPS, "$defs", "definitions") and isinstance(item, dict):
            yield from (((*at, key, name), one) for name, one in item.items() if not isinstance(one, list))


def weaker(schema: Any, dropped: Set[Path]) -> Any:
    """The schema without the keywords at these paths: weaker, or the same. Keywords that no automaton obeys are left out too."""
    return _Weaker(schema, dropped).document()


class _Weaker:
    def __init__(self, root: Any, dropped: Set[Path]) -> None:
        self._root, self._dropped, self._document = root, dropped, Document(root)
        self._names: dict[tuple[Path, Sign], str] = {}
        """The entry of `$defs` for each target of a reference."""
        self._todo: list[tuple[str, Path, Sign]] = []

    def document(self) -> Any:
        found, definitions = self._of(self._root, (), "+"), dict[str, Any]()
        while self._todo:
            target, path, sign = self._todo.pop()
            definitions[self._names[path, sign]] = self._of(self._document.named(target, ""), path, sign)
        if isinstance(found, dict):
            found |= {"$schema": self._root["$schema"]} if "$schema" in self._root else {}
            found |= {"$defs": definitions} if definitions else {}
        return found

    def _of(self, schema: Any, at: Path, sign: Sign) -> Any:
        """A schema that allows at least (+) or at most (-) the values of this one."""
        if not isinstance(schema, dict):
            return schema
        said = [key for key in schema if self._is_said(key, schema)]
        gone = {key for key in said if key in NOT_BUILT or (*at, key) in self._dropped}
        gone |= {"$ref"} if "$ref" in said and self._target(schema) is None else set()
        gone |= {other for key in gone for other in _TOGETHER.get(key, ()) if other in said}
        found, left_out = dict[str, Any](), set[str]()
        for key in said:
            one = self._keyword(key, schema, at, sign, is_gone=key in gone)
            if one is None and sign == "-":
                return False
            left_out |= {key} if one is None else set()
            both = one is not None and not one.keys().isdisjoint(found)
            found |= {"allOf": [*found.get("allOf", ()), one]} if both else one or {}
        return found | _types_of(left_out, found)

    def _is_said(self, key: str, schema: Mapping[str, Any]) -> bool:
        """Whether a keyword says which values are valid; those that the declared draft ignores count if they have no schemas."""
        if key not in KEYWORDS | NOT_BUILT or (self._document.is_old and "$ref" in schema and key != "$ref"):
            return False
        return not self._document.ignores(key, schema) or not any(_inside({key: schema[key]}, ()))

    def _keyword(self, key: str, schema: Mapping[str, Any], at: Path, sign: Sign, *, is_gone: bool) -> dict[str, Any] | None:
        """Keywords for this one; None if there are none that are weaker (+) or stricter (-). is_gone: it is to be left out."""
        item, here = schema[key], (*at, key)
        match key:
            case "then" | "else" if "if" not in schema:
                return {}
            case "then" | "else" if is_gone or not self._keeps_if(schema, at):
                return None if is_gone else {}
            case "if" if not self._keeps_if(schema, at):
                return self._one_branch(schema, at) if sign == "+" else None
            case "oneOf" if is_gone or not self._is_exact(item, here):
                return {"anyOf": self._inner(item, here, sign)} if sign == "+" else None
            case _ if is_gone:
                return None
            case "$ref":
                return {key: self._reference(schema, sign)}
            case "not":
                return {key: self._of(item, here, _OTHER[sign])}
            case "contains" if sign == "-" and "maxContains" in schema and not self._is_exact(item, here):
                return None
            case "maxContains" if not self._is_exact(schema.get("contains", True), (*at, "contains")):
                return None
        return {key: self._inner(item, here, sign) if any(_inside({key: item}, ())) else item}

    def _inner(self, item: Any, at: Path, sign: Sign) -> Any:
        """The value of a keyword with schemas inside: one, a list of them, or a map, which may have lists of names too."""
        if isinstance(item, list) and at[-1] in (*_LISTS, "oneOf"):
            return [self._of(one, (*at, str(i)), sign) for i, one in enumerate(item)]
        if isinstance(item, dict) and at[-1] in _MAPS:
            return {name: self._of(one, (*at, name), sign) for name, one in item.items()}
        return self._of(item, at, sign)

    def _keeps_if(self, schema: Mapping[str, Any], at: Path) -> bool:
        return (*at, "if") not in self._dropped and self._is_exact(schema["if"], (*at, "if"))

    def _one_branch(self, schema: Mapping[str, Any], at: Path) -> dict[str, Any]:
        """The condition and `then`, or `else`: without what says which of them."""
        first, then, other = (
            True if (*at, key) in self._dropped and key != "if" else self._of(schema.get(key, True), (*at, key), "+")
            for key in ("if", "then", "else")
        )
        return {"anyOf": [{"allOf": [first, then]}, other]}

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """What the schema's reference names; None if it cannot be followed."""
        with suppress(BadSchema):
            return self._document.named(schema["$ref"], "")
        return None

    def _reference(self, schema: Mapping[str, Any], sign: Sign) -> str:
        target = schema["$ref"]
        key = _path_of(target), sign
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._todo.append((target, *key))
        return f"#/$defs/{self._names[key]}"

    def _is_exact(self, schema: Any, at: Path) -> bool:
        """Whether nothing is left out of a schema, or a list of them, and of what its references name."""
        todo, seen = [(at, schema)], set[Path]()
        while todo:
            path, one = todo.pop()
            if isinstance(one, list):
                todo += [((*path, str(i)), part) for i, part in enumerate(one)]
            elif isinstance(one, dict) and path not in seen:
                seen.add(path)
                if one.keys() & NOT_BUILT or any((*path, key) in self._dropped for key in one):
                    return False
                if "$ref" in one:
                    if (target := self._target(one)) is None:
                        return False
                    todo.append((_path_of(one["$ref"]), target))
                todo += _inside(one, path)
        return True


def _path_of(target: str) -> Path:
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in unquote(target).split("/")[1:])


def _types_of(left_out: Set[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords without a limit, so that a schema without `type` is still about the types that its keywords were about."""
    if "type" in kept:
        return {}
    about = {name for name, keys in BY_TYPE.items() if left_out & set(keys) and not kept.keys() & set(keys)}
    return dict(_NO_LIMIT[name] for name in _NO_LIMIT if name in about)
