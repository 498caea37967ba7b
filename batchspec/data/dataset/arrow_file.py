"""Arrow IPC files as parts that can be read independently: streams, as `datasets` saves them, and the file format, which is
Feather version 2. A part is a record batch; the columns that are asked for are in memory as a whole.

Opening reads the headers of the record batches, which have the numbers of rows, and passes over their bodies. The footer of the
file format says where they are; in a stream each message says where the next one begins.

Source: https://arrow.apache.org/docs/format/Columnar.html, "Serialization and Interprocess Communication"; Message.fbs, File.fbs
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.ipc as ipc

from batchspec.data.dataset.decoding import BATCH_ROWS
from batchspec.data.dataset.files import DIGEST_BYTES, Part, check_same, digest_of, reading
from batchspec.data.storage.places import LocalPlace, Place
from batchspec.errors import InputError

MAGIC, FEATHER_1 = b"ARROW1", b"FEA1"
SCHEMA, DICTIONARY, BATCH = 1, 2, 3
HEADER_READ_BYTES = 64 << 10
BLOCK_BYTES = 24
_PLAIN = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_CONTINUES = b"\xff\xff\xff\xff"


@dataclass(frozen=True, slots=True)
class _Message:
    kind: int
    """SCHEMA, DICTIONARY or BATCH."""
    start: int
    body: int
    stop: int
    """Offsets of the header, the body and the message's end."""
    num_rows: int = 0
    """Of a record batch."""
    dictionary: int = 0
    """Id of a dictionary."""
    is_delta: bool = False
    """Whether a dictionary is added to the one of the same id, and does not replace it."""


class ArrowFile:
    """An Arrow IPC file or stream. digest_bytes: number of bytes to read for the digest."""

    lines = None

    def __init__(self, place: Place, name: str, digest_bytes: int = DIGEST_BYTES) -> None:
        self.place, self.name = place, name
        with reading(name):
            self._stamp = place.stamp()
            self.size_bytes = self._stamp.size_bytes
            with self._open() as file:
                begin = file.read(8)
                if begin.startswith(FEATHER_1):
                    raise InputError(f"{name} is Feather version 1; write it as Parquet: pandas.read_feather(F).to_parquet(NEW)")
                self._is_stream = not begin.startswith(MAGIC)
                try:
                    found = _of_stream(file, self.size_bytes) if self._is_stream else _of_file(file, self.size_bytes)
                    self._messages = list(found)
                    self._batches = [message for message in self._messages if message.kind == BATCH]
                    with self._reader() as reader:
                        self._fields = reader.schema.names
                        self.schema = pa.schema([pa.field(field.name, _readable(field, name)) for field in reader.schema])
                except (struct.error, IndexError, EOFError, UnicodeDecodeError):
                    raise InputError(
                        f"{name} is cut off, or no Arrow IPC data: write it again, or let its name say what it is"
                    ) from None
            self.digest = self.digest_of(digest_bytes)
        self.parts: Sequence[Part] = tuple(
            Part(num_rows=message.num_rows, size_bytes=message.stop - message.body, place=at)
            for at, message in enumerate(self._batches)
        )

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with reading(self.name):
            options = ipc.IpcReadOptions(included_fields=[self._fields.index(name) for name in columns], use_threads=False)
            with self._reader(part.place, options) as reader:
                batch = reader.read_next_batch() if self._is_stream else reader.get_batch(part.place)
            batch.validate(full=True)  # Arrow trusts offsets, and a wrong one would end the process
            kinds = [self.schema.field(column).type for column in columns]
            arrays = [_typed(batch.column(column), kind) for column, kind in zip(columns, kinds, strict=True)]
            batch = pa.RecordBatch.from_arrays(arrays, names=columns)
            yield from (batch.slice(first, BATCH_ROWS) for first in range(0, batch.num_rows, BATCH_ROWS))

    def check(self) -> None:
        check_same(self.place, self.name, self._stamp)

    def digest_of(self, digest_bytes: int) -> str:
        with reading(self.name):
            headers = [(message.start, message.body) for message in self._messages]
            return digest_of(self.place, self.size_bytes, digest_bytes, headers)

    @contextmanager
    def _reader(self, batch: int | None = None, options: ipc.IpcReadOptions | None = None) -> Iterator[Any]:
        """A reader of the file, or of a stream that has this batch alone."""
        with self._open() as file:
            if not self._is_stream:
                with ipc.open_file(file, options=options) as reader:
                    yield reader
                return
            data = _bytes_of(file, self._messages[:1] if batch is None else self._needed(self._batches[batch]))
            with ipc.open_stream(pa.py_buffer(data), options=options) as reader:
                yield reader

    def _needed(self, batch: _Message) -> list[_Message]:
        """A batch of a stream, after the schema and the dictionaries that it may refer to."""
        dictionaries: dict[int, list[_Message]] = {}
        for message in self._messages:
            if message.kind == DICTIONARY and message.start < batch.start:
                before = dictionaries.get(message.dictionary, []) if message.is_delta else []
                dictionaries[message.dictionary] = [*before, message]
        known = sorted((one for found in dictionaries.values() for one in found), key=lambda one: one.start)
        return [self._messages[0], *known, batch]

    def _open(self) -> BinaryIO:
        file = self.place.open()
        return file if isinstance(self.place, LocalPlace) else io.BufferedReader(file, HEADER_READ_BYTES)  # type: ignore[type-var]


def _readable(field: pa.Field, name: str) -> pa.DataType:
    """The type in which a column is read: polars writes categories as dictionaries of views, whose values Arrow cannot repeat.
    Raises InputError for such dictionaries within lists and structs.
    """
    kind = field.type
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _PLAIN.get(kind.value_type, kind.value_type), kind.ordered)
    if pa.types.is_nested(kind) and all(word in str(kind) for word in ("dictionary<", "_view")):
        raise InputError(f"{name}: column {field.name!r} has categories in {kind}, which Arrow cannot copy; cast them to text")
    return kind


def _typed(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(kind.value_type), ordered=kind.ordered)


def _bytes_of(file: BinaryIO, messages: Sequence[_Message]) -> bytearray:
    """These messages as a stream."""
    data = bytearray(sum(message.stop - message.start for message in messages))
    at, view = 0, memoryview(data)
    for message in messages:
        file.seek(message.start)
        stop = at + message.stop - message.start
        while at < stop:
            got = file.readinto(view[at:stop])  # type: ignore[attr-defined]
            if not got:
                raise OSError("the file ends within a record batch")
            at += got
    return data


def _of_stream(file: BinaryIO, size: int) -> Iterator[_Message]:
    """The messages of a stream: a schema, dictionaries and record batches. Raises EOFError without its end mark, and as
    `_message`."""
    at = 0
    while message := _message_at(file, at, size):
        if (message.kind == SCHEMA) != (at == 0) or message.kind > BATCH:
            raise IndexError(at)
        yield message
        at = message.stop
    if not at:
        raise EOFError


def _of_file(file: BinaryIO, size: int) -> Iterator[_Message]:
    """The record batches of a file, by its footer. Raises EOFError without one, and as `_message`."""
    end = 4 + len(MAGIC)
    file.seek(size - end)
    tail = file.read(end)
    length = _number(tail, 0, "<i")
    if not tail.endswith(MAGIC) or not 0 < length <= size - end:
        raise EOFError
    file.seek(size - end - length)
    footer = file.read(length)
    blocks = _inner(footer, _number(footer, 0, "<I"), 3)
    for at in range(_number(footer, blocks, "<I") if blocks else 0):
        message = _message_at(file, _number(footer, blocks + 4 + at * BLOCK_BYTES, "<q"), size)
        if message is None or message.kind != BATCH:
            raise IndexError(at)
        yield message


def _message_at(file: BinaryIO, at: int, size: int) -> _Message | None:
    """The message at this offset; None for an end mark. Raises EOFError if it does not end within the file, and as `_message`."""
    file.seek(at)
    prefix = file.read(8)
    is_long = prefix.startswith(_CONTINUES)  # before Arrow 0.15 the length came at once
    length = _number(prefix, 4 if is_long else 0, "<i")
    header = at + (8 if is_long else 4)
    if not length:
        return None
    if length < 0 or header + length > size:
        raise EOFError
    file.seek(header)
    message = _message(file.read(length), at, header + length)
    if not message.body <= message.stop <= size:
        raise EOFError
    return message


def _message(header: bytes, start: int, body: int) -> _Message:
    """The message that this FlatBuffer describes. Raises struct.error or IndexError for other bytes."""
    root = _number(header, 0, "<I")
    kind, size = _slot(header, root, 1, "<B"), _slot(header, root, 3, "<q")
    content = _inner(header, root, 2)
    first = _slot(header, content, 0, "<q") if kind in (DICTIONARY, BATCH) else 0
    return _Message(
        kind, start, body, body + size, num_rows=first if kind == BATCH else 0, dictionary=first if kind == DICTIONARY else 0,
        is_delta=kind == DICTIONARY and bool(_slot(header, content, 2, "<B")),
    )


def _slot(buffer: bytes, table: int, number: int, form: str) -> int:
    """A number in a field of a FlatBuffer's table; 0 if it is left out."""
    place = _place(buffer, table, number)
    return _number(buffer, place, form) if place else 0


def _inner(buffer: bytes, table: int, number: int) -> int:
    """The offset of the table or vector that a field refers to; 0 if it is left out."""
    place = _place(buffer, table, number)
    return place + _number(buffer, place, "<I") if place else 0


def _place(buffer: bytes, table: int, number: int) -> int:
    vtable, entry = table - _number(buffer, table, "<i"), 4 + 2 * number
    offset = _number(buffer, vtable + entry, "<H") if entry < _number(buffer, vtable, "<H") else 0
    return table + offset if offset else 0


def _number(data: bytes, at: int, form: str) -> int:
    if at < 0:
        raise IndexError(at)
    return int(struct.unpack_from(form, data, at)[0])
