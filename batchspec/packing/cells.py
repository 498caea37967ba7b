"""The cells of an input row: what stands in them is checked and made plain here, one error for whatever is wrong."""

from __future__ import annotations

import json
from typing import Any

from batchspec.records import Ids


class BadRow(Exception):
    """Why a row has no request; admission catches it."""

    def __init__(self, code: str, message: str, *, prompt_ids: Ids | None = None, status: str = "error") -> None:
        super().__init__(message)
        self.code, self.prompt_ids, self.status = code, prompt_ids, status


class _Undecodable:
    """Stands for a cell whose bytes are not UTF-8."""


def plain_cell(scalar: Any) -> Any:
    """An Arrow scalar as a Python value; text that is not UTF-8 as something that `prompt_cell` refuses."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _Undecodable()


def prompt_cell(row: dict[str, Any], column: str) -> Any:
    """The prompt, which is there and not empty, of a row whose text is all UTF-8."""
    for name, value in row.items():
        if isinstance(value, _Undecodable):
            raise BadRow("bad_text", f"{name} is not valid UTF-8; correct it")
    prompt = row[column]
    if prompt is None:
        raise BadRow("null_prompt", f"{column} is null; drop the row")
    if len(prompt) == 0:
        raise BadRow("empty_prompt", f"{column} is empty; drop the row")
    return prompt


def synthetic_len_cell(row: dict[str, Any]) -> int | None:
    """The row's synthetic end, at least 1; None where it has none."""
    own = row.get("synthetic_len")
    if own is None:
        return None
    length = int(number_cell("synthetic_len", own, whole=True))
    if length < 1:
        raise BadRow("bad_parameter", f"synthetic_len={length} must be at least 1; leave it null for a row that ends by itself")
    return length


def number_cell(name: str, own: Any, *, whole: bool) -> float:
    """A cell's number, whole or not."""
    if isinstance(own, bool) or not isinstance(own, int | float) or (whole and own != own // 1):
        kind = "a whole number" if whole else "a number"
        raise BadRow("bad_parameter", f"{name}={own!r} must be {kind}; correct it or leave it null")
    if whole and isinstance(own, float) and abs(own) >= 2**53:
        raise BadRow("bad_parameter", f"{name}={own!r} is a float and may have lost digits; write the column as integers")
    return int(own) if whole else float(own)


def chat_turns(prompt: Any, system: str | None) -> list[dict[str, Any]]:
    """The chat as the template wants it; `system` stands before the first turn or replaces the system turn there."""
    if isinstance(prompt, str):
        turns: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    else:
        turns = [_turn(place, message) for place, message in enumerate(prompt)]
    if system is None:
        return turns
    rest = turns[1:] if turns[0]["role"] == "system" else turns
    return [{"role": "system", "content": system}, *rest]


def _turn(place: int, message: Any) -> dict[str, Any]:
    for key in ("role", "content"):
        value = message.get(key) if isinstance(message, dict) else None
        if not isinstance(value, str) or (key == "role" and not value):
            raise BadRow("bad_messages", f"message {place} has {key} {value!r}, which must be text; correct it or drop the row")
    return {key: value for key, value in message.items() if value is not None}


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct of a column the fields of all of them: a field that is null was not there."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def json_cell(row: dict[str, Any], name: str, kind: type) -> Any:
    """A cell that is structured already or JSON text of it."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow("bad_parameter", f"{name} is not JSON ({error}); correct it or leave it null") from error
    elif kind is dict and isinstance(value, list):  # an Arrow map
        value = dict(value)
    else:
        value = _without_nulls(value)
    if value is not None and not isinstance(value, kind):
        raise BadRow("bad_parameter", f"{name} must be a {kind.__name__}, not {value!r}; correct it or leave it null")
    return value
