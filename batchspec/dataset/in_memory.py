"""Rows in memory as an Arrow table: what `batchspec.generate` and `batchspec.Engine` take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa

from batchspec.dataset.columns import PROMPTS
from batchspec.dataset.untyped_columns import Kinds, build
from batchspec.errors import InputError

_NUMBERS = {int, float}


def table_of(data: Any, columns: Mapping[str, str | None] | None = None) -> pa.Table:
    """A table (polars, pyarrow, pandas, datasets.Dataset, or an object that makes one of them), a list of dictionaries, of texts
    or of chats, or anything that polars.DataFrame accepts.

    columns  input.columns, for the name of the prompt's column of an empty list
    A list of dictionaries is read as JSON lines are: a column with dictionaries, lists of lists or values of several kinds keeps
    each cell's JSON text, so that no row changes another row's value. A list of strings becomes the column `prompt`, a list of
    lists of messages the column `messages`; some of them may be None. Raises InputError.
    """
    if isinstance(data, str | bytes):
        raise InputError("rows are one text; give a list of texts, [TEXT], a table or a list of dictionaries")
    if not isinstance(data, list | tuple):
        return _typed(_made_table(data))
    if not data:
        return _no_rows(columns or {})
    if all(isinstance(row, str | None) for row in data) and any(row is not None for row in data):
        return _typed({"prompt": list(data)})
    if all(isinstance(row, Mapping) for row in data):
        return _of_dictionaries(data)
    if all(row is None or _is_chat(row) for row in data) and any(data):
        return _of_dictionaries([{"messages": row} for row in data])
    return _typed(data)


def _made_table(data: Any) -> Any:
    """The table that an object of another library makes of itself; other data as they are."""
    if isinstance(data, pl.LazyFrame):
        return data.collect()
    if isinstance(data, Mapping | pl.DataFrame | pl.Series) or hasattr(data, "__arrow_c_stream__"):
        return data
    make = getattr(data, "to_polars", None) or getattr(data, "to_arrow", None)
    return data if make is None else make()


def _is_chat(row: Any) -> bool:
    return isinstance(row, list | tuple) and all(isinstance(turn, Mapping) for turn in row)


def _no_rows(columns: Mapping[str, str | None]) -> pa.Table:
    """An empty list may be one of texts, chats or dictionaries: its table has the prompt's column alone."""
    kind = next((kind for kind in PROMPTS if columns.get(kind)), "prompt")
    return pa.table({columns.get(kind) or kind: pa.array([], pa.list_(pa.int32()) if kind == "prompt_ids" else pa.string())})


def _of_dictionaries(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    json_names = {name for name in names if not _has_one_kind(row.get(name) for row in rows)}
    typed = _typed([{name: row.get(name) for name in names if name not in json_names} for row in rows])
    kinds, cells = Kinds(), {name: [_json(row.get(name), at, name) for at, row in enumerate(rows)] for name in json_names}
    for name, column in cells.items():
        for cell in column:
            kinds.add({name: cell})
    fields = {field.name: field for field in kinds.schema()}
    arrays = {name: build(cells[name], fields[name]) if name in json_names else typed.column(name) for name in names}
    return pa.table(
        list(arrays.values()),
        schema=pa.schema([fields[name] if name in json_names else typed.schema.field(name) for name in names]),
    )


def _has_one_kind(values: Iterable[Any]) -> bool:
    """Whether a typed column holds these values unchanged: scalars of one type, or lists of such. Floats may include whole
    numbers."""
    kinds: set[type] = set()
    items: set[type] = set()
    for value in values:
        if isinstance(value, Mapping):
            return False
        if isinstance(value, list | tuple):
            kinds.add(list)
            items.update(map(type, value))
        elif isinstance(value, int) and value.bit_length() > 63:  # no integer column holds it
            return False
        elif value is not None:
            kinds.add(type(value))
    items.discard(type(None))
    if any(issubclass(item, Mapping | list | tuple) for item in items):
        return False
    return all(len(found) <= 1 or found == _NUMBERS for found in (kinds, items))


def _json(value: Any, row: int, name: str) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise InputError(
            f"row {row}: the value of {name!r} cannot be written as JSON ({said}); give lists, dictionaries and plain values"
        ) from None


def _plain(value: Any) -> Any:
    """NumPy's and torch's values, and mappings other than dict, as plain Python values."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
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
    except (TypeError, ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        said = " ".join(str(error).split())
        raise InputError(
            f"rows of type {type(data).__name__} do not make a table ({said}); give a table or a list of dictionaries"
        ) from None
    if objects := [name for name, kind in frame.schema.items() if kind == pl.Object]:
        raise InputError(f"column {objects[0]!r} holds Python objects; give plain values, lists or dictionaries, or leave it out")
    try:
        # pyarrow's kernels do not support Arrow's newer string views.
        return frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    except pa.ArrowException as error:
        types = ", ".join(f"{name}: {kind}" for name, kind in frame.schema.items())
        raise InputError(
            f"rows with columns {types} do not make an Arrow table ({error}); cast the column whose type Arrow does not have"
        ) from None
