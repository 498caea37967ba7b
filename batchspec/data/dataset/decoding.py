"""How a row group of Parquet is decoded in bounded memory: rows at a time, and columns that stay dictionaries.

The sizes in a footer are those of encoded values: a text of 1 MB that 3,000 rows share has 1 MB in its column's dictionary, and
takes 3 GB when it is repeated in each row. So the longest value of each dictionary is looked up first, unless large values all
differ: Arrow takes seconds to make a dictionary of some hundred MB.
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
"""Rows of a batch with values whose longest one only decoding tells: they share prefixes (DELTA_BYTE_ARRAY), or Arrow does not
read them as dictionaries (extension types)."""
INDEX_BYTES, HEADER_BYTES = 4, 64 << 10
"""More than an index into a dictionary takes, and more than the headers of a chunk's pages."""
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
DICTIONARIES = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
LARGE_BYTES = 64 << 10
"""Mean size of values from which they are large, such as images."""
PAGE_HEADER_BYTES = 64
"""More than the first fields of the header of a dictionary's page take."""
I32, STRUCT, DICTIONARY_HEADER = 5, 12, 7
"""Types in Thrift's compact protocol, and the field of a page's header that has the number of values of its dictionary."""
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


class Head(Protocol):
    def __call__(self, begin: int, count: int) -> bytes:
        """`count` bytes of the file from `begin` on; fewer at its end."""


def decoding_of(file: pq.ParquetFile, group: int, names: Sequence[str], again: Open, head: Head) -> Decoding:
    """How these columns of a row group are decoded. Reads the dictionaries that may have long values."""
    footer = file.metadata.row_group(group)
    rows, mean, longest, dictionaries = max(1, footer.num_rows), 0.0, 0, list[str]()
    for place in range(footer.num_columns):
        chunk = footer.column(place)
        path = chunk.path_in_schema
        name = next((name for name in names if path == name or path.startswith(f"{name}.")), None)
        if name is None:
            continue
        if chunk.physical_type != "BYTE_ARRAY":
            mean += chunk.num_values * (WIDTHS.get(chunk.physical_type) or _fixed_width(file, place)) / rows
            continue
        mean += chunk.total_uncompressed_size / rows
        kind = file.schema_arrow.field(name).type if path == name else None
        if pa.types.is_dictionary(kind or pa.null()):
            continue
        value_bytes, as_dictionary = _longest_value(chunk, group, again, head)
        if as_dictionary and kind in TEXTS and value_bytes * min(rows, BATCH_ROWS) > MOST_BYTES:
            dictionaries.append(name)
        else:
            longest += -(-chunk.num_values // rows) * value_bytes
    batch_rows = min(BATCH_ROWS, BATCH_BYTES / max(mean, 1), MOST_BYTES / max(longest, 1))
    return Decoding(max(1, int(batch_rows)), tuple(dictionaries))


def _fixed_width(file: pq.ParquetFile, place: int) -> int:
    """Bytes of each value of a column of FIXED_LEN_BYTE_ARRAY. Not asked of other columns: Arrow's `schema` and the footer keep
    each other, and 100 KB, until garbage is collected, and an input may have thousands of files."""
    return int(file.metadata.schema.column(place).length)


def _longest_value(chunk: pq.ColumnChunkMetaData, group: int, again: Open, head: Head) -> tuple[int, bool]:
    """Bytes of the longest value that many rows of a column chunk may share, and whether the column may be read as a dictionary,
    which has each value in memory once: all values of the chunk are in its dictionary, and each is that of two rows on average.
    With fewer rows each, as with images that all differ, nothing is saved: Arrow gives the whole dictionary with every batch.

    0 bytes: a batch of any rows is small, or no larger than their part of the file.
    """
    size = chunk.total_uncompressed_size
    unknown = min(size, MOST_BYTES // FEW_ROWS)
    if size * min(chunk.num_values, BATCH_ROWS) <= MOST_BYTES:
        return 0, False
    if size >= LARGE_BYTES * chunk.num_values and _all_differ(chunk, head):
        return size, False
    if chunk.has_dictionary_page or DICTIONARIES & {*chunk.encodings}:
        lengths = pc.binary_length(_dictionary(again, group, chunk.path_in_schema))
        others = size - (pc.sum(lengths).as_py() or 0) - INDEX_BYTES * (len(lengths) + chunk.num_values)
        saves = 2 * len(lengths) <= chunk.num_values
        return pc.max(lengths).as_py() or unknown, saves and others <= HEADER_BYTES
    return (unknown if "DELTA_BYTE_ARRAY" in chunk.encodings else 0), False


def _all_differ(chunk: pq.ColumnChunkMetaData, head: Head) -> bool:
    """Whether the dictionary of a column chunk has as many values as the chunk, by the header of its page. Source: PageHeader in
    parquet.thrift of the Parquet format, and Thrift's compact protocol."""
    if not chunk.has_dictionary_page or chunk.dictionary_page_offset is None:
        return False
    bytes_, field = iter(head(chunk.dictionary_page_offset, PAGE_HEADER_BYTES)), 0
    for byte in bytes_:
        field += byte >> 4
        if byte & 15 == I32:
            _number(bytes_)
        else:  # the dictionary's header, whose first field is the number
            is_there = (field, byte & 15) == (DICTIONARY_HEADER, STRUCT) and next(bytes_, 0) == 1 << 4 | I32
            return is_there and _number(bytes_) == chunk.num_values
    return False


def _number(bytes_: Iterator[int]) -> int:
    """The next int32 in the compact protocol: seven bits a byte, the lowest first, the sign in the lowest of all."""
    found = shift = 0
    for byte in bytes_:
        found |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return found >> 1 ^ -(found & 1)


def _dictionary(again: Open, group: int, path: str) -> pa.Array:
    """The dictionary of a column chunk; empty if it has no value, or a type that Arrow does not read as a dictionary."""
    with again([path]) as file:
        for batch in file.iter_batches(batch_size=FEW_ROWS, row_groups=[group], columns=[path], use_threads=False):
            array = batch.column(0)
            while pa.types.is_nested(array.type):
                array = array.flatten()[0] if pa.types.is_struct(array.type) else array.values
            if not pa.types.is_dictionary(array.type):
                break
            if len(array.dictionary):
                return array.dictionary
    return pa.array([], pa.string())


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
