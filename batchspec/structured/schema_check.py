"""Whether an answer is valid by a whole schema: asks the package `jsonschema`, by the draft that the schema declares.

Only processes with limits import this module (`compile_process.py`, `check_process.py`): a pattern may take any time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import Any

from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, extend, validator_for
from jsonschema_specifications import REGISTRY
from referencing import Resource
from referencing.jsonschema import specification_with

from batchspec.process.child_process import OutOfTime

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
MAX_SAID = 300
EXACT = Context(prec=400)
"""Numbers that automata write have fewer digits before and after the point."""


def is_checkable(schema: Any) -> bool:
    """Whether answers can be checked: the schema is valid by its draft, and has all that its references name. Nothing is fetched
    from a network."""
    try:
        draft = validator_for(schema, default=Draft202012Validator)
        draft.check_schema(schema)
        resource = Resource.from_contents(schema, default_specification=specification_with(draft.META_SCHEMA["$schema"]))
        resolver = REGISTRY.resolver_with_root(resource)
        for inner, at in _subschemas(resource, resolver):
            for key in REFERENCES:
                if isinstance(inner, Mapping) and isinstance(inner.get(key), str):
                    at.lookup(inner[key])
    except (OutOfTime, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a bad schema or reference; also what packages in Rust raise, which is no Exception
        return False
    return True


def _subschemas(resource: Resource[Any], resolver: Any) -> Iterator[tuple[Any, Any]]:
    """Each schema of a document with what resolves its references."""
    todo = [(resource, resolver)]
    while todo:
        one, at = todo.pop()
        yield one.contents, at
        todo += [(inner, at.in_subresource(inner)) for inner in one.subresources()]


def violation(source: str, answer: str) -> str | None:
    """Where and by which keyword an answer, a JSON text, violates a schema, in words; None if it is valid.

    Raises ValueError for an answer that is not JSON, RecursionError, and what a regular expression raises.
    """
    with localcontext(EXACT):
        error = best_match(_validator(source).iter_errors(_read(answer)))
    if error is None:
        return None
    said = re.sub(r"Decimal\('([^']*)'\)", r"\1", error.message)
    said = said if len(said) <= MAX_SAID else f"{said[:MAX_SAID]}..."
    return f"{error.json_path} violates {error.validator}: {said}"


@lru_cache(maxsize=1000)
def _validator(source: str) -> Validator:
    schema = _read(source)
    draft = validator_for(schema, default=Draft202012Validator)
    takes_whole = draft.TYPE_CHECKER.is_type(1.0, "integer")  # of draft-04, it is none

    def is_integer(_: object, value: Any) -> bool:
        return type(value) is int or (takes_whole and isinstance(value, Decimal) and value == value.to_integral_value())

    draft = extend(draft, type_checker=draft.TYPE_CHECKER.redefine("integer", is_integer))
    return draft(schema, registry=REGISTRY, format_checker=draft.FORMAT_CHECKER)


def _read(source: str) -> Any:
    """A JSON text with exact numbers: 0.3 is a multiple of 0.1."""
    return json.loads(source, parse_float=Decimal)
