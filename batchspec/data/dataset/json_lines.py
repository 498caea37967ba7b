"""JSON-lines files as parts that can be read independently. Each line is parsed on its own: no row depends on another one.

The type of a column follows from all lines of all files (untyped_columns.py). A line that is not a JSON object becomes a bad row:
a batch with this row alone, whose schema metadata has the code and the message.

A file whose lines are requests of OpenAI's batches is read as the rows that they ask for (openai_requests.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import pyarrow as pa

from batchspec.data.dataset import files
from batchspec.data.dataset.files import Part, check_same, reading
from batchspec.data.dataset.formats import TextStream
from batchspec.data.dataset.json_text import BadJson, BadText, members
from batchspec.data.dataset.lines import LineNumbers, LongLine, lines_of
from batchspec.data.dataset.openai_requests import is_request, parse_request
from batchspec.data.dataset.openai_values import BadRequest
from batchspec.data.dataset.untyped_columns import Cell, Kinds, build
from batchspec.data.storage.places import Place
from batchspec.errors import InputError

BAD_JSON, BAD_TEXT, BAD_REQUEST = "bad_json", "bad_text", "bad_request"
ONE_LINE = "python -c \"import json; [print(json.dumps(row)) for row in json.load(open('FILE'))]\" > FILE.jsonl"


class JsonLinesFile:
    """One JSON object per line. The file is read once to find its rows and columns; a key that a line lacks is null.

    drop  keys of OpenAI's requests that are ignored
    """

    def __init__(self, place: Place, name: str, codec: str | None = None, drop: Collection[str] = ()) -> None:
        self.place, self.name, self._drop = place, name, drop
        self._holds_requests: bool | None = None
        """Whether the lines are OpenAI's requests, which the first object says; None: there was none so far."""
        self.filled: frozenset[str] | None = None
        """The columns that all requests fill; None: the file holds no requests."""
        parts: list[Part] = []
        digest = hashlib.sha256()
        self.kinds = Kinds()
        self.lines = LineNumbers()
        first_row, first_number = 0, 1  # of the block that comes next
        first_line, first_problem, num_objects = b"", "", 0
        with reading(name):
            self._stamp = place.stamp()
            self.size_bytes = self._stamp.size_bytes
            self._text = TextStream(place, codec)
            self._text.check(name, self.size_bytes)
            for offset, block in self._blocks():
                if isinstance(block, LongLine):
                    digest.update(block.digest)
                    self.lines.add(first_row, first_number)
                    first_row, first_number = first_row + 1, first_number + 1
                    first_line, first_problem = first_line or block.start, first_problem or block.problem
                    parts.append(Part(num_rows=1, size_bytes=block.size_bytes, place=offset, digest=block.digest, too_long=True))
                    continue
                digest.update(block)
                num_rows = 0
                for number, line in _lines(block, first_number):
                    self.lines.add(first_row + num_rows, number)
                    num_rows += 1
                    first_line = first_line or line
                    try:
                        row = self._cells(line)
                        self.kinds.add(row)
                        num_objects += 1
                        if self._holds_requests:
                            self.filled = frozenset(row) if self.filled is None else self.filled.intersection(row)
                    except (BadJson, BadRequest) as error:
                        first_problem = first_problem or str(error)
                        self.kinds.add(_known(error))
                first_row, first_number = first_row + num_rows, first_number + block.count(b"\n")
                own = hashlib.sha256(block).digest()
                parts.append(Part(num_rows=num_rows, size_bytes=len(block), place=offset, digest=own))
            self._text.close()
        num_rows = sum(part.num_rows for part in parts)
        if _is_array(first_line, num_rows):
            raise InputError(f"{name} is one JSON array, and JSON lines hold an object a line; convert it: {ONE_LINE}")
        if num_rows and not num_objects:
            wanted = "a request that batchspec can follow" if self._holds_requests else "a JSON object"
            raise InputError(f"{name}: no line is {wanted} (the first: {first_problem}); write one object a line")
        self.schema = self.kinds.schema()
        self.digest = digest.hexdigest()
        self.parts: Sequence[Part] = tuple(parts)

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([self.schema.field(name) for name in columns])
        last = part is self.parts[-1]
        if part.too_long:
            yield _bad(BadJson(self._text.skipped(self.name, part, last=last).problem), schema)
            return
        block = self._text.block(self.name, part, last=last)
        good: list[Mapping[str, Cell]] = []
        for _, line in _lines(block):
            try:
                good.append(self._cells(line))
                continue
            except (BadJson, BadRequest) as error:
                bad = error
            if good:
                yield _batch(good, schema)
                good = []
            yield _bad(bad, schema)
        if good:
            yield _batch(good, schema)

    def check(self) -> None:
        check_same(self.place, self.name, self._stamp)

    def digest_of(self, digest_bytes: int) -> str:
        return self.digest

    def _cells(self, line: bytes) -> Mapping[str, Cell]:
        """The row of a line. Raises BadJson, or BadRequest in a file of requests."""
        row = members(line)
        if self._holds_requests is None and row:
            self._holds_requests = is_request(row)
        if not self._holds_requests:
            return row
        return {name: msgspec.json.encode(value) for name, value in parse_request(line, self._drop).items()}

    def _blocks(self) -> Iterator[tuple[int, bytes | LongLine]]:
        """Offset and text of blocks of whole lines. A line that is too long is a block of its own."""
        offset, waiting, size = 0, list[bytes](), 0
        for line in lines_of(self._text.at(0)):
            if isinstance(line, LongLine) or size >= files.BATCH_BYTES:
                if waiting:
                    yield offset, b"".join(waiting)
                offset, waiting, size = offset + size, [], 0
            if isinstance(line, LongLine):
                yield offset, line
                offset += line.size_bytes
            else:
                waiting.append(line)
                size += len(line)
        if waiting:
            yield offset, b"".join(waiting)


def _bad(error: BadJson | BadRequest, schema: pa.Schema) -> pa.RecordBatch:
    code, message = BAD_TEXT if isinstance(error, BadText) else BAD_JSON, f"{error}; correct the line"
    if isinstance(error, BadRequest):
        code, message = BAD_REQUEST, str(error)
    return _batch([_known(error)], schema.with_metadata({"code": code, "message": message}))


def _known(error: BadJson | BadRequest) -> Mapping[str, Cell]:
    """The cells of a bad line that are known: the id of a request."""
    own = error.custom_id if isinstance(error, BadRequest) else None
    return {} if own is None else {"id": msgspec.json.encode(own)}


def _lines(block: bytes, first_number: int = 1) -> Iterator[tuple[int, bytes]]:
    """Number and text of each line that is not blank; the block begins with line `first_number`."""
    stripped = enumerate(map(bytes.strip, block.split(b"\n")), first_number)
    return ((number, line) for number, line in stripped if line)


def _batch(rows: Sequence[Mapping[str, Cell]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([build([row.get(field.name) for row in rows], field) for field in schema], schema=schema)


def _is_array(first_line: bytes, num_lines: int) -> bool:
    """Whether lines that begin like this are those of one JSON array."""
    return first_line.startswith(b"[") and (num_lines == 1 or first_line == b"[" or first_line.endswith((b",", b"{")))
