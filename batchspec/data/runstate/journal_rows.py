"""Rows of the journal as JSON values.

{"done": {...}}   the Completion of a finished row: records as objects, arrays as base64 of little-endian numbers (see DTYPES)
{"left": {...}}   the Snapshot of an unfinished row
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from batchspec.records import Completion, Snapshot

DTYPES = {"prompt_ids": "<i4", "token_ids": "<i4", "logprobs": "<f4", "prompt_logprobs": "<f4", "state_values": "<f4"}
"""NumPy type of the stored numbers, for each array of a completion."""
TOPS = ("top_logprobs", "prompt_top_logprobs")
"""Pairs of arrays: ids <i4 and logprobs <f4."""
Top = tuple[tuple[int, ...], bytes, bytes]
"""A stored pair: the shape of both, then their bytes."""
STORED = dict.fromkeys(DTYPES, bytes | None) | dict.fromkeys(TOPS, Top | None)
"""The types in which arrays are stored: msgspec reads base64 as bytes."""


def _stored_completion() -> type[msgspec.Struct]:
    """A record with the fields of a completion, arrays as stored."""
    fields = [
        (own.name, STORED.get(own.name, own.type), *(() if own.required else (own.default,)))
        for own in msgspec.structs.fields(Completion)
    ]
    return msgspec.defstruct("StoredCompletion", fields, kw_only=True, forbid_unknown_fields=True)


class StoredRow(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the journal: one of both."""

    done: Any = None
    left: Snapshot | None = None


STORED_COMPLETION = _stored_completion()


def to_json(row: Completion | Snapshot) -> dict[str, Any]:
    """A row as JSON values; `from_json` is the inverse."""
    return {"left": asdict(row)} if isinstance(row, Snapshot) else {"done": _plain(row)}


def from_json(values: object) -> Completion | Snapshot:
    """The row from which `to_json` made these values. Raises ValueError if they are not those of a row."""
    try:
        row = msgspec.convert(values, StoredRow)
        if row.left is not None:
            return _checked(row.left)
        return _completion(msgspec.structs.asdict(msgspec.convert(row.done, STORED_COMPLETION)))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _checked(snapshot: Snapshot) -> Snapshot:
    counts = (*snapshot.tokens, *snapshot.accepted, *snapshot.drafted)
    if len(snapshot.accepted) != len(snapshot.drafted) or min(counts, default=0) < 0:
        raise ValueError("tokens, accepted and drafted of a snapshot must be 0 or more, and as many accepted as drafted")
    return snapshot


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


def _completion(values: Mapping[str, Any]) -> Completion:
    """values: fields of a stored completion."""
    arrays = {name: None if values[name] is None else _unpacked(values[name], dtype) for name, dtype in DTYPES.items()}
    tops = {name: None if values[name] is None else _unpacked_top(values[name]) for name in TOPS}
    return Completion(**{**values, **arrays, **tops})


def _unpacked(data: bytes, dtype: str) -> np.ndarray[Any, Any]:
    found = np.frombuffer(data, dtype)
    return found.astype(found.dtype.newbyteorder("="), copy=False)


def _unpacked_top(top: Top) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    shape, ids, logprobs = top
    return _unpacked(ids, "<i4").reshape(shape), _unpacked(logprobs, "<f4").reshape(shape)
