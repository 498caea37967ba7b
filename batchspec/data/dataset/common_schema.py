"""The columns of the files of one dataset, and a file read as these columns. Files may differ where nothing is lost: in the order
of their columns, in types that one type holds (wider_type.py), and a column that some of them lack is null there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from batchspec.console.text import VALUE_CHARS, cut
from batchspec.data.dataset.decoding import TEXTS
from batchspec.data.dataset.files import DataFile, Part
from batchspec.data.dataset.json_lines import JsonLinesFile
from batchspec.data.dataset.partitions import check_partitions, partition_texts, partition_values
from batchspec.data.dataset.untyped_columns import Kinds, json_kinds, mark_of
from batchspec.data.dataset.wider_type import wider
from batchspec.errors import InputError

BAD_VALUE = "bad_value"


class FileOfDataset:
    """One of the files of a dataset, read as the columns that all of them have together.

    values  column -> what it is in all rows of the file, from its partitions, unless it is a column of the file itself
    """

    def __init__(self, file: DataFile, schema: pa.Schema, values: Mapping[str, pa.Scalar]) -> None:
        self.name, self.parts, self.check = file.name, file.parts, file.check
        self._file, self._schema, self._values = file, schema, values
        self._own = own_names(file)

    def read(self, part: Part, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """As `DataFile.read`. A row with a value that its column's common type does not hold is a bad row."""
        own = [name for name in names if name in self._own] or self._own[:1]  # bad rows are known by reading some column
        for batch in self._file.read(part, own):
            yield from self._typed(batch, names)

    def _typed(self, batch: pa.RecordBatch, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        try:
            columns = [self._column(batch, name) for name in names]
        except pa.ArrowInvalid:
            if batch.num_rows == 1:
                yield self._bad(batch, names)
                return
            half = batch.num_rows // 2
            yield from self._typed(batch.slice(0, half), names)
            yield from self._typed(batch.slice(half), names)
            return
        fields = [pa.field(name, column.type) for name, column in zip(names, columns, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, batch.schema.metadata))

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        kind = self._schema.field(name).type
        if name in self._own:
            return _cast(batch.column(name), kind)
        value = self._values.get(name, pa.scalar(None))
        return pa.repeat(value.cast(kind), batch.num_rows)

    def _bad(self, batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
        """A row with values that cannot be cast; these are null."""
        columns, message = [], ""
        for name in names:
            try:
                columns.append(self._column(batch, name))
            except pa.ArrowInvalid as error:
                kind = self._schema.field(name).type
                message = (
                    f"column {name!r} is read as {kind}, because other files have that type, which does not hold its value "
                    f"({str(error).splitlines()[0]}); give all files the same type"
                )
                columns.append(pa.nulls(1, kind))
        fields = [pa.field(name, column.type) for name, column in zip(names, columns, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, {"code": BAD_VALUE, "message": message}))


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column in this type; one that is read as a dictionary of text stays a dictionary. Raises ArrowInvalid."""
    if column.type == kind or not pa.types.is_dictionary(column.type):
        return column if column.type == kind else column.cast(kind)
    values = column.dictionary if column.type.value_type == kind else column.dictionary.cast(kind)
    return pa.DictionaryArray.from_arrays(column.indices, values) if kind in TEXTS else values.take(column.indices)


def files_of_dataset(files: Sequence[DataFile]) -> tuple[pa.Schema, list[FileOfDataset]]:
    """The columns of a dataset, and its files read as these. Raises as `common_schema`."""
    schema, values = common_schema(files), partition_values([file.name for file in files])
    for file, own in zip(files, _schemas(files), strict=True):
        names, file.schema = own_names(file), own
        check_partitions(file, [name for name in partition_texts(file.name) if name in names])
    return schema, [FileOfDataset(file, schema, of_file) for file, of_file in zip(files, values, strict=True)]


def common_schema(files: Sequence[DataFile]) -> pa.Schema:
    """The columns of all files: those of the first one in its order, others as they come, then the partitions.

    Raises InputError, which names both files, if no type holds a column of both without loss, or if files of different formats do
    not have the same columns.
    """
    found: dict[str, list[tuple[pa.Field, DataFile]]] = {}
    common: dict[str, pa.Field] = {}

    def add(field: pa.Field, file: DataFile) -> None:
        before = common.setdefault(field.name, field)
        found.setdefault(field.name, []).append((field, file))
        if before is field or mark_of(before) == mark_of(field):
            return
        kind = wider(before.type, field.type) if mark_of(before)[1:] == mark_of(field)[1:] else None
        if kind is None:
            raise _differs(field, file, found[field.name])
        common[field.name] = before.with_type(kind)

    for file, schema in zip(files, _schemas(files), strict=True):
        _check_names(file, schema)
        for field in schema:
            add(field, file)
    _check_formats(files, found)
    for file, values in zip(files, partition_values([file.name for file in files]), strict=True):
        for name, value in values.items():
            if name not in own_names(file):
                add(pa.field(name, value.type), file)
    return pa.schema([pa.field(field.name, field.type, metadata=field.metadata) for field in common.values()])


def own_names(file: DataFile) -> list[str]:
    """The columns of the file itself: the schema of JSON lines has those of other files too."""
    return [field.name for field in (file.kinds.schema() if isinstance(file, JsonLinesFile) else file.schema)]


def _schemas(files: Sequence[DataFile]) -> list[pa.Schema]:
    """The columns of each file. Those of JSON lines have no types: these are chosen to fit the rows of all such files."""
    kinds = Kinds()
    for file in files:
        if isinstance(file, JsonLinesFile):
            kinds.merge(file.kinds)
    lines = kinds.schema()
    return [lines if isinstance(file, JsonLinesFile) else file.schema for file in files]


def _check_names(file: DataFile, schema: pa.Schema) -> None:
    if len(set(schema.names)) < len(schema):
        twice = next(name for name, count in Counter(schema.names).items() if count > 1)
        raise InputError(f"{file.name} has two columns named {twice!r}; rename one")


def _check_formats(files: Sequence[DataFile], found: Mapping[str, Sequence[tuple[pa.Field, DataFile]]]) -> None:
    """Raises InputError if files of two formats do not have the same columns: one of them may be no data of this dataset."""
    formats = {type(file): file for file in files}
    for fields in found.values() if len(formats) > 1 else ():
        there = {type(file) for _, file in fields}
        if lacking := next((file for kind, file in formats.items() if kind not in there), None):
            raise _differs(None, lacking, fields)


def _differs(field: pa.Field | None, file: DataFile, found: Sequence[tuple[pa.Field, DataFile]]) -> InputError:
    """The message about a column of a file, and the first file that does not agree with it."""
    others = ((one, other) for one, other in found if field is None or mark_of(one)[1:] != mark_of(field)[1:]
              or wider(one.type, field.type) is None)
    there, first = next(others, found[0])
    kinds = {field.type, there.type} if field is not None else set()
    floats = any(pa.types.is_floating(kind) for kind in kinds) and any(pa.types.is_integer(kind) for kind in kinds)
    exact = " (a float64 holds whole numbers exactly up to 2**53 only)" if floats else ""
    return InputError(
        f"column {there.name!r} differs between files: {file.name} has {_kind(field)}, {first.name} has {_kind(there)}{exact}; "
        "give all files the same columns or run them as two jobs"
    )


def _kind(field: pa.Field | None) -> str:
    """Cut, so that the message has room for the kinds of both files."""
    return "no such column" if field is None else "JSON of any kind" if json_kinds(field) else cut(f"{field.type}", VALUE_CHARS)
