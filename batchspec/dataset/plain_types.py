"""Types of copied input columns in the output: those that every reader supports."""

from __future__ import annotations

import pyarrow as pa


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type in which a column of this type is copied.

    A dictionary becomes the type of its values, because polars would turn it into a Categorical. Views of text or bytes become
    plain text or bytes at any depth, because some readers refuse views, and Arrow cannot repeat their rows.

    Raises ValueError for views of lists, because polars crashes on them and Arrow's cast to a list loses the values after a null,
    and for structs without fields, which Parquet does not support.
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
        raise ValueError(f"{kind} is a view of lists")
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            raise ValueError("a struct has no fields")
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
