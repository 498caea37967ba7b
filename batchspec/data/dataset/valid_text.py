"""Text of columns whose bytes may not be UTF-8."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from batchspec.data.dataset.column_types import is_text


def valid_text(array: pa.Array) -> pa.Array:
    """The same values in the same type, with U+FFFD for invalid UTF-8 at any depth; the array itself if all is valid."""
    try:
        array.validate(full=True)
        return array
    except pa.ArrowInvalid:
        pass
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, valid_text(array.storage))
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, valid_text(array.dictionary), ordered=kind.ordered)
    if is_text(kind):
        raw = array.cast(pa.large_binary()).to_pylist()
        return pa.array([None if item is None else item.decode("utf-8", "replace") for item in raw], kind)
    if pa.types.is_struct(kind):
        fields = [valid_text(item) for item in array.flatten()]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if pa.types.is_fixed_size_list(kind):
        values = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)  # also those of null lists
        return pa.FixedSizeListArray.from_arrays(valid_text(values), type=kind, mask=array.is_null())
    if pa.types.is_map(kind):
        entries = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
        keys, items = valid_text(entries.flatten()).flatten()
        return pa.MapArray.from_arrays(_offsets(entries), keys, items, type=kind, mask=entries.is_null())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
        return make.from_arrays(_offsets(array), valid_text(array.flatten()), type=kind, mask=array.is_null())
    return array


def _offsets(lists: pa.Array) -> pa.Array:
    """int32 or int64 [lists + 1]: where each list begins in `lists.flatten()`, and where the last one ends."""
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    width = pa.int64() if pa.types.is_large_list(lists.type) else pa.int32()
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), width)
