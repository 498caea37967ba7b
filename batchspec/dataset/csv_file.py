"""CSV files as parts that can be read independently: a header, commas, double quotes. All cells are text.

A row that does not fit the header or is quoted wrongly becomes a bad row: a batch with this row alone, whose schema metadata has
the code and the message.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import pyarrow as pa

from batchspec.dataset import files
from batchspec.dataset.files import Part, check_same, reading
from batchspec.dataset.formats import TextStream
from batchspec.dataset.untyped_columns import CSV_MARK, text_array
from batchspec.errors import InputError
from batchspec.storage.places import Place
from batchspec.text import counted

BAD_CSV = "bad_csv"
MAX_CELL_CHARS = 1 << 26
"""A quote that is never closed makes a row of the lines up to this length, not of the rest of the file."""


class CsvFile:
    """The file is read once to find its rows; the first line names the columns."""

    def __init__(self, place: Place, name: str, codec: str | None = None) -> None:
        self.place, self.name = place, name
        csv.field_size_limit(MAX_CELL_CHARS)  # a setting of the whole process: the csv module has no other
        with reading(name):
            self._stamp = place.stamp()
            self.size_bytes = self._stamp.size_bytes
            self._text = TextStream(place, codec)
            self._text.check(name, self.size_bytes)
            lines = _Lines(self._text.at(0))
            header = next(_rows(lines), None)
            if isinstance(header, str):
                raise InputError(f"{name}: the header cannot be read ({header}); correct its first line")
            self._width = len(header or ())
            self.parts: Sequence[Part] = tuple(_parts(lines))
            self.digest = lines.digest.hexdigest()
            self._text.close()
        mark = {CSV_MARK: b""}
        names = [cell.decode("utf-8", "replace") for cell in header or ()]
        self.schema = pa.schema([pa.field(column, pa.string(), metadata=mark) for column in names])

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        block = self._text.block(self.name, part, last=part is self.parts[-1])
        places = [self.schema.get_field_index(name) for name in columns]
        schema = pa.schema([self.schema.field(name) for name in columns])
        good: list[list[bytes]] = []
        for row in _rows(_Lines(io.BytesIO(block))):
            said = row if isinstance(row, str) else ""
            if not isinstance(row, str) and len(row) != self._width:
                said = f"the row has {len(row)} cells, and the header names {self._width} columns"
            elif not isinstance(row, str):
                good.append(row)
                continue
            if good:
                yield _batch(good, places, schema)
                good = []
            marks = {"code": BAD_CSV, "message": f"{said}; correct the row"}
            nothing = [pa.nulls(1, pa.string())] * len(places)
            yield pa.RecordBatch.from_arrays(nothing, schema=schema.with_metadata(marks))
        if good:
            yield _batch(good, places, schema)

    def check(self) -> None:
        check_same(self.place, self.name, self._stamp)


class _Lines:
    """Lines of a file, and the number of bytes and lines taken: `csv.reader` takes the lines of one row at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.offset = 0
        self.digest, self.part = hashlib.sha256(), hashlib.sha256()

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> bytes:
        line = self._file.readline(MAX_CELL_CHARS)
        if not line:
            raise StopIteration
        self.offset += len(line)
        self.digest.update(line)
        self.part.update(line)
        return line


def _parts(lines: _Lines) -> Iterator[Part]:
    """Parts of about BATCH_BYTES, each up to the end of a row. `lines` has been read up to the end of the header."""
    start, num_rows = lines.offset, 0
    lines.part = hashlib.sha256()
    for _ in _rows(lines):
        num_rows += 1
        if lines.offset - start >= files.BATCH_BYTES:
            yield Part(num_rows=num_rows, size_bytes=lines.offset - start, place=start, digest=lines.part.digest())
            start, num_rows, lines.part = lines.offset, 0, hashlib.sha256()
    yield Part(num_rows=num_rows, size_bytes=lines.offset - start, place=start, digest=lines.part.digest())


def _rows(lines: Iterator[bytes]) -> Iterator[list[bytes] | str]:
    """Each row's cells as bytes, or what is wrong with it. Blank lines are not rows."""
    first_line, reader = 0, csv.reader((line.decode("utf-8", "surrogateescape") for line in lines), strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            count, first_line = reader.line_num - first_line, reader.line_num
            if "end of data" in str(error) or "field limit" in str(error):
                yield f"a quote in it is never closed: {counted(count - 1, 'line')} after it became part of its text"
            else:
                yield f"it is not valid CSV ({error})"
            continue
        first_line = reader.line_num
        if row:
            yield [cell.encode("utf-8", "surrogateescape") for cell in row]


def _batch(rows: Sequence[Sequence[bytes]], places: Sequence[int], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([text_array([row[place] for row in rows]) for place in places], schema=schema)
