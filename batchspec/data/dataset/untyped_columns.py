"""Types of columns in files without types, JSON lines and CSV: a column's type follows from all its cells, in any order.

A JSON-lines column whose cells are all of one scalar kind, or lists of one, has that type. Every other column, such as messages
or objects, keeps each cell's JSON text, so that no row changes another one's value; a mark on the Arrow field says so. Cells of
CSV are text. The output copies a cell's JSON text, or the text itself if the cell is a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from batchspec.data.dataset.json_text import BadJson, parse, text_bytes
from batchspec.errors import InputError

JSON_MARK, CSV_MARK, PDF_MARK = b"batchspec.json", b"batchspec.csv", b"batchspec.pdf"
"""In the metadata of a field: its cells are JSON text, of these kinds; they are CSV text; they are fields of `PdfPage`, and no
input but a PDF can say so."""
MAX_COLUMNS = 50_000
EXACT = 1 << 53
"""Whole numbers up to this are exact as float64."""

Cell = bytes | msgspec.Raw
_SCALARS = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "text": pa.string()}
_WHOLE = re.compile(rb"-?[0-9]+")
_text = msgspec.json.Decoder(str)
_STARTS = {ord('"'): "text", ord("{"): "object", ord("["): "list", ord("t"): "bool", ord("f"): "bool", ord("n"): "null"}


class Kinds:
    """Which kinds of values each column of JSON lines holds."""

    def __init__(self) -> None:
        self._found: dict[str, set[str]] = {}

    def add(self, row: Mapping[str, Cell]) -> None:
        """Raises InputError for more than MAX_COLUMNS columns."""
        for name, cell in row.items():
            found = self._found.get(name)
            if found is None:
                if len(self._found) == MAX_COLUMNS:
                    raise InputError(f"more than {MAX_COLUMNS:,} different keys: keys hold data; put them below one key")
                found = self._found[name] = set()
            data = bytes(cell)
            kind = _STARTS.get(data[0], "number")
            if kind == "text" or kind == "bool":
                found.add(kind)
            elif kind == "number":
                found.add("int" if len(data) < 16 and data.isdigit() else _number(data))
            elif kind != "null" and (kind not in found or ("tool_calls" not in found and b'"tool_call' in data)):
                found |= _looked_at(data, kind)

    def merge(self, other: Kinds) -> None:
        for name, kinds in other._found.items():
            self._found.setdefault(name, set()).update(kinds)

    def schema(self) -> pa.Schema:
        return pa.schema([_field(name, found) for name, found in self._found.items()])


def _looked_at(cell: bytes, kind: str) -> set[str]:
    calls = {"tool_calls"} if b'"tool_call' in cell else set()
    if kind == "object" or cell[1:100].lstrip()[:1] in (b"{", b"["):
        return {kind, *calls}
    try:
        items = parse(cell)  # as `build` does: NaN is a float
    except BadJson:
        return {"list"}
    kinds = {_kind_of(item) for item in items if item is not None}
    if not kinds:
        return {"list of nothing"}
    if kinds in ({"int", "float"}, {"int", "whole"}):
        kinds -= {"int"}
    return {f"list of {kinds.pop()}"} if len(kinds) == 1 and kinds <= {*_SCALARS, "whole"} else {"list", *calls}


def _kind_of(item: Any) -> str:
    if isinstance(item, int) and not isinstance(item, bool):
        return "int" if abs(item) <= EXACT else "whole" if -(1 << 63) <= item < 1 << 63 else "digits"
    return {bool: "bool", float: "float", str: "text"}.get(type(item), "other")


def _number(cell: bytes) -> str:
    """int: exact as float64 too; whole: as int64; digits: as neither."""
    return _kind_of(int(cell)) if _WHOLE.fullmatch(cell) and len(cell) < 100 else "digits" if _WHOLE.fullmatch(cell) else "float"


def _field(name: str, kinds: set[str]) -> pa.Field:
    plain = _type(kinds)
    if plain is not None:
        return pa.field(name, plain)
    names = {kind.split()[0] if kind not in ("int", "whole", "digits", "float") else "number" for kind in kinds}
    return pa.field(name, pa.string(), metadata={JSON_MARK: ",".join(sorted(names)).encode()})


def _type(kinds: set[str]) -> pa.DataType | None:
    """The type that holds cells of these kinds exactly; None if there is none."""
    if not kinds:
        return pa.null()
    if kinds <= {"int", "whole"}:
        return pa.int64()
    if kinds <= {"int", "float"}:
        return pa.float64()
    if len(kinds) == 1 and (one := next(iter(kinds))) in _SCALARS:
        return _SCALARS[one]
    if all(kind.startswith("list of ") for kind in kinds):
        items = {kind.removeprefix("list of ") for kind in kinds} - {"nothing"}
        inner = _type(items)
        return None if inner is None else pa.list_(inner)
    return None


def json_kinds(field: pa.Field) -> frozenset[str]:
    """The kinds of cells in a column of JSON text: text, number, bool, list, object, tool_calls. Empty for any other column."""
    mark = (field.metadata or {}).get(JSON_MARK)
    return frozenset(mark.decode().split(",")) if mark else frozenset()


def is_csv(field: pa.Field) -> bool:
    return CSV_MARK in (field.metadata or {})


def is_page(field: pa.Field) -> bool:
    """Whether the cells are pages of PDFs."""
    return PDF_MARK in (field.metadata or {})


def mark_of(field: pa.Field) -> tuple[pa.DataType, bool, bool, bool]:
    """The properties of a column that must be the same in all files."""
    return field.type, bool(json_kinds(field)), is_csv(field), is_page(field)


def build(cells: Sequence[Cell | None], field: pa.Field) -> pa.Array:
    """The cells of JSON lines as an array of the field's type, which `Kinds` chose to fit them."""
    found = [None if cell is None or (data := bytes(cell)) == b"null" else data for cell in cells]
    kind = field.type
    if json_kinds(field):
        return text_array(found)
    if pa.types.is_string(kind):
        try:
            return pa.array([None if cell is None else _text.decode(cell) for cell in found], kind)
        except (msgspec.MsgspecError, ValueError):
            return text_array([None if cell is None else text_bytes(cell) for cell in found])
    if pa.types.is_boolean(kind):
        return pa.array([None if cell is None else cell == b"true" for cell in found], kind)
    if pa.types.is_int64(kind):
        return pa.array([None if cell is None else int(cell) for cell in found], kind)
    if pa.types.is_float64(kind):
        return pa.array([None if cell is None else float(cell) for cell in found], kind)
    if pa.types.is_list(kind):
        return pa.array([None if cell is None else parse(cell) for cell in found], kind)
    return pa.nulls(len(found), kind)


def text_array(values: Sequence[bytes | None]) -> pa.Array:
    """A text array of these bytes, which may not be UTF-8: readers of such a cell get an error."""
    return pa.array(values, pa.binary()).view(pa.string())


def as_text(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    """A column in the form in which it is copied and ids are read: of JSON text, a string cell's text and any other cell's
    JSON."""
    if not json_kinds(field):
        return column
    cells = column.cast(pa.binary()).to_pylist()
    return text_array([text_bytes(cell) if cell is not None and cell.startswith(b'"') else cell for cell in cells])


def value_of(cell: Any, field: pa.Field, *, number: bool = False, optional: bool = False) -> Any:
    """The value of a cell: JSON text is parsed, CSV text becomes a number if `number`, and an empty cell of CSV null if
    `optional`. Raises BadJson."""
    if cell is None or (optional and cell == "" and is_csv(field)):
        return None
    if json_kinds(field):
        return parse(cell)
    if number and is_csv(field):
        try:
            found = parse(cell.strip()) if cell.strip() else None
        except BadJson:
            return cell
        return found if isinstance(found, int | float) and not isinstance(found, bool) else cell if found is not None else None
    return cell
