"""One input file as parts that can be read independently (`DataFile`): Parquet files, whose parts are row groups; tables in
memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.data.dataset.decoding import BATCH_BYTES as BATCH_BYTES
from batchspec.data.dataset.decoding import BATCH_ROWS, Decoding, decoding_of
from batchspec.data.dataset.lines import LineNumbers
from batchspec.data.storage.exact_files import parquet_file
from batchspec.data.storage.places import LocalPlace, Place
from batchspec.data.storage.remote_files import Stamp
from batchspec.errors import CapacityError, InputError, StorageError
from batchspec.process.local_files import passes, told
from batchspec.process.refusals import raise_refusal

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".arrows", ".feather", ".ipc")
JSON_LINES = (".jsonl", ".ndjson", ".json")
DIGEST_BYTES = 256 << 20
"""Bytes of the whole input's Parquet and Arrow files that are read for their digests; smaller inputs are read completely."""
DIGEST_BLOCKS = 8
SMALLEST_BLOCK = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    num_rows: int
    size_bytes: int
    """Decoded size (Parquet) or size in the file (JSON lines, CSV)."""
    place: int
    """Number of the row group, or byte offset of the block."""
    digest: bytes = b""
    """sha256 of the block; empty for a row group."""
    too_long: bool = False
    """The block is one line that is too long to be read (lines.py)."""


class DataFile(Protocol):
    name: str
    size_bytes: int
    digest: str
    """sha256 that distinguishes contents of the file."""
    schema: pa.Schema
    parts: Sequence[Part]

    @property
    def lines(self) -> LineNumbers | None:
        """Where each row begins in a file of text, or which row it is of a file that has others; None: row i is row i."""

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The part's rows. A bad row is a batch of its own; its metadata have `code` and `message`.

        A column of text or bytes may be dictionaries of its type: what is long and shared by rows is not repeated.
        """

    def check(self) -> None:
        """Raise InputError if the file is no longer the one that was opened; does not read its content."""

    def digest_of(self, digest_bytes: int) -> str:
        """The digest that the file has if so many bytes are read for it. Raises InputError or StorageError."""


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Within this block, raise a reader's errors in one line: StorageError for disk or network, InputError for a bad file,
    CapacityError without memory, threads or more open files."""
    try:
        yield
    except MemoryError as error:  # Arrow's too
        raise CapacityError(
            f"{name}: out of memory while it was read ({str(error).strip() or type(error).__name__}); free the machine's memory, "
            "leave long columns out of output.passthrough, or lower output.shard_rows, and run the command again"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise_refusal(error)
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = (f"{error.filename}: " if error.filename else "") + told(error)
        if passes(error):
            raise StorageError(f"{name}: reading failed: {reason}; run the same command again after the repair") from error
        raise InputError(f"{name}: cannot be read: {reason}; repair the file or leave it out of input.path") from error


def check_same(place: Place, name: str, opened: Stamp) -> None:
    """Raise InputError if the file was replaced or changed since it was opened."""
    with reading(name):
        now = place.stamp()
    if now != opened:
        same_size = now.size_bytes == opened.size_bytes
        raise changed(name, "it was written anew" if same_size else f"{opened.size_bytes:,} bytes -> {now.size_bytes:,}")


def changed(name: str, what: str) -> InputError:
    return InputError(
        f"{name} changed while the job runs ({what}): nothing more of it is committed; put the old file back and run the same "
        "command again, or start anew with output.overwrite=true"
    )


class ParquetFile:
    """A Parquet file. Pages are read and decoded as they are needed: a row group of any size takes a few MB of memory.

    digest_bytes  number of bytes to read for the digest
    """

    lines = None

    def __init__(self, place: Place, name: str, digest_bytes: int = DIGEST_BYTES) -> None:
        self.place, self.name = place, name
        self._footer: pq.FileMetaData | None = None
        """The footer, kept while the file is being read so that it is not read again for each row group."""
        self._decodings: dict[tuple[int, tuple[str, ...]], Decoding] = {}
        """By row group and columns."""
        with reading(name):
            self._stamp = place.stamp()
            self.size_bytes = self._stamp.size_bytes
            with self._open() as file:
                footer = file.metadata
                self.schema = pa.schema([pa.field(field.name, field.type) for field in file.schema_arrow])  # no marks
                groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
            self._footer_start = self.size_bytes - 8 - footer.serialized_size
            """Its sizes, offsets and statistics of all column chunks are part of the digest."""
            self.digest = self.digest_of(digest_bytes)
        self.parts: Sequence[Part] = tuple(
            Part(num_rows=group.num_rows, size_bytes=group.total_byte_size, place=i) for i, group in enumerate(groups)
        )

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with reading(self.name):
            decoding = self._decoding(part.place, columns)
            with self._open(decoding.dictionaries) as file:
                self._footer = None if part is self.parts[-1] else file.metadata
                batches = file.iter_batches(
                    batch_size=decoding.batch_rows, row_groups=[part.place], columns=columns, use_threads=False
                )
                yield from decoding.typed(batches, self.schema)

    def _decoding(self, group: int, columns: list[str]) -> Decoding:
        key = group, tuple(columns)
        if key not in self._decodings:
            with self._open() as file:
                self._footer = file.metadata
                self._decodings[key] = decoding_of(file, group, columns, self._open, self._head)
        return self._decodings[key]

    def _head(self, begin: int, count: int) -> bytes:
        with self.place.open() as file:
            file.seek(begin)
            return file.read(count)

    def check(self) -> None:
        check_same(self.place, self.name, self._stamp)

    def digest_of(self, digest_bytes: int) -> str:
        with reading(self.name):
            return digest_of(self.place, self.size_bytes, digest_bytes, [(self._footer_start, self.size_bytes)])

    def _open(self, dictionaries: Sequence[str] = ()) -> AbstractContextManager[pq.ParquetFile]:
        """The file, with the columns at these paths read as dictionaries."""
        # A buffer size makes Arrow stream the pages; without it a whole column chunk is read at once.
        options: dict[str, Any] = {
            "pre_buffer": False,
            "buffer_size": 1 << 20,
            "page_checksum_verification": True,
            "metadata": self._footer,
            "read_dictionary": dictionaries or None,
        }
        if isinstance(self.place, LocalPlace):
            return parquet_file(self.place.path, **options)
        opened: AbstractContextManager[pq.ParquetFile] = pq.ParquetFile(self.place.open(), **options)
        return opened


class MemoryFile:
    """A table that is already in memory."""

    name = "table"
    lines = None

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.schema = table.schema
        self.size_bytes = table.nbytes
        digest = hashlib.sha256()
        for batch in table.to_batches():
            digest.update(batch.serialize())
        self.digest = digest.hexdigest()
        self.parts: Sequence[Part] = (Part(num_rows=table.num_rows, size_bytes=table.nbytes, place=0),)

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        yield from self.table.select(columns).to_batches(max_chunksize=BATCH_ROWS)

    def check(self) -> None:
        pass

    def digest_of(self, digest_bytes: int) -> str:
        return self.digest


def digest_of(place: Place, size: int, most: int, headers: Sequence[tuple[int, int]]) -> str:
    """sha256 of the whole file, or of about `most` bytes of it: evenly spread blocks, including the first and last bytes, and
    these ranges, which describe the content, up to the last block.
    """
    block = max(most // DIGEST_BLOCKS, SMALLEST_BLOCK)
    digest = hashlib.sha256()

    def add(start: int, stop: int) -> None:
        file.seek(start)
        while start < stop and (data := file.read(min(BATCH_BYTES, stop - start))):
            digest.update(data)
            start += len(data)

    with place.open() as file:
        if size <= DIGEST_BLOCKS * block:
            add(0, size)
        else:
            for i in range(DIGEST_BLOCKS):
                start = i * (size - block) // (DIGEST_BLOCKS - 1)
                add(start, start + block)
            for start, stop in headers:
                add(start, min(stop, size - block))
    return digest.hexdigest()
