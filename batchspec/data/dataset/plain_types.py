"""Types of copied input columns in the output: those that every reader supports."""

from __future__ import annotations

import polars as pl
import pyarrow as pa


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type in which a column of this type is copied.

    A dictionary becomes the type of its values, because polars would turn it into a Categorical. Views of text or bytes become
    plain text or bytes at any depth, because some readers refuse views, and Arrow cannot repeat their rows.

    Raises ValueError with the reason for a type that cannot be copied: views of lists, because polars crashes on them and Arrow's
    cast to a list loses the values after a null; structs without fields, which Parquet does not support; time zones that polars
    crashes on, such as +05:30; extensions of views or of another type that would not be copied as it is.
    """
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    return _without_views(kind)


def _without_views(kind: pa.DataType) -> pa.DataType:
    made = _rebuilt(kind)
    return kind if made == kind else made  # equal maps may differ in names of fields: fingerprints have the input's


def _rebuilt(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        raise ValueError("views of lists cannot be copied to the output")
    if pa.types.is_timestamp(kind) and kind.tz and not _is_known_zone(kind.tz):
        raise ValueError(f"polars does not know the time zone {kind.tz!r}, and would crash on the output")
    if isinstance(kind, pa.BaseExtensionType):
        if _without_views(kind.storage_type) != kind.storage_type:
            raise ValueError(f"an extension of {kind.storage_type} cannot be copied to the output")
        return kind
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            raise ValueError("structs without fields cannot be copied to the output")
        return pa.struct([_field_without_views(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_field_without_views(kind.key_field), _field_without_views(kind.item_field), kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_field_without_views(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_field_without_views(kind.value_field))
    return pa.list_(_field_without_views(kind.value_field)) if pa.types.is_list(kind) else kind


def _field_without_views(field: pa.Field) -> pa.Field:
    return field.with_type(_without_views(field.type))


def _is_known_zone(name: str) -> bool:
    try:
        pl.Series([], dtype=pl.Datetime(time_zone=name))
    except pl.exceptions.PolarsError:
        return False
    return True
