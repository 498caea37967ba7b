"""The values of a row as its templates read them. A null is false, and the templates may test and replace it; what would make
text, a number or items of it raises NullNeeded, so that no template writes `None` by any filter or operator.

To Jinja a null is undefined: the test `defined` is false of it, and the filter `default` replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateRuntimeError, Undefined
from jinja2.environment import Environment

_LIKE_NONE = ("none", "sameas", "iterable")
"""Tests of Jinja that take a null for None. To `defined` it is undefined, and of the others those that need a value raise."""


class NullNeeded(TemplateRuntimeError):
    """A template needs the value of a null; the message is the null's place in the row, such as `meta.topic` or `tags[2]`."""


class Null(Undefined):
    """A null, whose fields are nulls too."""

    __slots__ = ()

    def __init__(self, place: str) -> None:
        super().__init__(hint=place, exc=NullNeeded)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for optional methods
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Null)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(None)

    __str__ = __repr__ = __len__ = __iter__ = __contains__ = __reversed__ = Undefined._fail_with_undefined_error
    __index__ = __abs__ = __round__ = Undefined._fail_with_undefined_error


class Record(dict[str, Any]):
    """An object without its null fields, so that a template's loops and counts are the same for a file that leaves those out.

    fields  with the nulls
    place   of the object in the row
    """

    __slots__ = ("_nulls", "_place")

    def __init__(self, fields: dict[str, Any], place: str) -> None:
        self._nulls, self._place = {name for name, value in fields.items() if value is None}, place
        super().__init__(
            (name, with_nulls(value, self._place_of(name))) for name, value in fields.items() if value is not None
        )

    def _place_of(self, name: str) -> str:
        return f"{self._place}.{name}" if name.isidentifier() else f"{self._place}[{name!r}]"

    def __missing__(self, name: str) -> Null:
        if name not in self._nulls:
            raise KeyError(name)
        return Null(self._place_of(name))

    def get(self, name: str, default: Any = None) -> Any:
        value = super().get(name, default)
        return Null(self._place_of(name)) if value is None else value


class Missing(StrictUndefined):
    """What the row does not have. Everything but `is defined` and `default` raises."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        record = self._undefined_obj
        if isinstance(record, Record):
            return f"{record._place} has no field {self._undefined_name!r}"
        return super()._undefined_message

    __repr__ = Undefined._fail_with_undefined_error


def with_nulls(value: Any, place: str) -> Any:
    """A value of JSON with Null for None. place: of the value in the row."""
    if value is None:
        return Null(place)
    if isinstance(value, dict):
        return Record(value, place)
    return [with_nulls(item, f"{place}[{i}]") for i, item in enumerate(value)] if isinstance(value, list) else value


def read_rows(env: Environment) -> None:
    """Make an environment one for templates of rows."""
    env.undefined, env.finalize, env.keep_trailing_newline = Missing, _written, True
    for name in _LIKE_NONE:
        env.tests[name] = _with_none(env.tests[name])


def _with_none(test: Any) -> Callable[..., bool]:
    @wraps(test)
    def tested(*values: Any) -> bool:
        for value in values:
            if isinstance(value, Missing):
                str(value)  # raises
        return bool(test(*(None if isinstance(value, Null) else value for value in values)))

    return tested


def _written(value: Any) -> Any:
    """A value that a template writes. What is undefined raises when it becomes text."""
    if value is None or (callable(value) and not isinstance(value, Undefined)):
        what = "a null, which it may test: {% if NAME is none %}" if value is None else "a function"
        raise TemplateError(f"it writes {what}")
    return value
