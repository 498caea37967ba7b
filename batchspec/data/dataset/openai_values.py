"""Values of the keys of an OpenAI request, checked and as cells of a row (`openai_requests.py`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

import pyarrow as pa

from batchspec.config.values import logit_bias
from batchspec.data.dataset.json_text import parse
from batchspec.data.dataset.openai_keys import GUIDED
from batchspec.errors import OneLine

_KIND = re.compile(r"not a batch request|url '[^']*'|[\w.]+(?:\[\d+\][\w.]*)*")


class BadRequest(OneLine, ValueError):
    """Why a line is no request that batchspec can follow, in one line. custom_id: of the line, if it has one."""

    def __init__(self, problem: str, custom_id: str | None = None) -> None:
        super().__init__(problem)
        self.custom_id = custom_id

    @property
    def kind(self) -> str:
        """What lines with the same defect have in common: the key, or the endpoint."""
        found = _KIND.match(str(self))
        return str(self) if found is None else re.sub(r"\[\d+\]", "[]", found[0])


def check_finite(key: str, value: Any) -> None:
    """Raises BadRequest for a key with a number that JSON lacks: copied as JSON it would become null."""
    if (found := _not_finite(value)) is not None:
        raise BadRequest(f"body.{shown(key)}{found[-80:]} is not a number; correct the line")


def _not_finite(value: Any) -> str | None:
    """Which number in a value is NaN or infinite, as 1e400 is when it is read: ".a[0]=NaN"; None if none is."""
    if isinstance(value, float):
        return None if isfinite(value) else f"={json.dumps(value)}"
    if isinstance(value, dict):
        return next((f".{shown(key)}{found}" for key, item in value.items() if (found := _not_finite(item))), None)
    if isinstance(value, list):
        return next((f"[{i}]{found}" for i, item in enumerate(value) if (found := _not_finite(item))), None)
    return None


def shown(key: str) -> str:
    """A key of a line, in at most 60 printable characters."""
    return (key if key.isprintable() else json.dumps(key)[1:-1])[:60]


def number_of(value: Any, kind: pa.DataType, where: str) -> int | float:
    """A number for a column of this type. where: the key, for BadRequest."""
    whole = pa.types.is_integer(kind)
    if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value % 1 != 0):
        raise BadRequest(f"{where}={json.dumps(value)[:60]} is not {'a whole number' if whole else 'a number'}; correct the line")
    if (whole or isinstance(value, int)) and not -(1 << 63) <= value < 1 << 63:  # a float may not hold such an integer either
        raise BadRequest(f"{where}={str(value)[:60]} does not fit in 64 bits; correct the line")
    return int(value) if whole else float(value)


def strings_of(value: Any, where: str) -> list[str]:
    """One string or a list of them, as a list. where: the key, for BadRequest."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise BadRequest(f"{where} is neither a string nor a list of strings; correct the line")
    return strings


def logit_bias_cells(biases: Any, where: str) -> dict[str, str]:
    """The map as JSON text; nothing for an empty map. Admission checks the ids against the vocabulary."""
    try:
        found = logit_bias(biases)
    except ValueError as error:
        raise BadRequest(f"{where} {error}") from None
    return {"logit_bias": json.dumps(found)} if found else {}


def response_format_cells(form: Any, where: str) -> dict[str, str]:
    """OpenAI's object unchanged; nothing for plain text. Admission checks the schema."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("text", "json_object", "json_schema", "grammar", "regex", "choice"):
        raise BadRequest(
            f"{where}.type={json.dumps(kind)[:60]} is not text, json_object, json_schema, grammar, regex or choice; "
            "correct the line"
        )
    return {} if kind == "text" else {"response_format": json.dumps(form, ensure_ascii=False)}


def structured_cells(key: str, value: Any, where: str) -> dict[str, str]:
    """vLLM's `structured_outputs`, {"json", "regex", "choice", "grammar" or "json_object": ...}, or one of GUIDED."""
    asked = {GUIDED[key]: value} if key in GUIDED else value
    given = {name: one for name, one in asked.items() if one is not None} if isinstance(asked, dict) else {}
    match list(given.items()):
        case [("json", schema)]:
            form: dict[str, Any] = {"type": "json_schema", "json_schema": {"schema": _parsed(key, schema)}}
        case [("json_object", True)]:
            form = {"type": "json_object"}
        case [("regex" | "choice" | "grammar" as name, one)]:
            form = {"type": name, name: one}
        case _:
            raise BadRequest(
                f"{where}={json.dumps(value)[:60]} is not one of json, regex, choice, grammar and json_object; correct the line"
            )
    return {"response_format": json.dumps(form, ensure_ascii=False)}


def logprobs_cells(body: Mapping[str, Any]) -> dict[str, int]:
    """What `logprobs` and `top_logprobs` ask for: the number of likeliest tokens; nothing without logprobs."""
    asked = body.get("logprobs", False)
    if not isinstance(asked, bool):
        raise BadRequest(f"body.logprobs={json.dumps(asked)[:60]} is neither true nor false; correct the line")
    top = number_of(body.get("top_logprobs", 0), pa.int64(), "body.top_logprobs")
    if top and not asked:
        raise BadRequest(f"body.top_logprobs={top} needs body.logprobs=true; correct the line")
    return {"num_logprobs": int(top)} if asked else {}


def tool_choice_cells(value: Any, where: str) -> dict[str, str]:
    """A word as it is, an object as JSON text. Admission compares it with the tools."""
    if not isinstance(value, str | dict):
        raise BadRequest(f"{where}={json.dumps(value)[:60]} is neither text nor an object; correct the line")
    return {"tool_choice": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def parallel_cells(value: Any, where: str) -> dict[str, bool]:
    if not isinstance(value, bool):
        raise BadRequest(f"{where}={json.dumps(value)[:60]} is neither true nor false; correct the line")
    return {"parallel_tool_calls": value}


def _parsed(key: str, schema: Any) -> Any:
    """A schema that may be given as JSON text, whose numbers are not checked yet."""
    if not isinstance(schema, str):
        return schema
    try:
        found = parse(schema)
    except ValueError:
        return schema
    check_finite(key, found)
    return found
