"""What is declared of a key of the configuration, beside its default:

    top_k: int = key(0, low=0, advice="0 is off", column=Column("integer"), requests=("top_k",))
    \"\"\"Sample from the k most likely tokens only. 0 is off.\"\"\"

Whatever needs to know of a key reads its `Key`: checks, messages, the help and conf/README.md, the columns of the input that set
it for one row, and the names that other programs have for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Flag, auto
from typing import Any, TypeVar, get_type_hints

Value = TypeVar("Value")

ABOVE_0 = math.ulp(0.0)
"""The least value of a key that must be above 0."""
INT64 = (-(2**63), 2**63 - 1)


class Scope(Flag):
    """What alone a key or a column applies to."""

    CHATS = auto()
    """Prompts that go through the chat template."""
    ANSWERS = auto()
    """Rows whose answer is decoded; the tasks of other jobs decode none (batchspec/tasks)."""


CHATS, ANSWERS, EVERYTHING = Scope.CHATS, Scope.ANSWERS, Scope(0)


@dataclass(frozen=True, slots=True)
class Column:
    """The column of the input with which a row sets an option for itself."""

    type: str
    """What its cells hold: a name in `COLUMN_TYPES` (data/dataset/column_types.py)."""
    name: str = ""
    """Empty: the last part of the key."""
    words: str = ""
    """What its cells hold, for messages; empty: as `COLUMN_TYPES` says."""
    must_be_mapped: bool = False
    """Whether input.columns must name it, because many datasets have a column of its name with another meaning."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Key:
    """A key, without its name, type, default and description."""

    low: float = -math.inf
    high: float = math.inf
    """Least and greatest number, for all rows and for one. Null is always allowed."""
    advice: str = ""
    """What to do about a number out of this range; empty: there is no range."""
    choices: tuple[str, ...] = ()
    """All values, if they are a few words."""
    form: str = ""
    """Its values in words, where the type is Any."""
    example: str = ""
    """A value, if that is a list or a map, for messages."""
    advanced: bool = False
    """Whether few jobs set it: the help and conf/README.md list it last."""
    path: bool = False
    """Whether it names files or folders: `~` is the user's home, and credentials in a URL are refused."""
    applies_to: Scope = EVERYTHING
    """It is refused where it would have no effect."""
    column: Column | None = None
    """The column with which a row replaces it."""
    requests: tuple[str, ...] = ()
    """Keys of the body of OpenAI's and vLLM's requests that hold the same number."""
    names: tuple[str, ...] = ()
    """What other programs call it besides."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Names of other programs for nearly the same -> what to do instead."""

    def violation(self, name: str, value: float) -> str | None:
        """What is wrong with a number, in one line; None if it is in the range. name: of the key or column that has it."""
        low, high = self.low, self.high
        if not self.advice or low <= value <= high:  # the comparison is false for NaN
            return None
        least, most = (f"{bound:.0f}" if 1e6 <= bound < 1e15 else f"{bound:g}" for bound in (low, high))
        if high == math.inf:
            limit = "above 0" if low == ABOVE_0 else f"at least {least}"
        elif (low, high) == INT64:
            limit = "in -2^63 .. 2^63-1"
        else:
            limit = f"above 0 and at most {most}" if low == ABOVE_0 else f"in {least} .. {most}"
        return f"{name}={value} must be {limit}; {self.advice}"


def key(default: Value, **declared: Any) -> Value:
    """A field of a dataclass of keys, with its default and what is declared of it: arguments of `Key`."""
    metadata = {Key: Key(**declared)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def declared_keys(schema: type) -> dict[str, Key]:
    """Every key of a dataclass of keys, dotted, in the order of its fields; of `Key()` if nothing is declared."""
    hints, found = get_type_hints(schema), dict[str, Key]()
    for item in fields(schema):
        if is_dataclass(hints[item.name]):
            found |= {f"{item.name}.{name}": inner for name, inner in declared_keys(hints[item.name]).items()}
        else:
            found[item.name] = item.metadata.get(Key, Key())
    return found


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config
