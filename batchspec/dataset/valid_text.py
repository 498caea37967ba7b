"""Text of columns whose bytes may not be UTF-8."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from batchspec.dataset.columns import is_list, is_text


def valid_text(array: pa.Array) -> pa.Array:
    """The same values, with U+FFFD for bytes that are not UTF-8; the array itself if all are."""
    try:
        array.validate(full=True)
        return array
    except pa.ArrowInvalid:
        pass
    kind = array.type
    if pa.types.is_dictionary(kind):
        return valid_text(array.dictionary_decode())
    if is_text(kind):
        raw = array.cast(pa.large_binary()).to_pylist()
        return pa.array([None if item is None else item.decode("utf-8", "replace") for item in raw], kind)
    if pa.types.is_struct(kind):
        fields = [valid_text(item) for item in array.flatten()]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if is_list(kind):
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        make = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
        width = pa.int64() if pa.types.is_large_list(kind) else pa.int32()
        return make.from_arrays(pa.array(offsets, width), valid_text(array.flatten()), mask=array.is_null())
    return array
