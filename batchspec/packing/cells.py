"""The cells of an input row as checked Python values; bad values raise BadRow."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchspec.config.row_options import ROW_OPTIONS
from batchspec.config.values import logit_bias
from batchspec.data.dataset.columns import IMAGES
from batchspec.data.dataset.json_text import BadJson, BadText, called, parse
from batchspec.data.dataset.messages import BadChat, messages_of, without_nulls
from batchspec.data.dataset.untyped_columns import is_csv, json_kinds, value_of
from batchspec.errors import BadRow

if TYPE_CHECKING:
    from batchspec.text.tokenizer import Tokenizer

Biases = tuple[tuple[int, float], ...]
"""(token id, what is added to its logit)."""
NOT_WHOLE = "prompt_ids is not a list of whole numbers; correct it"


class _Undecodable:
    """Placeholder for a cell whose bytes are not UTF-8."""


def plain_cell(scalar: Any) -> Any:
    """An Arrow scalar as a Python value; a placeholder that `row_values` refuses for text that is not UTF-8."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _Undecodable()


def row_values(cells: Mapping[str, Any], fields: Mapping[str, pa.Field], prompt: str) -> dict[str, Any]:
    """The values of a row's cells: JSON text is parsed, null fields of structs are dropped, numbers in CSV text become numbers.
    Raises BadRow; its code is bad_text if a cell is not UTF-8.
    """
    values: dict[str, Any] = {}
    for name, cell in cells.items():
        if isinstance(cell, _Undecodable):
            raise BadRow("bad_text", f"{name} is not valid UTF-8, or holds half of a surrogate pair; correct it")
        values[name] = None if cell is None or name not in fields else _cell_value(name, cell, fields[name], name == prompt)
    return values


def _cell_value(name: str, cell: Any, field: pa.Field, is_prompt: bool) -> Any:
    try:
        option = ROW_OPTIONS.get(name)
        value = value_of(cell, field, number=option is not None and option.is_number, optional=not is_prompt)
        if name == "messages":
            value = messages_of(value)
        elif (name == IMAGES or (option is not None and option.column.type == "texts")) and is_csv(field):
            value = _listed(value)
    except BadChat as error:
        raise BadRow("bad_messages", str(error)) from None
    except BadJson as error:
        raise BadRow("bad_text" if isinstance(error, BadText) else "bad_json", f"{name}: {error}; correct it") from None
    if json_kinds(field):
        is_text = name == "system" if option is not None else name not in ("id", "messages", "prompt_ids", IMAGES)
        if is_text and value is not None and not isinstance(value, str):
            raise BadRow("bad_type", f"{name} is {called(value)}, and must be text; correct it or drop the row")
        return value
    if pa.types.is_map(field.type) and isinstance(value, list):
        value = dict(value)
    return without_nulls(value) if pa.types.is_nested(field.type) else value


def _listed(text: str | None) -> Any:
    """A list of strings, which CSV holds as JSON text; any other text stays as it is, such as the string [/INST]."""
    with suppress(BadJson):
        found = parse(text) if text is not None and text.startswith("[") else None
        if isinstance(found, list) and all(isinstance(item, str) for item in found):
            return found
    return text


def prompt_cell(row: Mapping[str, Any], column: str) -> Any:
    """The prompt. Raises BadRow if it is null or empty."""
    prompt = row[column]
    if prompt is None:
        raise BadRow("null_prompt", f"{column} is null; drop the row")
    if column == "prompt_ids":
        prompt = ids_cell(prompt)
    if len(prompt) == 0:
        raise BadRow("empty_prompt", f"{column} is empty; drop the row")
    return prompt


def ids_cell(cell: Any) -> pa.Array:
    """The token ids of a cell as an Arrow array."""
    if isinstance(cell, pa.Array):
        return cell
    if isinstance(cell, list) and all(item is None or (type(item) is int and abs(item) < 1 << 63) for item in cell):
        return pa.array(cell, pa.int64())
    raise BadRow("bad_ids", NOT_WHOLE)


def number_option(name: str, row: Mapping[str, Any]) -> float | None:
    """The number of a row's own option, in its range; None if the row has none."""
    if (cell := row.get(name)) is None:
        return None
    option = ROW_OPTIONS[name]
    number = number_cell(name, cell, whole=option.is_whole)
    if problem := option.declared.violation(name, number):
        raise BadRow("bad_parameter", problem)
    return number


def number_cell(name: str, own: Any, *, whole: bool) -> float:
    """The number in a cell; `whole` refuses fractions."""
    if isinstance(own, bool) or not isinstance(own, int | float) or (whole and own != own // 1):
        kind = "a whole number" if whole else "a number"
        raise BadRow("bad_parameter", f"{name}={own!r} must be {kind}; correct it or leave it null")
    if isinstance(own, int) and own.bit_length() > 64:  # a float may not hold it, and the message would be too long
        raise BadRow("bad_parameter", f"{name}={str(own)[:20]}... does not fit in 64 bits; correct it or leave it null")
    if whole and isinstance(own, float) and abs(own) >= 2**53:
        raise BadRow("bad_parameter", f"{name}={own!r} is a float and may have lost digits; write the column as integers")
    return int(own) if whole else float(own)


def read_biases(given: Any, tokenizer: Tokenizer | None, vocab_size: int) -> Biases:
    """The biases of a logit_bias, of a row or of the job, by ascending token id, without those of 0."""
    try:
        found = logit_bias(json_cell({"logit_bias": given}, "logit_bias", dict))
    except ValueError as error:
        raise BadRow("bad_parameter", f"logit_bias {error}") from None
    if found and max(found) >= vocab_size:
        said = f"logit_bias names token {max(found)}, outside the vocabulary 0 .. {vocab_size - 1}; remove it"
        raise BadRow("bad_parameter", said)
    return tuple(sorted((token, bias) for token, bias in found.items() if bias))


def json_cell(row: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a cell that holds a list or object, or JSON text of one."""
    value = row.get(name)
    try:
        if isinstance(value, str):
            value = parse(value)
        if kind is list and isinstance(value, list):
            value = [parse(item) if isinstance(item, str) else item for item in value]
    except BadJson as error:
        raise BadRow("bad_parameter", f"{name} is text, and {error}; correct it or leave it null") from error
    if value is not None and not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise BadRow("bad_parameter", f"{name} must be {wanted}, not {called(value)}; correct it or leave it null")
    return value
