"""The ids of the rows: from the id column, which is checked once, or made of the file's name and the row's place in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import pyarrow as pa

from batchspec.data.dataset.columns import ColumnMap
from batchspec.data.dataset.reader import InputShard, Source, SourceFacts, derived_ids, place_in_file
from batchspec.data.dataset.untyped_columns import as_text
from batchspec.errors import InputError

NUMBER_THEM = "change one or set input.columns.id=null to number the rows"
OF_SAMPLES = "one is that of a sample; leave the other out by input.from_where"


def check_ids(source: Source, columns: ColumnMap, remedy: str = NUMBER_THEM) -> None:
    """One pass over the id column: every row has an id and no two rows share one.

    remedy  what to do about a repeated one, for the message

    Keeps a 64-bit hash a row; rows with equal hashes are read again and compared in full. Does nothing if ids are derived from
    file and row. Raises InputError with the row of a missing id, or both rows of a repeated one.
    """
    name = columns.get("id")
    if name is None:
        return
    hashes = np.empty(source.num_rows, np.uint64)
    row = 0
    for array in _id_arrays(source, name):
        bad = _first_bad_id(array)
        if bad is not None:
            at, why = bad
            place = place_in_file(source, row + at)
            raise InputError(f"{place}: the id (column {name!r}) {why}; give every row an id or set input.columns.id=null")
        hashes[row : row + len(array)] = _hash(array)
        row += len(array)
    hashes.sort()
    met = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
    for start in range(0, len(met), 1024):  # bounded memory, however many ids repeat
        _compare_ids(source, name, met[start : start + 1024], remedy)


def _id_arrays(source: Source, name: str) -> Iterator[pa.Array]:
    field = source.schema.field(name)
    return (as_text(array, field) for array in source.ids(name))


def _first_bad_id(array: pa.Array) -> tuple[int, str] | None:
    if array.null_count:
        return array.is_null().index(True).as_py(), "is null"
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        for at, value in enumerate(array):
            try:
                value.as_py()
            except UnicodeDecodeError:
                return at, "is not valid UTF-8"
    return None


def _compare_ids(source: Source, name: str, met: np.ndarray[tuple[int], np.dtype[np.uint64]], remedy: str) -> None:
    seen: dict[str, int] = {}
    row = 0
    for array in _id_arrays(source, name):
        for at in np.flatnonzero(np.isin(_hash(array), met)):
            value = str(array[int(at)].as_py())
            first = seen.setdefault(value, row + int(at))
            if first != row + at:
                raise InputError(
                    f"id {value!r} is in {place_in_file(source, first)} and again in {place_in_file(source, row + int(at))}; "
                    f"ids must be unique: {remedy}"
                )
        row += len(array)


def _hash(array: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    series = pl.from_arrow(array)
    assert isinstance(series, pl.Series)
    return series.hash().to_numpy()


def request_ids(source: Source | SourceFacts, columns: ColumnMap, shard: InputShard) -> list[str]:
    """The id of every row of a shard: the id column as text, else those of `derived_ids`."""
    name = columns.get("id")
    if name is not None:
        ids = as_text(shard.table.column(name), source.schema.field(name)).to_pylist()
        for row in shard.bad:
            if ids[row - shard.first_row] is None:
                (ids[row - shard.first_row],) = derived_ids(source, row, row + 1)
        return [str(value) for value in ids]
    return derived_ids(source, shard.first_row, shard.first_row + shard.table.num_rows)
