"""One input file as parts that can be read by themselves: the row groups of Parquet, blocks of lines of JSON lines."""

from __future__ import annotations

import errno
import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from batchspec.errors import InputError, StorageError
from batchspec.io.places import LocalPlace, Place

PARQUET = (".parquet", ".pq")
JSON_LINES = (".jsonl", ".ndjson", ".json")
BATCH_BYTES = 4 << 20
"""Rows are decoded in batches of about this size: what a reader holds beyond the tables it has given out."""
BATCH_ROWS = 4096
DIGEST_BYTES = 1 << 20
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    num_rows: int
    size_bytes: int
    """Decoded (Parquet) or as it lies in the file (JSON lines)."""
    place: int
    """Number of the row group, or byte offset of the block."""


class DataFile(Protocol):
    name: str
    size_bytes: int
    digest: str
    """sha256 that tells two contents of the file apart."""
    schema: pa.Schema
    parts: Sequence[Part]

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]: ...


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise what a reader raises as one line: StorageError where the disk or network failed, InputError where the file is bad."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        if isinstance(error, OSError) and error.errno in PASSING:
            raise StorageError(f"{name}: reading failed: {reason}; run the same command again after the repair") from error
        raise InputError(f"{name}: cannot be read: {reason}; repair the file or leave it out of input.path") from error


class ParquetFile:
    """Pages are read and decoded as they are needed: a row group of any size costs a few MB."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name = place, name
        self._footer: pq.FileMetaData | None = None
        """While a pass over the file lasts, so that its row groups do not each read it."""
        with reading(name):
            self.size_bytes = place.size()
            self.digest = _ends_digest(place, self.size_bytes)
            with self._open() as file:
                footer = file.metadata
                self.schema = file.schema_arrow
                groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
        self.parts: Sequence[Part] = tuple(
            Part(num_rows=group.num_rows, size_bytes=group.total_byte_size, place=i) for i, group in enumerate(groups)
        )

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES * part.num_rows // max(part.size_bytes, 1)))
        with reading(self.name), self._open() as file:
            self._footer = None if part is self.parts[-1] else file.metadata
            yield from file.iter_batches(batch_size=rows, row_groups=[part.place], columns=columns, use_threads=False)

    def _open(self) -> pq.ParquetFile:
        # A buffer size makes Arrow stream the pages; without it a whole column chunk is read at once.
        source = str(self.place.path) if isinstance(self.place, LocalPlace) else self.place.open()
        return pq.ParquetFile(
            source,
            metadata=self._footer,
            memory_map=False,
            pre_buffer=False,
            buffer_size=1 << 20,
            page_checksum_verification=True,
        )


class JsonLinesFile:
    """One JSON object a line. The file is read once to find its rows and columns: a key that a line lacks is null."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name = place, name
        self.schema = pa.schema([])
        parts: list[Part] = []
        num_rows = 0
        digest = hashlib.sha256()
        with reading(name):
            self.size_bytes = place.size()
            for offset, block in self._blocks():
                digest.update(block)
                with reading(f"{name} after row {num_rows}"):
                    table = _parse(block, None)
                    self.schema = widen(self.schema, table.schema)
                num_rows += table.num_rows
                parts.append(Part(num_rows=table.num_rows, size_bytes=len(block), place=offset))
        self.digest = digest.hexdigest()
        self.parts: Sequence[Part] = tuple(parts)

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with reading(self.name), _buffered(self.place) as file:
            file.seek(part.place)
            schema = pa.schema([self.schema.field(name) for name in columns])
            yield from _parse(file.read(part.size_bytes), schema).to_batches()

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        with _buffered(self.place) as file:
            offset = 0
            while block := file.read(BATCH_BYTES):
                block += file.readline()
                yield offset, block
                offset += len(block)


class MemoryFile:
    """A table that is already in memory."""

    def __init__(self, table: pa.Table, name: str) -> None:
        self.name, self.table = name, table
        self.schema = table.schema
        self.size_bytes = table.nbytes
        digest = hashlib.sha256()
        for batch in table.to_batches():
            digest.update(batch.serialize())
        self.digest = digest.hexdigest()
        self.parts: Sequence[Part] = (Part(num_rows=table.num_rows, size_bytes=table.nbytes, place=0),)

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        yield from self.table.select(columns).to_batches(max_chunksize=BATCH_ROWS)


def _buffered(place: Place) -> BinaryIO:
    file = place.open()
    return file if isinstance(place, LocalPlace) else io.BufferedReader(file, BATCH_BYTES)  # type: ignore[type-var]


def _ends_digest(place: Place, size: int) -> str:
    """Of the first and last MiB: all of a small file; of a large one its beginning and the footer with its statistics."""
    digest = hashlib.sha256()
    with place.open() as file:
        digest.update(file.read(DIGEST_BYTES))
        file.seek(max(file.tell(), size - DIGEST_BYTES))
        digest.update(file.read(DIGEST_BYTES))
    return digest.hexdigest()


def widen(left: pa.Schema, right: pa.Schema) -> pa.Schema:
    """The schema that holds rows of both: integers widen to floats, structs gain fields. Raises ArrowException if none does."""
    return pa.unify_schemas([left, right], promote_options="permissive")


def _parse(block: bytes, schema: pa.Schema | None) -> pa.Table:
    table = pa_json.read_json(
        pa.BufferReader(block),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
        parse_options=pa_json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
        ),
    )
    if schema is not None:
        return table.select(schema.names)
    # Arrow takes text that looks like a date for a timestamp: text it is.
    plain = pa.schema([pa.field(field.name, _without_dates(field.type)) for field in table.schema])
    return table if plain == table.schema else _parse(block, plain)


def _without_dates(kind: Any) -> pa.DataType:
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _without_dates(field.type)) for field in kind])
    return kind
