"""The input dataset as a stream of shards: files in order of name, rows in order, in bounded memory."""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import pyarrow as pa

from batchspec.config.schema import InputConfig
from batchspec.data.dataset.arrow_file import ArrowFile
from batchspec.data.dataset.common_schema import FileOfDataset, common_schema, files_of_dataset
from batchspec.data.dataset.csv_file import CsvFile
from batchspec.data.dataset.decoding import short_pieces
from batchspec.data.dataset.files import DIGEST_BYTES, DataFile, MemoryFile, ParquetFile, Part, changed
from batchspec.data.dataset.formats import format_of
from batchspec.data.dataset.input_paths import check_apart, entries_of, find_files
from batchspec.data.dataset.json_lines import JsonLinesFile
from batchspec.data.dataset.lines import LineNumbers
from batchspec.data.dataset.pdf_file import ListPages, PdfFile
from batchspec.data.dataset.shard_layout import ShardLayout
from batchspec.data.storage.places import Place, RemotePlace
from batchspec.errors import ConfigError, InputError

T = TypeVar("T")

OPENED_AT_ONCE = 16
"""Number of remote files that are opened concurrently, because opening one mostly waits for the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    name: str
    """Relative to the folder that input.path names, or to the folder that all its entries have in common."""
    size_bytes: int
    num_rows: int
    digest: str
    """Differs between two contents with the same name, size and row count (see files.py)."""

    @property
    def identity(self) -> tuple[str, int, int, str]:
        """The values by which a job or a training recognises the file that it read."""
        return self.name, self.size_bytes, self.num_rows, self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Why some or all cells of a row are null."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputShard:
    """The input rows that are committed as one output file."""

    index: int
    first_row: int
    """Index of the table's first row in the whole input."""
    table: pa.Table
    """The columns that the source reads. Some of text or bytes may be dictionaries of their type, which `Source.schema` has."""
    bad: Mapping[int, Unreadable] = field(default_factory=dict)
    """Row index in the whole input -> why the row cannot be read."""

    def only(self, row: int) -> InputShard:
        """The shard with this one of its rows, which is an index in the whole input."""
        bad = {row: self.bad[row]} if row in self.bad else {}
        return replace(self, first_row=row, table=self.table.slice(row - self.first_row, 1), bad=bad)


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """The facts about a `Source`, without the means to read it, so that they can be sent to another process."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    lines: tuple[LineNumbers | None, ...]
    """Of each file: where its rows begin, if it is text."""


class Source(Protocol):
    """A dataset that can be read repeatedly, always in the same order."""

    num_rows: int
    """Number of rows, at most input.limit."""
    files: tuple[InputFile, ...]
    schema: pa.Schema
    lines: tuple[LineNumbers | None, ...]
    """As in `SourceFacts`."""
    filled_by_requests: frozenset[str] | None
    """The columns that all of OpenAI's requests in the input fill; None: it holds none."""

    def reading(self, names: Sequence[str]) -> Source:
        """The same dataset, with no other columns than these in its shards."""

    def shards(self, layout: ShardLayout | int, skip: Container[int] = ()) -> Iterator[InputShard]:
        """The input as shards; those in `skip` are left out.

        layout  which rows each shard holds; a number: so many in each

        A row group whose rows all belong to skipped shards is not read. Raises InputError at a damaged page, and if a file of the
        shard was replaced or changed since it was opened, or has fewer rows than then.
        """

    def alone(self, num_files: int) -> SourceFacts:
        """File facts of a prefix of the input, for comparing with the job before it was extended. They differ from those in the
        whole input: a file's digest depends on the number of files, and the columns of JSON lines on the rows of all files.
        Raises InputError for a file that cannot be read.
        """

    def check(self, first: int, stop: int) -> None:
        """Raise InputError if a file with rows first .. stop - 1 was replaced or changed since it was opened (one `stat` or HEAD
        a file); StorageError.
        """

    def column(self, name: str) -> Iterator[pa.Array]:
        """The column in arrays of its type; other columns are not read. An unreadable row may be null."""

    def ids(self, name: str) -> Iterator[pa.Array]:
        """As `column`, for the column of ids. An unreadable row without an id is a text array of its own: its derived id."""


def open_source(config: InputConfig, output_dir: str | None = None) -> Source:
    """The dataset at `config.path`: a Parquet, Arrow, JSON-lines, CSV or PDF file, a folder, a glob or a list, local or remote.

    output_dir  the folder that the job will write to, which must not be a part of the input

    Reads footers and headers (JSON lines, CSV and PDFs: the whole file once). Raises ConfigError without a path, or if the input
    includes output_dir, and InputError if a path does not exist or matches nothing, a file cannot be read, two files disagree
    about a column, or there are no rows.
    """
    if not config.path:
        raise ConfigError("input.path is not set; give a Parquet, Arrow, JSON-lines, CSV or PDF file, a folder, a glob or a list")
    entries = entries_of(config.path)
    if output_dir is not None:
        check_apart(entries, output_dir)
    found, drop = find_files(entries, config.config_name, config.split), config.drop
    # All files, whatever input.limit: the job's manifest names each, so that a resumed or extended job can say which one is
    # missing or has changed, and tell that from another limit.
    with closing(ListPages()) as pages:
        return source_of(open_files(found, lambda name, place, share: _open(name, place, share, drop, pages)), config.limit)


def open_files(found: Mapping[str, Place], opened: Callable[[str, Place, int], T]) -> list[T]:
    """What `opened` makes of each file, given its name, its place, and the number of bytes to read for its digest. Remote files
    are opened concurrently."""
    remote = any(isinstance(place, RemotePlace) for place in found.values())
    with ThreadPoolExecutor(OPENED_AT_ONCE if remote else 1) as pool:
        share = DIGEST_BYTES // len(found)
        return list(pool.map(lambda name, place: opened(name, place, share), found, found.values()))


def source_of(files: Sequence[DataFile], limit: int | None = None) -> Source:
    """The files as one dataset. Raises InputError if two disagree about a column, or if there are no rows."""
    return _FileSource(files, limit)


def _open(name: str, place: Place, digest_bytes: int, drop: Collection[str], pages: ListPages) -> DataFile:
    form = format_of(place.path)
    if form is None or form.kind == "parquet":
        return ParquetFile(place, name, digest_bytes)
    if form.kind == "arrow":
        return ArrowFile(place, name, digest_bytes)
    if form.kind == "jsonl":
        return JsonLinesFile(place, name, form.codec, drop)
    return PdfFile(place, name, pages) if form.kind == "pdf" else CsvFile(place, name, form.codec)


def table_source(table: pa.Table, limit: int | None = None) -> Source:
    """A table in memory as a dataset of one file named `table`. Raises InputError if it has no rows."""
    return source_of([MemoryFile(table)], limit)


def locate(files: Sequence[InputFile], row: int) -> tuple[str, int]:
    """File name, and row index in that file, of a row of the whole input."""
    for file in files:
        if row < file.num_rows:
            return file.name, row
        row -= file.num_rows
    raise IndexError(f"the input has no row {row}")


def place_in_file(source: Source | SourceFacts, row: int) -> str:
    """Where a row of the whole input is, for a message: `FILE line N` in a file of text, counted from 1 as editors count; else
    `FILE row N`, counted from 0 as in row_index.
    """
    ((name, kind, number),) = _places(source, row, row + 1)
    return f"{name} {kind} {number}"


def derived_ids(source: Source | SourceFacts, first: int, stop: int) -> list[str]:
    """The ids of rows that have none of their own: `FILE:N`, with the number by which messages name the row."""
    return [f"{name}:{number}" for name, _, number in _places(source, first, stop)]


def _places(source: Source | SourceFacts, first: int, stop: int) -> Iterator[tuple[str, str, int]]:
    """Of rows of the whole input: the file, "line" or "row", and the number of the line or row in the file."""
    start = 0
    for file, lines in zip(source.files, source.lines, strict=True):
        for row in range(max(first - start, 0), min(stop - start, file.num_rows)):
            yield (file.name, "row", row) if lines is None else (file.name, lines.unit, lines[row])
        start += file.num_rows


class _FileSource:
    def __init__(self, files: Sequence[DataFile], limit: int | None) -> None:
        self.files = tuple(_facts_of(file, file.digest) for file in files)
        self._all = files
        self.lines = tuple(file.lines for file in files)
        rows = sum(file.num_rows for file in self.files)
        self.num_rows = rows if limit is None else min(rows, limit)
        if not self.num_rows:
            names = ", ".join(file.name for file in self.files[:3])
            more = f" and {len(self.files) - 3} more files" if len(self.files) > 3 else ""
            raise InputError(f"the input has no rows: none in {names}{more}; check input.path")
        self.schema, self._files = files_of_dataset([data for data, file in zip(files, self.files, strict=True) if file.num_rows])
        filled = [file.filled for file in files if isinstance(file, JsonLinesFile) and file.filled is not None]
        self.filled_by_requests = frozenset.intersection(*filled) if filled else None
        self._names: list[str] = self.schema.names
        self._stops = list(itertools.accumulate(file.num_rows for file in self.files if file.num_rows))

    def reading(self, names: Sequence[str]) -> Source:
        same = copy.copy(self)
        same._names = [name for name in self.schema.names if name in names]
        return same

    def shards(self, layout: ShardLayout | int, skip: Container[int] = ()) -> Iterator[InputShard]:
        shards = layout if isinstance(layout, ShardLayout) else ShardLayout.even(self.num_rows, layout)

        def wanted(first: int, stop: int) -> bool:
            return any(index not in skip for index in range(shards.shard_of(first), shards.shard_of(stop - 1) + 1))

        pieces: list[pa.RecordBatch] = []
        bad: dict[int, Unreadable] = {}
        for batch_first, batch, why in self._batches(self._names, wanted):
            first, rest = batch_first, batch
            while rest.num_rows:
                index = shards.shard_of(first)
                rows = shards.rows_of(index)
                piece = rest.slice(0, rows.stop - first)
                rest = rest.slice(piece.num_rows)
                first += piece.num_rows
                if index in skip:
                    continue
                pieces.append(piece)
                if why is not None:
                    bad[batch_first] = why
                if first == rows.stop:
                    table = _table(pieces)
                    pieces.clear()
                    self.check(rows.start, rows.stop)
                    yield InputShard(index=index, first_row=rows.start, table=table, bad=bad)
                    bad = {}
                    del table

    def alone(self, num_files: int) -> SourceFacts:
        files = self._all[:num_files]
        share = DIGEST_BYTES // max(1, num_files)
        facts = tuple(_facts_of(file, file.digest_of(share)) for file in files)
        filled = [file for file, fact in zip(files, facts, strict=True) if fact.num_rows]
        return SourceFacts(facts, common_schema(filled) if filled else pa.schema([]), self.lines[:num_files])

    def check(self, first: int, stop: int) -> None:
        for file in self._files[bisect_right(self._stops, first) : bisect_left(self._stops, stop) + 1]:
            file.check()

    def column(self, name: str) -> Iterator[pa.Array]:
        return (column for _, column, _ in self._pieces(name))

    def ids(self, name: str) -> Iterator[pa.Array]:
        for first, column, why in self._pieces(name):
            unnamed = why is not None and column.null_count
            yield pa.array(derived_ids(self, first, first + 1)) if unnamed else column

    def _pieces(self, name: str) -> Iterator[tuple[int, pa.Array, Unreadable | None]]:
        """One column of `_batches`."""
        kind = self.schema.field(name).type
        for first, batch, why in self._batches([name], lambda first, stop: True):
            for piece in short_pieces(batch.column(0)):
                yield first, piece if piece.type == kind else piece.dictionary_decode(), why
                first += len(piece)

    def _batches(
        self, names: list[str], wanted: Callable[[int, int], bool]
    ) -> Iterator[tuple[int, pa.RecordBatch, Unreadable | None]]:
        """Batches of the parts that hold a wanted row, up to the limit: (index of the first row, batch, why it is unreadable). An
        unreadable row is a batch of its own.
        """
        plain = pa.schema([self.schema.field(name) for name in names])
        part_first = 0
        for file in self._files:
            for part in file.parts:
                stop = min(part_first + part.num_rows, self.num_rows)
                first = part_first
                if first < stop and wanted(first, stop):
                    for batch in _rows_of(file, part, names, stop - first):
                        if batch.num_rows:
                            columns = [batch.column(name) for name in names]
                            types = [column.type for column in columns]
                            schema = plain if types == plain.types else pa.schema(map(pa.Field.with_type, plain, types))
                            marks = batch.schema.metadata or {}
                            why = None
                            if b"code" in marks:
                                why = Unreadable(code=marks[b"code"].decode(), message=marks[b"message"].decode())
                            yield first, pa.RecordBatch.from_arrays(columns, schema=schema), why
                        first += batch.num_rows
                part_first += part.num_rows


def _rows_of(file: FileOfDataset, part: Part, names: list[str], most: int) -> Iterator[pa.RecordBatch]:
    """At most so many rows of a part. Raises InputError if all are read and there are not as many as when it was opened."""
    num_rows = 0
    try:
        for batch in file.read(part, names):
            yield batch.slice(0, most - num_rows)
            num_rows += batch.num_rows
            if num_rows >= most < part.num_rows:
                return
    except InputError:
        file.check()  # raises an error that says why, if the file has changed
        raise
    if num_rows != part.num_rows:
        file.check()
        raise changed(file.name, f"{num_rows:,} rows where {part.num_rows:,} were")


def _table(pieces: Sequence[pa.RecordBatch]) -> pa.Table:
    """The batches as one table. A column that is a dictionary in one of them becomes one in all."""
    fields = list(pieces[0].schema)
    if all(piece.schema == pieces[0].schema for piece in pieces):
        return pa.Table.from_batches(pieces)
    for piece in pieces:
        fields = [new if pa.types.is_dictionary(new.type) else old for old, new in zip(fields, piece.schema, strict=True)]
    columns = []
    for place, wanted in enumerate(fields):
        chunks = (piece.column(place) for piece in pieces)
        columns.append(pa.chunked_array([one if one.type == wanted.type else one.dictionary_encode() for one in chunks]))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _facts_of(file: DataFile, digest: str) -> InputFile:
    rows = sum(part.num_rows for part in file.parts)
    return InputFile(name=file.name, size_bytes=file.size_bytes, num_rows=rows, digest=digest)
