"""Rows in memory as an Arrow table: what `batchspec.generate` and `batchspec.Engine` take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa

from batchspec.dataset.untyped_columns import Kinds, build
from batchspec.errors import InputError

_NUMBERS = {int, float}


def table_of(data: Any) -> pa.Table:
    """A polars, pyarrow or pandas table, a list of dictionaries or of prompts, or anything that polars.DataFrame accepts.

    A list of dictionaries is read as JSON lines are: a column with dictionaries, lists of lists or values of several kinds keeps
    each cell's JSON text, so that no row changes another row's value. A list of strings becomes the column `prompt`; some
    of them may be None. Raises InputError.
    """
    if isinstance(data, str | bytes):
        raise InputError("rows are one text; give a list of texts, [TEXT], a table or a list of dictionaries")
    rows = data if isinstance(data, list | tuple) else ()
    if any(isinstance(row, str) for row in rows) and all(isinstance(row, str | None) for row in rows):
        return _typed({"prompt": list(rows)})
    if rows and all(isinstance(row, Mapping) for row in rows):
        return _of_dictionaries(rows)
    return _typed(data)


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
