"""How a row group of Parquet is decoded in bounded memory: rows at a time, and columns that stay dictionaries.

The sizes in a footer are those of encoded values: a text of 1 MB that 3,000 rows share has 1 MB in its column's dictionary, and
takes 3 GB when it is repeated in each row. So the longest value of each dictionary is looked up first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

BATCH_BYTES = 4 << 20
"""Rows are decoded in batches of about this many bytes, which a reader holds in addition to the tables it has returned."""
BATCH_ROWS = 4096
MOST_BYTES = 64 << 20
"""Limit of a batch in which every value is the longest of its column's dictionary."""
FEW_ROWS = 64
"""Rows of a batch with values that share prefixes (DELTA_BYTE_ARRAY), whose longest one only decoding tells."""
INDEX_BYTES, HEADER_BYTES = 4, 64 << 10
"""More than an index into a dictionary takes, and more than the headers of a chunk's pages."""
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
DICTIONARIES = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


@dataclass(frozen=True, slots=True)
class Decoding:
    batch_rows: int
    dictionaries: tuple[str, ...] = ()
    """Columns of text or bytes that are read as dictionaries, because many rows may share a long value."""

    def typed(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The batches, with values of the schema's types in the dictionaries: Arrow reads those of large text as text."""
        for batch in batches:
            for name in self.dictionaries:
                place, kind = batch.schema.get_field_index(name), schema.field(name).type
                read = batch.column(place)
                array = pa.DictionaryArray.from_arrays(read.indices, read.dictionary.cast(kind))
                batch = batch.set_column(place, name, array)
            yield batch


class Open(Protocol):
    def __call__(self, dictionaries: Sequence[str]) -> AbstractContextManager[pq.ParquetFile]:
        """The file, opened again, with the columns at these paths as dictionaries."""


def decoding_of(file: pq.ParquetFile, group: int, names: Sequence[str], again: Open) -> Decoding:
    """How these columns of a row group are decoded. Reads the dictionaries that may have long values."""
    footer = file.metadata.row_group(group)
    rows = max(1, footer.num_rows)
    paths = [footer.column(place).path_in_schema for place in range(footer.num_columns)]
    mean, longest, dictionaries = 0.0, 0, []
    """Bytes of a row by the footer, and of a row of the longest values; columns to keep."""
    for place, path in enumerate(paths):
        name = next((name for name in names if path == name or path.startswith(f"{name}.")), None)
        if name is None:
            continue
        chunk, width = footer.column(place), file.metadata.schema.column(place).length
        values, size = chunk.num_values, chunk.total_uncompressed_size
        if chunk.physical_type != "BYTE_ARRAY":
            mean += values * WIDTHS.get(chunk.physical_type, width) / rows
            continue
        mean += size / rows
        flat = path == name and paths.count(path) == 1
        kind = file.schema_arrow.field(name).type
        if (flat and pa.types.is_dictionary(kind)) or size * min(values, BATCH_ROWS) <= MOST_BYTES:
            continue
        longest_value = size
        if chunk.has_dictionary_page or DICTIONARIES & {*chunk.encodings}:
            lengths = pc.binary_length(_dictionary(again, group, path))
            longest_value = pc.max(lengths).as_py() or size
            others = size - (pc.sum(lengths).as_py() or 0) - INDEX_BYTES * (len(lengths) + values)
            if flat and kind in TEXTS and others <= HEADER_BYTES and longest_value * min(rows, BATCH_ROWS) > MOST_BYTES:
                dictionaries.append(name)
                continue
        elif "DELTA_BYTE_ARRAY" in chunk.encodings:
            longest_value = min(size, MOST_BYTES // FEW_ROWS)
        else:
            continue
        longest += -(-values // rows) * longest_value
    return Decoding(max(1, int(min(BATCH_ROWS, BATCH_BYTES / max(mean, 1), MOST_BYTES / max(longest, 1)))), tuple(dictionaries))


def _dictionary(again: Open, group: int, path: str) -> pa.Array:
    """The dictionary of a column chunk; empty if its first row has no value."""
    with again([path]) as file:
        first = next(file.iter_batches(batch_size=1, row_groups=[group], columns=[path], use_threads=False))
    array = first.column(0)
    while not pa.types.is_dictionary(array.type):
        array = array.flatten()[0] if pa.types.is_struct(array.type) else array.values
    return array.dictionary


def short_pieces(array: pa.Array) -> Iterator[pa.Array]:
    """Slices of a column of at most MOST_BYTES each, with the values of a dictionary repeated in their rows."""
    rows = len(array)
    if _has_texts(array.type):
        rows = max(1, MOST_BYTES // (pc.max(pc.binary_length(array.dictionary)).as_py() or 1))
    return (array.slice(first, rows) for first in range(0, len(array), max(1, rows)))


def plain_bytes(column: pa.ChunkedArray) -> int:
    """Bytes of a column with the values of a dictionary repeated in its rows."""
    if not _has_texts(column.type):
        return int(column.nbytes)
    lengths = (pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0 for chunk in column.chunks)
    return sum(lengths) + INDEX_BYTES * len(column)


def _has_texts(kind: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(kind)) and kind.value_type in TEXTS
