"""The request lines of OpenAI's batch files as rows of a batchspec input.

A request line   {"custom_id", "method", "url": "/v1/chat/completions", "body": {"messages", "temperature", ...}}
Source: https://platform.openai.com/docs/api-reference/batch, and vLLM's names for what OpenAI lacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from batchspec.config.values import logit_bias
from batchspec.dataset.json_text import parse
from batchspec.dataset.messages import BadChat, Message, read_chat
from batchspec.errors import InputError

Line = Mapping[str, Any]

URLS = ("/v1/chat/completions", "/chat/completions")
LINE_KEYS = ("custom_id", "method", "url", "body")
COLUMNS = {
    "id": pa.string(),
    "messages": pa.list_(pa.struct([("role", pa.string()), ("content", pa.large_string())])),
    "max_new_tokens": pa.int64(),
    "temperature": pa.float64(),
    "top_p": pa.float64(),
    "top_k": pa.int64(),
    "min_p": pa.float64(),
    "seed": pa.int64(),
    "n": pa.int64(),
    "thinking_token_budget": pa.int64(),
    "repetition_penalty": pa.float64(),
    "presence_penalty": pa.float64(),
    "frequency_penalty": pa.float64(),
    "logit_bias": pa.string(),
    "stop": pa.list_(pa.string()),
    "tools": pa.string(),
    "template_kwargs": pa.string(),
    "response_format": pa.string(),
    "final_assistant": pa.string(),
}
"""Columns of a batchspec input that a request line may fill."""
NUMBERS = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "temperature": "temperature", "top_p": "top_p",
    "top_k": "top_k", "min_p": "min_p", "seed": "seed", "n": "n", "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "thinking_token_budget": "thinking_token_budget",
}  # fmt: skip
"""Key of a body -> column."""
TURN_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that chat templates read."""
PREFIX = ("prefix", "partial")
"""Keys of a last message with which the answer continues it."""
TEMPLATE_KWARGS = "chat_template_kwargs"
OF_TEMPLATE = ("reasoning_effort",)
"""Keys of a body that are arguments of the chat template."""
GOES_ON, ADDS_ANSWER = "continue_final_message", "add_generation_prompt"
"""vLLM's keys of a body: the answer continues the last message; the template begins a new answer (true)."""
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older keys, and the key of `structured_outputs` that replaced each."""
WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Keys of a body that do not affect tokens."""
NEUTRAL = {
    "stream": False, "logprobs": False, "top_logprobs": 0, "tool_choice": "auto", "parallel_tool_calls": True,
}  # fmt: skip
"""Keys of a body for which batchspec has no column, and the value with which they have no effect."""


def parse_request(text: str, where: str, drop: Sequence[str] = ()) -> dict[str, Any]:
    """The input row for a request line, with only those of COLUMNS that it fills.

    `where` is the prefix of error messages (file and line). Raises InputError for a line that is not JSON, another endpoint,
    an id or a content that is not text, a message that no template can read completely, a value of the wrong type, two keys that
    contradict each other, and a key that batchspec cannot honour, unless `drop` names it.
    """
    try:
        line = parse(text)
        custom_id, body, url = line["custom_id"], line["body"], line.get("url") or URLS[0]
        messages = body["messages"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{where}: not a batch request ({reason}); a line is an object with custom_id and body.messages"
        ) from error
    if url not in URLS:
        raise InputError(f"{where}: url {url!r} is not {URLS[0]}, the one endpoint that batchspec takes; leave the line out")
    if not isinstance(custom_id, str | int) or isinstance(custom_id, bool):
        raise InputError(f"{where}: custom_id={json.dumps(custom_id)[:60]} is not text; give every line a unique one, as text")
    if extra := [key for key in line if key not in (*LINE_KEYS, *drop)]:
        raise InputError(
            f"{where}: {extra[0]} is outside body, where nothing reads it; move it into body, or pass --drop {extra[0]}"
        )
    row: dict[str, Any] = {"id": str(custom_id), "messages": _messages(messages, where)}
    row |= _prefix(messages, where) if messages else {}
    keys: dict[str, str] = {}
    for key, value in body.items():
        if value is None or key in ("messages", *WITHOUT_EFFECT, *drop):
            continue
        for column, cell in _cells(key, value, body, where).items():
            if column in keys and row[column] != cell:
                raise InputError(
                    f"{where}: body.{keys[column]} and body.{key} ask for different things, and a row has one {column}; "
                    f"leave one out, or pass --drop {key}"
                )
            row[column], keys[column] = cell, key
    return row


def _cells(key: str, value: Any, body: Line, where: str) -> dict[str, Any]:
    """The columns that a key of the body fills, and their cells. Raises InputError, as `parse_request`."""
    if key in NUMBERS:
        return {NUMBERS[key]: _number(value, COLUMNS[NUMBERS[key]], f"{where}: body.{key}")}
    if key == "tools":
        return {"tools": json.dumps(value, ensure_ascii=False)}
    if key == TEMPLATE_KWARGS or key in OF_TEMPLATE:
        return {"template_kwargs": json.dumps(_template_kwargs(body, where), ensure_ascii=False)}
    if key == "response_format":
        return _response_format(value, f"{where}: body.{key}")
    if key == "logit_bias":
        return _logit_bias(value, f"{where}: body.{key}")
    if key == "structured_outputs" or key in GUIDED:
        return _structured(key, value, f"{where}: body.{key}")
    if key == "stop":
        return {"stop": _strings(value, f"{where}: body.stop")}
    if key in (GOES_ON, ADDS_ANSWER):
        return _final_assistant(body, f"{where}: body.{key}")
    if key in NEUTRAL and value == NEUTRAL[key]:
        return {}
    raise InputError(
        f"{where}: body.{key}={json.dumps(value)[:60]} has no column in a batchspec input; "
        f"set it for the whole job if there is a key for it, and pass --drop {key}"
    )


def _final_assistant(body: Line, where: str) -> dict[str, str]:
    """What vLLM's two keys ask for. They contradict each other if both are true, or both false."""
    goes_on, adds = body.get(GOES_ON) or False, body.get(ADDS_ANSWER)
    if not isinstance(goes_on, bool) or adds not in (None, True, False):
        raise InputError(f"{where} is neither true nor false; correct the line")
    if (adds is True and goes_on) or (adds is False and not goes_on):
        raise InputError(
            f"{where}: {ADDS_ANSWER}={json.dumps(adds)} with {GOES_ON}={json.dumps(goes_on)} asks for no answer; correct it"
        )
    if goes_on and (not body["messages"] or body["messages"][-1].get("role") != "assistant"):
        raise InputError(f"{where}: the last message is not the assistant's, so nothing can continue it; correct the line")
    return {"final_assistant": "continue"} if goes_on else {}


def _prefix(turns: Sequence[Line], where: str) -> dict[str, str]:
    """What `prefix` or `partial` of the last message asks for: that the answer continues it (DeepSeek's, Mistral's, Qwen's)."""
    for i, turn in enumerate(turns):
        for name in PREFIX:
            value = turn.get(name)
            if value not in (None, True, False) or (value and (i + 1 < len(turns) or turn.get("role") != "assistant")):
                raise InputError(f"{where}: body.messages[{i}].{name} is for a last message of the assistant; correct the line")
    return {"final_assistant": "continue"} if any(turns[-1].get(name) for name in PREFIX) else {}


def _logit_bias(biases: Any, where: str) -> dict[str, str]:
    """The map as JSON text; nothing for an empty map. Admission checks the ids against the vocabulary."""
    try:
        found = logit_bias(biases)
    except ValueError as error:
        raise InputError(f"{where} {error}") from None
    return {"logit_bias": json.dumps(found)} if found else {}


def _response_format(form: Any, where: str) -> dict[str, str]:
    """OpenAI's object unchanged; nothing for plain text. Admission checks the schema."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("text", "json_object", "json_schema", "grammar", "regex", "choice"):
        raise InputError(
            f"{where}.type={json.dumps(kind)[:60]} is not text, json_object, json_schema, grammar, regex or choice; "
            "correct the line"
        )
    return {} if kind == "text" else {"response_format": json.dumps(form, ensure_ascii=False)}


def _structured(key: str, value: Any, where: str) -> dict[str, str]:
    """vLLM's `structured_outputs`, {"json", "regex", "choice", "grammar" or "json_object": ...}, or one of GUIDED."""
    asked = {GUIDED[key]: value} if key in GUIDED else value
    given = {name: one for name, one in asked.items() if one is not None} if isinstance(asked, dict) else {}
    match list(given.items()):
        case [("json", schema)]:
            form: dict[str, Any] = {"type": "json_schema", "json_schema": {"schema": _parsed(schema)}}
        case [("json_object", True)]:
            form = {"type": "json_object"}
        case [("regex" | "choice" | "grammar" as name, one)]:
            form = {"type": name, name: one}
        case _:
            raise InputError(
                f"{where}={json.dumps(value)[:60]} is not one of json, regex, choice, grammar and json_object; correct the line"
            )
    return {"response_format": json.dumps(form, ensure_ascii=False)}


def _parsed(schema: Any) -> Any:
    """A schema that may be given as JSON text."""
    try:
        return parse(schema) if isinstance(schema, str) else schema
    except ValueError:
        return schema


def _template_kwargs(body: Line, where: str) -> dict[str, Any]:
    kwargs = body.get(TEMPLATE_KWARGS) or {}
    if not isinstance(kwargs, dict):
        raise InputError(f"{where}: body.{TEMPLATE_KWARGS} is not an object; correct the line")
    return {**kwargs, **{key: body[key] for key in OF_TEMPLATE if body.get(key) is not None}}


def _messages(turns: Any, where: str) -> list[Message]:
    if not isinstance(turns, list):
        raise InputError(f"{where}: body.messages is not a list of messages; write objects with role and content")
    for i, turn in enumerate(turns):
        known = (*TURN_KEYS, *PREFIX)
        other = [key for key in turn if key not in known and turn[key] not in (None, [])] if isinstance(turn, dict) else []
        if other:
            raise InputError(
                f"{where}: body.messages[{i}].{other[0]} has no place in a batchspec input; leave the line out or rewrite it"
            )
    try:
        return read_chat([_only_read(turn) for turn in turns], final="continue")
    except BadChat as error:
        raise InputError(f"{where}: body.messages: {error}") from None


def _only_read(turn: Any) -> Any:
    """The message with the keys that chat templates read."""
    return {key: value for key, value in turn.items() if key in TURN_KEYS} if isinstance(turn, dict) else turn


def filled(row: Line) -> set[str]:
    """The columns that a request's row fills, and `messages.json` if its messages have more than role and content."""
    more = any(turn.keys() - {"role", "content"} or turn.get("content") is None for turn in row["messages"])
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


def _number(value: Any, kind: pa.DataType, where: str) -> int | float:
    whole = pa.types.is_integer(kind)
    if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value % 1 != 0):
        raise InputError(f"{where}={json.dumps(value)[:60]} is not {'a whole number' if whole else 'a number'}; correct the line")
    if (whole or isinstance(value, int)) and not -(1 << 63) <= value < 1 << 63:  # a float may not hold such an integer either
        raise InputError(f"{where}={str(value)[:60]} does not fit in 64 bits; correct the line")
    return int(value) if whole else float(value)


def _strings(value: Any, where: str) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise InputError(f"{where} is neither a string nor a list of strings; correct the line")
    return strings
