"""Schemas with keywords that no automaton obeys: refused, or obeyed without these keywords and checked after decoding.

decode.schema_unsupported=error   refused; the message names the other value if it would help
decode.schema_unsupported=check   the automaton is that of a weaker schema (`json_schema/weaker.py`), and the finished answer is
                                  checked by the whole schema (`check_process.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.json_schema.weaker import of_weaker
from batchspec.structured.regular import TooLarge

Found = TypeVar("Found")


class UnsupportedSchema(BadSchema):
    """The schema is valid, and decode.schema_unsupported=check would accept it."""


def obeyed(schema: Any, build: Callable[[Any], Found], *, checks: bool) -> tuple[Found, bool]:
    """What `build` makes of a schema, and whether it is that of a weaker one. checks: whether it may be.

    Raises BadSchema for a schema that no answer can be checked by, UnsupportedSchema for one by which it could but may not; and
    what `build` raises.
    """
    try:
        return build(schema), False
    except BadSchema as error:
        refused = error
    from batchspec.structured.schema_check import is_checkable  # imports a package that few schemas need

    if not is_checkable(schema):
        raise refused
    try:
        found = of_weaker(schema, refused, build, at_once=not checks)
    except (BadSchema, TooLarge):
        raise refused from None
    if not checks:
        raise UnsupportedSchema(f"{refused}, or set decode.schema_unsupported=check") from refused
    return found, True
