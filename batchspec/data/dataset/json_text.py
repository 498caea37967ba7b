"""Untrusted JSON text as Python values: either a value, or an error of one line; and values as JSON text.

msgspec parses: integers of any size stay exact, and text that is nested too deeply is refused instead of crashing. What it
refuses is parsed again by the standard library, which accepts NaN and lone surrogates and has error messages that people
understand.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from batchspec.errors import OneLine

MAX_DEPTH = 128
"""Maximum nesting of lists and objects; chats and tools have about 10 levels. It is below what any stack here can hold, so that
refusals do not depend on the caller."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?+', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_any = msgspec.json.Decoder()
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class BadJson(OneLine, ValueError):
    """Text that is not JSON. The message is one line."""


class BadText(BadJson):
    """JSON with a string that is not valid text."""


def parse(text: str | bytes) -> Any:
    """The value. Raises BadJson."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    check_depth(data)
    try:
        return _any.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = _slowly(data)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadText("it holds half of a surrogate pair, such as \\ud83d, or bytes that are not UTF-8") from None
    return value


def text_bytes(cell: bytes) -> bytes:
    """The text of a JSON string in UTF-8; half a surrogate pair, which is not text, becomes bytes that are not UTF-8."""
    value = _slowly(cell)
    assert isinstance(value, str)
    return value.encode("utf-8", "surrogatepass")


def members(line: bytes) -> dict[str, bytes | msgspec.Raw]:
    """The JSON text of each value of an object. Raises BadJson if it is not an object."""
    check_depth(line)
    try:
        return _members.decode(line)  # type: ignore[return-value]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = _slowly(line)
    if not isinstance(value, dict):
        raise BadJson(f"the line is {called(value)}, not an object")
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        raise BadText("a key holds half of a surrogate pair, such as \\ud83d, which is not text") from None
    return {key: json.dumps(item).encode() for key, item in value.items()}


def json_of(value: Any, enc_hook: Callable[[Any], Any] | None = None) -> str:
    """A value as JSON text, dates and bytes as strings. NaN, for which msgspec's encoder writes null, stays NaN.

    enc_hook  makes a plain value of one whose type msgspec does not know, or raises TypeError
    """
    return _encoder.encode(msgspec.to_builtins(value, str_keys=True, enc_hook=enc_hook))


def check_depth(data: bytes) -> None:
    """Raise BadJson for text that is nested more than MAX_DEPTH levels deep."""
    if len(data) <= MAX_DEPTH or data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    depth = max(itertools.accumulate(map(_STEP.__getitem__, brackets)), default=0)
    if depth > MAX_DEPTH:
        raise BadJson(f"it is nested {depth:,} levels deep, and at most {MAX_DEPTH} are taken")


def called(value: Any) -> str:
    """The kind of a value, as a noun phrase for messages."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _slowly(data: bytes) -> Any:
    """Parse with the standard library. Bytes that are not UTF-8 become lone surrogates, which no encoder accepts."""
    try:
        return json.loads(data.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise BadJson(f"it is not JSON ({' '.join(str(error).split())[:200]})") from None
