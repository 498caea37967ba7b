"""Rows of the journal as JSON values.

{"done": {...}}   the Completion of a finished row: records as objects, arrays as base64 of little-endian numbers (see DTYPES)
{"left": {...}}   the Snapshot of an unfinished row
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from batchspec.records import Completion, RowError, RowStats, Snapshot

DTYPES = {"prompt_ids": "<i4", "token_ids": "<i4", "logprobs": "<f4", "prompt_logprobs": "<f4"}
"""NumPy type of the stored numbers, for each array of a completion."""
TOPS = ("top_logprobs", "prompt_top_logprobs")
"""Pairs of arrays: ids <i4 and logprobs <f4."""


def to_json(row: Completion | Snapshot) -> dict[str, Any]:
    """A row as JSON values; `from_json` is the inverse."""
    return {"left": asdict(row)} if isinstance(row, Snapshot) else {"done": _plain(row)}


def from_json(values: dict[str, Any]) -> Completion | Snapshot:
    """The row from which `to_json` made these values.

    Raises ValueError, KeyError, TypeError, IndexError, AttributeError or OverflowError if no row can be made of them. The fields
    of the row may still have wrong types: callers check them with `fits`.
    """
    return _completion(values["done"]) if "done" in values else _snapshot(values["left"])


def _snapshot(values: Mapping[str, Any]) -> Snapshot:
    snapshot = Snapshot(**_tuples(values))
    counts = (*snapshot.tokens, *snapshot.accepted, *snapshot.drafted)
    if len(snapshot.accepted) != len(snapshot.drafted) or min(counts, default=0) < 0:
        raise ValueError("tokens, accepted and drafted of a snapshot must be 0 or more, and as many accepted as drafted")
    return snapshot


def fits(value: object, kind: Any) -> bool:
    """Whether a value has the annotated type `kind`, checked recursively through tuples and records.

    Raises NotImplementedError for a form of annotation that this function does not know: that is a bug, not a bad row.
    """
    kind = _resolved(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(kinds) == len(value) and all(map(fits, value, kinds))
    kind = origin or kind
    if not isinstance(kind, type):
        raise NotImplementedError(f"the journal cannot check values of the type {kind!r}")
    if origin is not None:
        return isinstance(value, origin)
    if is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        return type(value) is kind and all(fits(getattr(value, name), hint) for name, hint in _hints(kind))
    return type(value) is kind or (kind is float and type(value) is int)


def _resolved(kind: Any) -> Any:
    """The type that an alias of a `type` statement names; other types unchanged. NDArray is one in NumPy 2.5 on Python 3.12."""
    while (named := getattr(get_origin(kind) or kind, "__value__", None)) is not None:
        kind = named
    return kind


@cache
def _hints(record: type) -> list[tuple[str, Any]]:
    return [*get_type_hints(record).items()]


def _plain(completion: Completion) -> dict[str, Any]:
    """A completion as JSON values: arrays as base64, records as dicts."""
    values = msgspec.structs.asdict(completion)
    values["stats"] = None if completion.stats is None else msgspec.structs.asdict(completion.stats)
    values["error"] = None if completion.error is None else asdict(completion.error)
    for name in DTYPES:
        values[name] = None if values[name] is None else _packed(values[name], DTYPES[name])
    for name in TOPS:
        if (top := values[name]) is not None:
            values[name] = [top[0].shape, _packed(top[0], "<i4"), _packed(top[1], "<f4")]
    return values


def _packed(array: np.ndarray[Any, Any], dtype: str) -> str:
    """The array's bytes as base64, which is a hundred times faster to write than decimal numbers."""
    return base64.b64encode(array.astype(dtype, copy=False).tobytes()).decode("ascii")


def _completion(values: dict[str, Any]) -> Completion:
    stats, error = values["stats"], values["error"]
    arrays: dict[str, Any] = {
        **{name: None if values[name] is None else _unpacked(values[name], dtype) for name, dtype in DTYPES.items()},
        **{name: _unpacked_top(values[name]) for name in TOPS},
        "choice_logprobs": None if (listed := values["choice_logprobs"]) is None else tuple(map(tuple, listed)),
        "unchecked": None if (checked_by := values.get("unchecked")) is None else tuple(checked_by),
        "choice_probs": None if (probs := values["choice_probs"]) is None else tuple(probs),
        "stats": None if stats is None else RowStats(**_tuples(stats)),
        "error": None if error is None else RowError(**error),
    }
    return Completion(**(values | arrays))


def _unpacked(text: str, dtype: str) -> Any:
    found = np.frombuffer(base64.b64decode(text), dtype)
    return found.astype(found.dtype.newbyteorder("="), copy=False)


def _unpacked_top(top: Sequence[Any] | None) -> tuple[Any, Any] | None:
    return None if top is None else (_unpacked(top[1], "<i4").reshape(top[0]), _unpacked(top[2], "<f4").reshape(top[0]))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
