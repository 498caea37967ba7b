"""Two schemas that hold at once, as one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class BadSchema(ValueError):
    """The schema is not valid, or holds what is not built; the message says where and what."""


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are written alike; for Python 1 and true are equal."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def merged(a: Any, b: Any, where: str) -> Any:
    """The schema of the values that fit both. Raises BadSchema where that is not one schema of the keywords that are built."""
    if b is True or b == {}:
        return a
    if a is True or a == {}:
        return b
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False if isinstance(a, bool | dict) and isinstance(b, bool | dict) else _refuse(where, "schema")
    found = dict(a)
    for key, value in b.items():
        if key not in found or same(found[key], value):
            found[key] = value
        elif key in ("title", "description", "default", "examples", "$comment", "$id", "$schema"):
            continue
        elif key == "required":
            found[key] = list(dict.fromkeys([*found[key], *value]))
        elif key == "properties":
            found[key] = {**found[key], **{name: merged(found[key].get(name, True), one, where) for name, one in value.items()}}
        elif key in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
            found[key] = max(found[key], value)
        elif key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
            found[key] = min(found[key], value)
        elif key == "type":
            found[key] = _types(found[key], value)
        elif key == "enum":
            found[key] = [one for one in found[key] if any(same(one, other) for other in value)]
        else:
            _refuse(where, key)
    _check_additional(a, b, where)
    return found


def _check_additional(a: Mapping[str, Any], b: Mapping[str, Any], where: str) -> None:
    """additionalProperties=false of one schema forbids the properties that only the other names."""
    for one, other in ((a, b), (b, a)):
        strict = one.get("additionalProperties", True) is not True or "additionalItems" in one
        if strict and set(other.get("properties", {})) - set(one.get("properties", {})):
            _refuse(where, "additionalProperties")


def _types(a: Any, b: Any) -> list[str]:
    ours, theirs = ([one] if isinstance(one, str) else list(one) for one in (a, b))
    both = [name for name in ours if name in theirs or (name == "integer" and "number" in theirs)]
    return both + [name for name in theirs if name == "integer" and "number" in ours and name not in both]


def _refuse(where: str, key: str) -> Any:
    raise BadSchema(
        f"{where}: two different values of {json.dumps(key)} hold at once, which is not built; write it as one schema"
    )
