"""The request lines of OpenAI's batch files as rows of a batchspec input.

A request line   {"custom_id", "method", "url": "/v1/chat/completions", "body": {"messages", "temperature", ...}}
Source: https://platform.openai.com/docs/api-reference/batch, and vLLM's names for what OpenAI lacks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from batchspec.config.decode_schema import DecodeConfig
from batchspec.data.dataset.json_text import parse
from batchspec.data.dataset.messages import DETAIL, BadChat, FromColumn, Message, read_chat
from batchspec.data.dataset.openai_keys import (
    ADDS_ANSWER,
    COLUMNS,
    GOES_ON,
    GUIDED,
    JOB_KEYS,
    LINE_KEYS,
    NEUTRAL,
    NUMBERS,
    OF_TEMPLATE,
    OTHER_ENDPOINTS,
    PREFIX,
    TEMPLATE_KWARGS,
    TURN_KEYS,
    URLS,
    WITHOUT_EFFECT,
)
from batchspec.data.dataset.openai_values import (
    BadRequest,
    check_finite,
    logit_bias_cells,
    logprobs_cells,
    number_of,
    parallel_cells,
    response_format_cells,
    shown,
    strings_of,
    structured_cells,
    tool_choice_cells,
)

Line = Mapping[str, Any]


def is_request(members: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a request line, perhaps one that lacks its id or its body, and not a row with such columns.

    members  the JSON text of each value
    """
    body = bytes(members.get("body", b"null"))
    return members.keys() <= {*LINE_KEYS} and (body.startswith(b"{") or (body == b"null" and "custom_id" in members))


def parse_request(text: str | bytes, drop: Collection[str] = ()) -> dict[str, Any]:
    """The input row for a request line, with only those of COLUMNS that it fills.

    Raises BadRequest for a line that is not JSON, another endpoint, an id or a content that is not text, a message that no
    template can read completely, a value of the wrong type, NaN or an infinite number at any depth, two keys that contradict each
    other, and a key that batchspec cannot honour, unless `drop` names it.
    """
    try:
        line = parse(text)
        custom_id = line["custom_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise _no_request(error) from error
    if not isinstance(custom_id, str | int) or isinstance(custom_id, bool):
        raise BadRequest(f"custom_id={json.dumps(custom_id)[:60]} is not text; give every line a unique one, as text")
    try:
        _check_line(line, drop)
        return {"id": str(custom_id), **_row(line.get("body"), drop)}
    except BadRequest as bad:
        raise BadRequest(str(bad), str(custom_id)) from bad.__cause__


def _no_request(error: Exception) -> BadRequest:
    reason = f"{type(error).__name__}: {error}"
    return BadRequest(f"not a batch request ({reason}); a line is an object with custom_id and body.messages")


def _check_line(line: Line, drop: Collection[str]) -> None:
    """Raises BadRequest for another endpoint, and for a key outside of the body."""
    url = line.get("url") or URLS[0]
    if url not in URLS:
        name = str(url).removeprefix("/v1").strip("/")
        instead = OTHER_ENDPOINTS.get(name, "leave the line out")
        raise BadRequest(f"url {url!r} is not supported, {URLS[0]} alone is; {instead}")
    if extra := [key for key in line if key not in (*LINE_KEYS, *drop)]:
        raise BadRequest(f"{extra[0]} is outside body, where nothing reads it; move it into body, or {_dropped(extra[0])}")


def _row(body: Any, drop: Collection[str]) -> dict[str, Any]:
    """The columns of a row but the id."""
    try:
        messages = body["messages"]
        body = {key: value for key, value in body.items() if key == "messages" or not (value is None or key in drop)}
    except (KeyError, TypeError, AttributeError) as error:
        raise _no_request(error) from error
    check_finite("messages", messages)
    row: dict[str, Any] = {"messages": _messages(messages, drop)}
    row |= _prefix(messages) if messages else {}
    keys: dict[str, str] = {}
    for key, value in body.items():
        if key in ("messages", *WITHOUT_EFFECT):
            continue
        check_finite(key, value)
        for column, cell in _cells(key, value, body).items():
            if column in keys and row[column] != cell:
                raise BadRequest(
                    f"body.{keys[column]} and body.{key} ask for different things, and a row has one {column}; "
                    f"leave one out, or {_dropped(key)}"
                )
            row[column], keys[column] = cell, key
    return row


def _dropped(key: str) -> str:
    return f"ignore it: input.drop=[{key}] of a job, --drop {key} of export"


def defaults_note(always: Collection[str], decode: DecodeConfig) -> str:
    """One line about what OpenAI's API would do otherwise with requests that leave out keys; empty if nothing differs.

    always  the columns that all requests fill
    """
    usual, said = DecodeConfig(), []
    if "temperature" not in always and decode.temperature == usual.temperature:
        said.append("requests without temperature are decoded greedily (OpenAI's default is 1: decode.temperature=1)")
    if "max_new_tokens" not in always and decode.max_new_tokens == usual.max_new_tokens:
        cap = f"{usual.max_new_tokens:,}"
        said.append(f"those without max_tokens get at most {cap} tokens (OpenAI has no limit: decode.max_new_tokens=N)")
    return "; ".join(said)


def _cells(key: str, value: Any, body: Line) -> dict[str, Any]:
    """The columns that a key of the body fills, and their cells. Raises BadRequest, as `parse_request`."""
    if key in NUMBERS:
        return {NUMBERS[key]: number_of(value, COLUMNS[NUMBERS[key]], f"body.{key}")}
    if key == "tools":
        return {"tools": json.dumps(value, ensure_ascii=False)}
    if key == TEMPLATE_KWARGS or key in OF_TEMPLATE:
        return {"template_kwargs": json.dumps(_template_kwargs(body), ensure_ascii=False)}
    if key == "response_format":
        return response_format_cells(value, f"body.{key}")
    if key == "logit_bias":
        return logit_bias_cells(value, f"body.{key}")
    if key == "structured_outputs" or key in GUIDED:
        return structured_cells(key, value, f"body.{key}")
    if key == "stop":
        return {"stop": strings_of(value, "body.stop")}
    if key in (GOES_ON, ADDS_ANSWER):
        return _final_assistant(body, f"body.{key}")
    if key in NEUTRAL and value == NEUTRAL[key]:
        return {}
    if key in ("logprobs", "top_logprobs"):
        return logprobs_cells(body)
    if key == "tool_choice":
        return tool_choice_cells(value, f"body.{key}")
    if key == "parallel_tool_calls":
        return parallel_cells(value, f"body.{key}")
    own = JOB_KEYS.get(key)
    raise BadRequest(
        f"body.{shown(key)}={json.dumps(value)[:60]} has no column in a batchspec input; "
        f"{f'set {own} for the whole job, and ' if own else ''}{_dropped(key)}"
    )


def _final_assistant(body: Line, where: str) -> dict[str, str]:
    """What vLLM's two keys ask for. They contradict each other if both are true, or both false."""
    goes_on, adds = body.get(GOES_ON) or False, body.get(ADDS_ANSWER)
    if not isinstance(goes_on, bool) or adds not in (None, True, False):
        raise BadRequest(f"{where} is neither true nor false; correct the line")
    if (adds is True and goes_on) or (adds is False and not goes_on):
        raise BadRequest(
            f"{where}: {ADDS_ANSWER}={json.dumps(adds)} with {GOES_ON}={json.dumps(goes_on)} asks for no answer; correct it"
        )
    if goes_on and (not body["messages"] or body["messages"][-1].get("role") != "assistant"):
        raise BadRequest(f"{where}: the last message is not the assistant's, so nothing can continue it; correct the line")
    return {"final_assistant": "continue"} if goes_on else {}


def _prefix(turns: Sequence[Line]) -> dict[str, str]:
    """What `prefix` or `partial` of the last message asks for: that the answer continues it (DeepSeek's, Mistral's, Qwen's)."""
    for i, turn in enumerate(turns):
        for name in PREFIX:
            value = turn.get(name)
            if value not in (None, True, False) or (value and (i + 1 < len(turns) or turn.get("role") != "assistant")):
                raise BadRequest(f"body.messages[{i}].{name} is for a last message of the assistant; correct the line")
    return {"final_assistant": "continue"} if any(turns[-1].get(name) for name in PREFIX) else {}


def _template_kwargs(body: Line) -> dict[str, Any]:
    kwargs = body.get(TEMPLATE_KWARGS) or {}
    if not isinstance(kwargs, dict):
        raise BadRequest(f"body.{TEMPLATE_KWARGS} is not an object; correct the line")
    return {**kwargs, **{key: body[key] for key in OF_TEMPLATE if body.get(key) is not None}}


def _messages(turns: Any, drop: Collection[str]) -> list[Message]:
    if not isinstance(turns, list):
        raise BadRequest("body.messages is not a list of messages; write objects with role and content")
    for i, turn in enumerate(turns):
        known = (*TURN_KEYS, *PREFIX)
        other = [key for key in turn if key not in known and turn[key] not in (None, [])] if isinstance(turn, dict) else []
        if other:
            raise BadRequest(
                f"body.messages[{i}].{shown(other[0])} has no place in a batchspec input; leave the line out or rewrite it"
            )
    turns, images = [_only_read(turn, drop) for turn in turns], list[Any]()
    try:
        found = read_chat(turns, final="continue", images=images)
    except BadChat as error:
        raise BadRequest(f"body.messages: {error}") from None
    if any(isinstance(image, FromColumn) for image in images):
        raise BadRequest("body.messages have an image part without an image; give a data URL, or drop the line")
    return turns if images else found  # admission reads the images


def _only_read(turn: Any, drop: Collection[str]) -> Any:
    """The message with the keys that chat templates read, its images without the detail that `drop` names."""
    if not isinstance(turn, dict):
        return turn
    found = {key: value for key, value in turn.items() if key in TURN_KEYS}
    if DETAIL in drop and isinstance(parts := found.get("content"), list):
        found["content"] = [_without_detail(part) for part in parts]
    return found


def _without_detail(part: Any) -> Any:
    url = part.get("image_url") if isinstance(part, dict) else None
    return {**part, "image_url": {**url, DETAIL: None}} if isinstance(url, dict) else part


def filled(row: Line) -> set[str]:
    """The columns that a request's row fills, and `messages.json` if its messages have more than role and content."""
    more = any(turn.keys() - {"role", "content"} or not isinstance(turn.get("content"), str) for turn in row["messages"])
    return {*row, "messages.json"} if more else set(row)


def request_schema(used: set[str]) -> pa.Schema:
    """The schema of an input file for requests that fill these columns; messages that call tools stay JSON text."""
    kinds = COLUMNS | ({"messages": pa.large_string()} if "messages.json" in used else {})
    return pa.schema([(name, kind) for name, kind in kinds.items() if name in used])


def request_row(row: Line, schema: pa.Schema) -> Line:
    """The row in the form of a file with this schema."""
    if not pa.types.is_large_string(schema.field("messages").type):
        return row
    return {**row, "messages": msgspec.json.encode(row["messages"]).decode()}
