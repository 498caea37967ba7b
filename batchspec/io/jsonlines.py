"""JSON lines as parts that can be read by themselves. They carry no types: most rows decide what a column is.

A line that is no JSON object, or that has something of another kind in a column, costs its row: what can be read of it is
there, and the batch that holds it alone says what is wrong. Arrow parses whole blocks; only a block that it refuses is cut in
halves until the lines are found that it stumbles over.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.json as pa_json

from batchspec.io import files
from batchspec.io.files import Part, changed, check_same, reading, widen
from batchspec.io.places import LocalPlace, Place

BAD_JSON, BAD_TYPE = "bad_json", "bad_type"


class JsonLinesFile:
    """One JSON object a line. The file is read once to find its rows and columns: a key that a line lacks is null."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name = place, name
        parts: list[Part] = []
        digest = hashlib.sha256()
        kinds = _Kinds()
        with reading(name):
            self._stamp = place.stamp()
            self.size_bytes = self._stamp.size_bytes
            for offset, block in self._blocks():
                digest.update(block)
                num_rows = 0
                for piece in _pieces(block, None):
                    if isinstance(piece, pa.Table):
                        kinds.add(piece)
                    num_rows += piece.num_rows if isinstance(piece, pa.Table) else 1
                own = hashlib.sha256(block).digest()
                parts.append(Part(num_rows=num_rows, size_bytes=len(block), place=offset, digest=own))
        self.schema = kinds.schema()
        self.digest = digest.hexdigest()
        self.parts: Sequence[Part] = tuple(parts)

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with reading(self.name), _buffered(self.place) as file:
            file.seek(part.place)
            schema = pa.schema([self.schema.field(name) for name in columns])
            block = file.read(part.size_bytes)
            if hashlib.sha256(block).digest() != part.digest:
                raise changed(self.name, f"other text at byte {part.place:,}")
            for piece in _pieces(block, schema):
                yield from piece.to_batches() if isinstance(piece, pa.Table) else _salvaged(piece, schema)

    def check(self) -> None:
        check_same(self.place, self.name, self._stamp)

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        with _buffered(self.place) as file:
            offset = 0
            while block := file.read(files.BATCH_BYTES):
                block += file.readline()
                yield offset, block
                offset += len(block)


class _Kinds:
    """What the columns hold: of kinds that no type holds together the one of most rows, the first of equals."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[pa.DataType, int]]] = {}

    def add(self, table: pa.Table) -> None:
        for field, column in zip(table.schema, table.columns, strict=True):
            kinds = self._found.setdefault(field.name, [])
            count = len(column) - column.null_count
            for i, (kind, known) in enumerate(kinds):
                try:
                    (both,) = widen(pa.schema([("x", kind)]), pa.schema([("x", field.type)]))
                except pa.ArrowException:
                    continue
                kinds[i] = both.type, known + count
                break
            else:
                kinds.append((field.type, count))

    def schema(self) -> pa.Schema:
        return pa.schema([(name, max(kinds, key=lambda kind: kind[1])[0]) for name, kinds in self._found.items()])


def _pieces(block: bytes, schema: pa.Schema | None) -> Iterator[pa.Table | bytes]:
    """In their order: tables of lines that Arrow takes, with `schema` where there is one, and each line that it refuses."""
    if not block.strip():
        return
    try:
        yield _parse(block, schema)
        return
    except pa.ArrowInvalid:
        middle = block.rfind(b"\n", 0, len(block) // 2) + 1 or block.find(b"\n") + 1
        if not 0 < middle < len(block):
            yield block
            return
    yield from _pieces(block[:middle], schema)
    yield from _pieces(block[middle:], schema)


def _salvaged(line: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a line that Arrow refuses: one as a rule, and in the metadata what is wrong with it."""
    try:
        count = _parse(line, None).num_rows
    except pa.ArrowInvalid:
        count = 1
    try:
        row = json.loads(line)
        problem = "" if isinstance(row, dict) else f"the line is {_called(row)}, not an object"
    except (ValueError, RecursionError) as error:
        row, problem = None, f"the line is not JSON ({' '.join(str(error).split())[:200]})"
    cells: list[pa.Array] = []
    wrong: list[str] = []
    for field in schema:
        cell = row.get(field.name) if isinstance(row, dict) and count == 1 else None
        try:
            one = pa.schema([field])
            array = pa.nulls(1, field.type) if cell is None else _parse(json.dumps({field.name: cell}).encode(), one).column(0)
        except pa.ArrowInvalid:
            wrong.append(f"{field.name} is {_called(cell)} here, and most rows have {field.type}")
            array = pa.nulls(1, field.type)
        cells.append(array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array)
    marks = {"code": BAD_JSON if problem else BAD_TYPE, "message": f"{problem or '; '.join(wrong)}; correct the line"}
    for _ in range(count):
        yield pa.RecordBatch.from_arrays(cells, schema=schema.with_metadata(marks if problem or wrong else None))


def _called(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _buffered(place: Place) -> BinaryIO:
    file = place.open()
    return file if isinstance(place, LocalPlace) else io.BufferedReader(file, files.BATCH_BYTES)  # type: ignore[type-var]


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
