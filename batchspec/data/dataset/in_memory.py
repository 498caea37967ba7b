"""Rows in memory as an Arrow table: what `batchspec.generate` and `batchspec.Engine` take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from batchspec.data.dataset.json_text import json_of
from batchspec.data.dataset.untyped_columns import Kinds, build
from batchspec.errors import InputError
from batchspec.images.encode import data_url, encode, is_image, with_urls

_JSON = (bool, int, float, str, list, tuple, Mapping, np.bool_, np.number)
"""Types of values that JSON has, null's aside, and of NumPy's numbers, which are read as Python's."""
_SCALARS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
_ROWS = 4096
_OF_TABLES = ("__array__", "__arrow_c_stream__", "__arrow_c_array__", "to_polars", "to_arrow")
"""Methods by which tables and arrays of other libraries are recognised."""


def table_of(data: Any, no_rows: Callable[[], pa.Table] = lambda: pa.table({"prompt": pa.array([], pa.string())})) -> pa.Table:
    """A table (polars, pyarrow, pandas, datasets.Dataset, or an object that makes one of them), a list of dictionaries, of texts
    or of chats, or anything that polars.DataFrame accepts.

    no_rows  makes the table of an empty list, which may be one of texts, chats or dictionaries
    What an iterator yields is a list; an exception of it reaches the caller as it is.
    Images of Pillow, also in lists and in chats, become encoded ones.
    A list of dictionaries, and a dictionary of lists, is read as JSON lines are: a column with dictionaries, lists of lists or
    values of several kinds keeps each cell's JSON text, so that no row changes another row's value. A list of strings becomes the
    column `prompt`, a list of lists of messages the column `messages`; some of them may be None. Raises InputError.
    """
    if isinstance(data, str | bytes):
        raise InputError("rows are one text; give a list of texts, [TEXT], a table or a list of dictionaries")
    if isinstance(data, Mapping):
        return _of_mapping({name: _drawn(values) for name, values in data.items()})
    data = _drawn(data)
    if not isinstance(data, list | tuple):
        return _typed(_made_table(data))
    if not data:
        return no_rows()
    if all(isinstance(row, str | None) for row in data) and any(row is not None for row in data):
        return _of_columns({"prompt": data})
    if all(isinstance(row, Mapping) for row in data):
        names = dict.fromkeys(name for row in data for name in row)
        return _of_columns({name: [row.get(name) for row in data] for name in names})
    if all(row is None or _is_chat(row) for row in data) and any(data):
        return _of_columns({"messages": data})
    return _typed(data)


def _drawn(data: Any) -> Any:
    """A generator, or another object that Python iterates over, as a list; tables, arrays and single values as they are."""
    if isinstance(data, str | bytes | Mapping | list | tuple) or not isinstance(data, Iterable):
        return data
    return data if any(hasattr(data, name) for name in _OF_TABLES) else list(data)


def _made_table(data: Any) -> Any:
    """The table that an object of another library makes of itself; other data as they are."""
    if isinstance(data, pl.LazyFrame):
        return data.collect()
    if isinstance(data, pa.RecordBatchReader):  # its batches may come from a generator, whose exceptions polars would replace
        return data.read_all()
    if isinstance(data, pl.DataFrame | pl.Series) or hasattr(data, "__arrow_c_stream__"):
        return data
    make = getattr(data, "to_polars", None) or getattr(data, "to_arrow", None)
    return data if make is None else make()


def _is_chat(row: Any) -> bool:
    return isinstance(row, list | tuple) and all(isinstance(turn, Mapping) for turn in row)


def _of_mapping(columns: Mapping[str, Any]) -> pa.Table:
    """Lists are read as JSON lines are; the other columns are what polars makes of them, which repeats a single value."""
    lists = {name: values for name, values in columns.items() if isinstance(values, list | tuple)}
    lengths = set(map(len, lists.values()))
    if len(lengths) != 1 or 0 in lengths:
        return _typed(columns)
    read, (num_rows,) = _of_columns(lists), lengths
    others = _typed({name: [None] * num_rows if name in lists else values for name, values in columns.items()})
    parts = {name: read if name in lists else others for name in columns}
    schema = pa.schema([part.schema.field(name) for name, part in parts.items()])
    return pa.table([part.column(name) for name, part in parts.items()], schema=schema)


def _of_columns(columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    """JSON values become what JSON lines make of them, in every column; values of one other type keep that type."""
    for name in columns:
        _check_name(name)
    columns = {name: _with_encoded(name, values) for name, values in columns.items()}
    own = {name: values for name, values in columns.items() if _has_own_type(values)}
    # As rows: polars takes more kinds of values so than as columns, and does not lose time zones.
    typed = _typed([dict(zip(own, row, strict=True)) for row in zip(*own.values(), strict=True)])
    made: list[tuple[pa.Field, pa.ChunkedArray]] = []
    for name, values in columns.items():
        if name in own:
            made.append((typed.schema.field(name), typed.column(name)))
        elif (array := _of_one_kind(values)) is not None:
            made.append((pa.field(name, array.type), array))
        else:
            made.append(_of_json(name, values))
    fields, arrays = zip(*made, strict=True)
    return pa.table(list(arrays), schema=pa.schema(fields))


def _with_encoded(name: str, values: Sequence[Any]) -> Sequence[Any]:
    """The column with each image of Pillow, also in lists, as the bytes of an encoded one. A column that holds other values too,
    such as paths, stays as it is: `_plain` and `with_urls` make data URLs of its images."""
    kinds = _one_of_each_type(values)
    if kinds.keys() <= {list, tuple}:
        kinds = {kind: one for value in values if value is not None for kind, one in _one_of_each_type(value).items()}
    images = {kind for kind, one in kinds.items() if is_image(one)}
    if not images or not kinds.keys() - images <= {bytes}:
        return values
    return [
        [_encoded(one, row, name) for one in value] if isinstance(value, list | tuple) else _encoded(value, row, name)
        for row, value in enumerate(values)
    ]


def _one_of_each_type(values: Sequence[Any]) -> dict[type, Any]:
    """Type -> one of the values that have it; None is left out."""
    found = dict(zip(map(type, values), values, strict=True))
    found.pop(type(None), None)
    return found


def _encoded(value: Any, row: int, name: str) -> Any:
    try:
        return encode(value) if is_image(value) else value
    except ValueError as error:
        raise InputError(f"row {row}: column {name!r} holds {error}") from None


def _of_one_kind(values: Sequence[Any]) -> pa.ChunkedArray | None:
    """What `_of_json` would make of values of one scalar kind, or of lists of one, in less time; None for any others."""
    kinds = set(map(type, values)) - {type(None)}
    lists = kinds == {list}
    if lists:
        kinds = {kind for value in values if value is not None for kind in map(type, value)} - {type(None)}
    scalar = _SCALARS.get(kinds.pop()) if len(kinds) == 1 else None
    if scalar is None:
        return None
    kind = pa.list_(scalar) if lists else scalar
    try:
        return _in_pieces(lambda part: pa.array(part, kind), values, kind)
    except (ValueError, OverflowError):  # half a surrogate pair, or a number that int64 does not hold
        return None


def _of_json(name: str, values: Sequence[Any]) -> tuple[pa.Field, pa.ChunkedArray]:
    cells, kinds = [_json(with_urls(value), at, name) for at, value in enumerate(values)], Kinds()
    for cell in cells:
        kinds.add({name: cell})
    field = kinds.schema().field(name)
    return field, _in_pieces(lambda part: build(part, field), cells, field.type)


def _in_pieces(make: Callable[[Sequence[Any]], pa.Array], values: Sequence[Any], kind: pa.DataType) -> pa.ChunkedArray:
    """One array of text holds at most 2 GiB."""
    return pa.chunked_array([make(values[at : at + _ROWS]) for at in range(0, len(values), _ROWS)], kind)


def _check_name(name: Any) -> None:
    try:
        name.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InputError(f"column {name!r} has a name that is not text; rename it") from None


def _has_own_type(values: Iterable[Any]) -> bool:
    """Whether these values, or the items of these lists, are all of one type that JSON lacks, such as dates or NumPy arrays."""
    kinds: set[type] = set()
    items: set[type] = set()
    for value in values:
        kinds.add(type(value))
        if isinstance(value, list | tuple):
            items.update(map(type, value))
    found = (items if kinds - {type(None)} <= {list, tuple} else kinds) - {type(None)}
    return len(found) == 1 and not issubclass(found.pop(), _JSON)


def _json(value: Any, row: int, name: str) -> bytes:
    """The value as a line of a file would hold it: NaN too, and half a surrogate pair as an escape."""
    try:
        return json_of(value, _plain).encode("utf-8", "backslashreplace")
    except (TypeError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise InputError(
            f"row {row}: the value of {name!r} cannot be written as JSON ({said}); give lists, dictionaries and plain values"
        ) from None


def _plain(value: Any) -> Any:
    """NumPy's and torch's values, mappings other than dict, and kinds of text and numbers, as plain Python values."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return str.__str__(value)
    if type(value).__module__ != np.__name__ and isinstance(value, int | float):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if is_image(value):
        return data_url(encode(value))
    raise TypeError(f"it has the type {type(value).__name__}")


def _refuse_wide_decimals(data: Any) -> None:
    """Raises InputError for a column with Arrow's decimal256, on which polars crashes, whatever its precision."""
    schema = getattr(data, "schema", None)
    for field in schema if isinstance(schema, pa.Schema) else ():
        if _has_decimal256(field.type):
            raise InputError(f"column {field.name!r} has type {field.type}, which polars cannot read; cast it, or leave it out")


def _has_decimal256(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _has_decimal256(kind.value_type)
    return pa.types.is_decimal256(kind) or any(_has_decimal256(kind.field(at).type) for at in range(kind.num_fields))


def _typed(data: Any) -> pa.Table:
    _refuse_wide_decimals(data)
    try:
        frame = data if isinstance(data, pl.DataFrame) else pl.DataFrame(data, infer_schema_length=None)
    except (TypeError, ValueError, RuntimeError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        said = " ".join(str(error).split())
        raise InputError(
            f"rows of type {type(data).__name__} do not make a table ({said}); give a table or a list of dictionaries"
        ) from None
    if objects := [name for name, kind in frame.schema.items() if kind == pl.Object]:
        held = frame[objects[0]].drop_nulls()[0]
        advice = "give the rows as a list of dictionaries" if is_image(held) else "give plain values, lists or dictionaries"
        said = f"column {objects[0]!r} holds Python objects ({type(held).__name__}); {advice}, or leave it out"
        raise InputError(said)
    try:
        # pyarrow's kernels do not support Arrow's newer string views.
        return frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    except pa.ArrowException as error:
        types = ", ".join(f"{name}: {kind}" for name, kind in frame.schema.items())
        raise InputError(
            f"rows with columns {types} do not make an Arrow table ({error}); cast the column whose type Arrow does not have"
        ) from None
