"""gemma4: <|tool_call>call:f{x:1,s:<|"|>text<|"|>,o:{k:[true,null]}}<tool_call|>, which is JSON but for its strings and its keys.

Source: the chat template of google/gemma-4-31B-it (macro format_argument); vllm/tool_parsers/gemma4_tool_parser.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from batchspec.tool_calls.form import Found, Tools, json_end, past_space

_BEGIN = re.compile(r"<\|tool_call>\s*call:([^\s{]+)\s*(?=\{)")
_END = re.compile(r"\s*(?:<tool_call\|>|\Z)")
_QUOTE = '<|"|>'
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_MAX_DEPTH = 64


class _Malformed(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class Gemma4:
    name: str = "gemma4"

    def find(self, text: str, tools: Tools) -> list[Found]:
        found, at = [], 0
        while (begin := _BEGIN.search(text, at)) is not None:
            at = begin.end()
            try:
                arguments, after = _value(text, at)
            except _Malformed:
                continue
            if end := _END.match(text, after):
                at = end.end()
                found.append(Found(begin.start(), at, begin[1], arguments))
        return found


def _value(text: str, at: int, depth: int = 0) -> tuple[str, int]:
    """JSON text of the value that begins at `at`, and the index after it."""
    at = past_space(text, at)
    if text.startswith(_QUOTE, at):
        begin = at + len(_QUOTE)
        end = text.find(_QUOTE, begin)
        if end < 0:
            raise _Malformed
        return json.dumps(text[begin:end], ensure_ascii=False), end + len(_QUOTE)
    if depth < _MAX_DEPTH and text.startswith(("{", "["), at):
        return _items(text, at, depth)
    after = json_end(text, at)
    if after is None or text.startswith(("{", "["), at):
        raise _Malformed
    return text[at:after], after


def _items(text: str, at: int, depth: int) -> tuple[str, int]:
    """The same of an object or a list."""
    is_object, close = text[at] == "{", "}" if text[at] == "{" else "]"
    items: list[str] = []
    at = past_space(text, at + 1)
    while not text.startswith(close, at):
        if items and not text.startswith(",", at):
            raise _Malformed
        at = past_space(text, at + 1) if items else at
        key = ""
        if is_object:
            key, at = _key(text, at)
        item, at = _value(text, at, depth + 1)
        items.append(key + item)
        at = past_space(text, at)
    return f"{'{' if is_object else '['}{', '.join(items)}{close}", at + 1


def _key(text: str, at: int) -> tuple[str, int]:
    """A key as JSON, its colon included: a plain word, or a string."""
    if text.startswith(_QUOTE, at):
        name, at = _value(text, at)
        at = past_space(text, at)
        if not text.startswith(":", at):
            raise _Malformed
        return f"{name}: ", at + 1
    match = _KEY.match(text, at)
    if match is None:
        raise _Malformed
    return f"{json.dumps(match[1], ensure_ascii=False)}: ", match.end()


GEMMA4 = Gemma4()
