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

from batchspec.console.text import counted
from batchspec.data.dataset import files
from batchspec.data.dataset.files import Part, check_same, reading
from batchspec.data.dataset.formats import TextStream
from batchspec.data.dataset.lines import LineNumbers, LongLine, lines_of
from batchspec.data.dataset.untyped_columns import CSV_MARK, text_array
from batchspec.data.storage.places import Place
from batchspec.errors import InputError

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
            text = _Lines(self._text.at(0))
            header = next(_rows(text), None)
            if isinstance(header, str | LongLine):
                raise InputError(f"{name}: the header cannot be read ({_problem(header)}); correct its first line")
            self._width = len(header or ())
            self.lines = LineNumbers()
            self.parts: Sequence[Part] = tuple(_parts(text, self.lines))
            self.digest = text.digest.hexdigest()
            self._text.close()
        mark = {CSV_MARK: b""}
        names = [cell.decode("utf-8", "replace") for cell in header or ()]
        self.schema = pa.schema([pa.field(column, pa.string(), metadata=mark) for column in names])

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        places = [self.schema.get_field_index(name) for name in columns]
        schema = pa.schema([self.schema.field(name) for name in columns])
        good: list[list[bytes]] = []
        for row in self._rows_of(part):
            if isinstance(row, list) and len(row) == self._width:
                good.append(row)
                continue
            said = f"the row has {len(row)} cells, and the header names {self._width} columns" if isinstance(row, list) else row
            if good:
                yield _batch(good, places, schema)
                good = []
            marks = {"code": BAD_CSV, "message": f"{_problem(said)}; correct the row"}
            nothing = [pa.nulls(1, pa.string())] * len(places)
            yield pa.RecordBatch.from_arrays(nothing, schema=schema.with_metadata(marks))
        if good:
            yield _batch(good, places, schema)

    def _rows_of(self, part: Part) -> Iterator[list[bytes] | str | LongLine]:
        last = part is self.parts[-1]
        if part.too_long:
            return iter([self._text.skipped(self.name, part, last=last)])
        return _rows(_Lines(io.BytesIO(self._text.block(self.name, part, last=last))))

    def check(self) -> None:
        check_same(self.place, self.name, self._stamp)

    def digest_of(self, digest_bytes: int) -> str:
        return self.digest


class _Lines:
    """Lines of a text, and how much of it was taken: `csv.reader` takes the lines of one row at a time, up to a long line."""

    def __init__(self, file: BinaryIO) -> None:
        self._lines = lines_of(file)
        self.offset, self.num_lines = 0, 0
        self.first_of_row = 1
        """Number of the line on which the newest row begins, from 1."""
        self.digest, self.part = hashlib.sha256(), hashlib.sha256()
        self.long_line: LongLine | None = None
        """The line that comes next, if it is too long."""

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.long_line or next(self._lines)
        if isinstance(line, LongLine):
            self.long_line = line
            raise StopIteration
        self.offset += len(line)
        self.num_lines += 1
        self.digest.update(line)
        self.part.update(line)
        return line.decode("utf-8", "surrogateescape")

    def pass_long_line(self) -> LongLine | None:
        line, self.long_line = self.long_line, None
        if line is not None:
            self.first_of_row = self.num_lines = self.num_lines + 1
            self.offset += line.size_bytes
            self.digest.update(line.digest)
        return line


def _parts(text: _Lines, lines: LineNumbers) -> Iterator[Part]:
    """Parts of about BATCH_BYTES, each up to the end of a row; a line that is too long is a part of its own. `text` has been read
    up to the end of the header. The rows are added to `lines`.
    """
    start, num_rows = text.offset, 0
    text.part = hashlib.sha256()
    for index, row in enumerate(_rows(text)):
        lines.add(index, text.first_of_row)
        end = text.offset - (row.size_bytes if isinstance(row, LongLine) else 0)
        num_rows += not isinstance(row, LongLine)
        if end - start >= files.BATCH_BYTES or (isinstance(row, LongLine) and num_rows):
            yield Part(num_rows=num_rows, size_bytes=end - start, place=start, digest=text.part.digest())
            start, num_rows, text.part = end, 0, hashlib.sha256()
        if isinstance(row, LongLine):
            yield Part(num_rows=1, size_bytes=row.size_bytes, place=end, digest=row.digest, too_long=True)
            start, num_rows, text.part = text.offset, 0, hashlib.sha256()
    yield Part(num_rows=num_rows, size_bytes=text.offset - start, place=start, digest=text.part.digest())


def _rows(text: _Lines) -> Iterator[list[bytes] | str | LongLine]:
    """Each row's cells as bytes, or what is wrong with it. Blank lines are not rows."""
    while True:
        yield from _short_rows(text)
        line = text.pass_long_line()
        if line is None:
            return
        yield line


def _short_rows(text: _Lines) -> Iterator[list[bytes] | str]:
    """The rows up to a line that is too long."""
    first_line, reader = 0, csv.reader(text, strict=True)
    while True:
        text.first_of_row = text.num_lines + 1
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
        if any("\0" in cell for cell in row):
            yield "it has a NUL byte"
        elif row:
            yield [cell.encode("utf-8", "surrogateescape") for cell in row]


def _problem(row: str | LongLine) -> str:
    return row.problem if isinstance(row, LongLine) else row


def _batch(rows: Sequence[Sequence[bytes]], places: Sequence[int], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([text_array([row[place] for row in rows]) for place in places], schema=schema)
