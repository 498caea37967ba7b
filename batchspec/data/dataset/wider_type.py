"""The type of a column whose files have different types: the one that holds the values of both as they are."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from batchspec.data.dataset.column_types import is_list

UNITS = ("s", "ms", "us", "ns")
_INT_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}
_SIGNED = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
_UNSIGNED = {8: pa.uint8(), 16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}
_FLOATS = {16: pa.float16(), 32: pa.float32(), 64: pa.float64()}
_EXACT_BITS = {16: 8, 32: 16, 64: 32}
"""Bits of a float -> bits of the integers that it holds exactly."""
MOST_DIGITS = 38
"""Of a decimal128. Readers of wider decimals are few: polars is none."""


def wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type to which Arrow casts values of both types without loss; None if there is none.

    Null gives way to any type, a dictionary to the type of its values. Text of any layout becomes large_string, integers the
    smallest type for both, times the finer unit (a date too far away for it is an error when it is read), a struct gets the
    fields of both. Whole numbers of 64 bits and floats have no such type: float64 is exact up to 2**53 alone.
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_dictionary(one) or pa.types.is_dictionary(other):
        return wider(*(kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (one, other)))
    for is_kind, join in _KINDS:
        if is_kind(one) and is_kind(other):
            return join(one, other)
    return None


def _is_text(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _is_bytes(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return any(test(kind) for test in tests) and not isinstance(kind, pa.BaseExtensionType)


def _is_number(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_integer, pa.types.is_floating, _is_decimal))


def _is_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind)) and not pa.types.is_decimal256(kind)


def _number(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if _is_decimal(one) or _is_decimal(other):
        return _decimal(one, other)
    if pa.types.is_floating(one) and pa.types.is_floating(other):
        return _FLOATS[max(one.bit_width, other.bit_width)]
    if pa.types.is_floating(one) or pa.types.is_floating(other):
        floating, whole = (one, other) if pa.types.is_floating(one) else (other, one)
        return next(
            (kind for bits, kind in _FLOATS.items() if bits >= floating.bit_width and _EXACT_BITS[bits] >= whole.bit_width), None
        )
    signed = [pa.types.is_signed_integer(kind) for kind in (one, other)]
    if signed[0] == signed[1]:
        return max(one, other, key=lambda kind: kind.bit_width)
    signed_bits, unsigned_bits = (one, other) if signed[0] else (other, one)
    return _SIGNED.get(max(signed_bits.bit_width, 2 * unsigned_bits.bit_width))


def _decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if pa.types.is_floating(one) or pa.types.is_floating(other):
        return None
    sizes = [
        (kind.precision - kind.scale, kind.scale) if _is_decimal(kind) else (_INT_DIGITS[kind.bit_width], 0)
        for kind in (one, other)
    ]
    whole, scale = (max(values) for values in zip(*sizes, strict=True))
    return pa.decimal128(whole + scale, scale) if whole + scale <= MOST_DIGITS else None


def _finer(one: str, other: str) -> str:
    return max(one, other, key=UNITS.index)


def _timestamp(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    return pa.timestamp(_finer(one.unit, other.unit), one.tz) if one.tz == other.tz else None


def _time(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    unit = _finer(one.unit, other.unit)
    return pa.time32(unit) if unit in ("s", "ms") else pa.time64(unit)


def _list(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    item = _field(one.value_field, other.value_field)
    if item is None:
        return None
    if pa.types.is_fixed_size_list(one) and pa.types.is_fixed_size_list(other) and one.list_size == other.list_size:
        return pa.list_(item, one.list_size)
    return (pa.large_list if pa.types.is_large_list(one) or pa.types.is_large_list(other) else pa.list_)(item)


def _struct(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    fields, more = ({field.name: field for field in kind} for kind in (one, other))
    if len(fields) < one.num_fields or len(more) < other.num_fields:  # two fields of one name
        return None
    joined = [
        _field(fields[name], more[name])
        if name in fields and name in more
        else (fields.get(name) or more[name]).with_nullable(True)
        for name in {**fields, **more}
    ]
    return pa.struct(joined) if all(joined) else None


def _map(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    key, item = _field(one.key_field, other.key_field), _field(one.item_field, other.item_field)
    return None if key is None or item is None else pa.map_(key, item, one.keys_sorted and other.keys_sorted)


def _field(one: pa.Field, other: pa.Field) -> pa.Field | None:
    kind = wider(one.type, other.type)
    return None if kind is None else pa.field(one.name, kind, one.nullable or other.nullable)


_KINDS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType, pa.DataType], pa.DataType | None]], ...] = (
    (_is_text, lambda one, other: pa.large_string()),
    (_is_bytes, lambda one, other: pa.large_binary()),
    (_is_number, _number),
    (pa.types.is_date, lambda one, other: pa.date64()),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_time, _time),
    (pa.types.is_duration, lambda one, other: pa.duration(_finer(one.unit, other.unit))),
    (is_list, _list),
    (pa.types.is_struct, _struct),
    (pa.types.is_map, _map),
)
