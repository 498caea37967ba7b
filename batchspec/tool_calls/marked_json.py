"""Calls as JSON between marks.

hermes   <tool_call>{"name": "f", "arguments": {}}</tool_call>       Hermes 2 and 3, Qwen 2.5, Qwen3, Granite 4, EXAONE 4, SmolLM3
granite  <|tool_call|>[{"name": "f", "arguments": {}}], Granite 3
phi4     the same with <|/tool_call|> at the end, Phi-4-mini
nemotron_json  <TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>, Nemotron Nano 2
mistral  [TOOL_CALLS][{"name": "f", "arguments": {}}]; newer models [TOOL_CALLS]f[ARGS]{}, some with [CALL_ID] before [ARGS]

The closing mark may be missing at the end of the text: JSON says itself where it ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchspec.tool_calls.form import Found, Tools, named_call, object_at, past_space

_NAME = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


@dataclass(frozen=True, slots=True)
class MarkedJson:
    name: str
    begin: str
    end: str
    """Empty: nothing marks the end."""

    def find(self, text: str, tools: Tools) -> list[Found]:
        found: list[Found] = []
        at = text.find(self.begin)
        while at >= 0:
            calls, end = self._calls_at(text, at + len(self.begin))
            found += [Found(at if place == 0 else end, end, *call) for place, call in enumerate(calls)]
            at = text.find(self.begin, end)
        return found

    def _calls_at(self, text: str, at: int) -> tuple[list[tuple[str, str]], int]:
        """The calls that follow a mark, and the index after them; no call and `at` where they are malformed."""
        read = listed_calls(text, past_space(text, at))
        if read is None:
            return [], at
        calls, after = read
        end = past_space(text, after)
        if self.end and text.startswith(self.end, end):
            return calls, end + len(self.end)
        return (calls, after) if not self.end or end == len(text) else ([], at)


@dataclass(frozen=True, slots=True)
class MistralForm(MarkedJson):
    def _calls_at(self, text: str, at: int) -> tuple[list[tuple[str, str]], int]:
        name = _NAME.match(text, at)
        if name is None or (arguments := object_at(text, name.end())) is None:
            return MarkedJson._calls_at(self, text, at)
        return [(name[1], text[name.end() : arguments[1]])], arguments[1]


def listed_calls(text: str, at: int) -> tuple[list[tuple[str, str]], int] | None:
    """Name and arguments of the call, or of each call of the list, that begins at `at`, and the index after it; else None."""
    whole_list = text.startswith("[", at)
    at = past_space(text, at + 1) if whole_list else at
    calls = []
    while (read := object_at(text, at)) is not None and (call := named_call(read[0])) is not None:
        calls.append(call)
        at = past_space(text, read[1]) if whole_list else read[1]
        if not whole_list:
            return calls, at
        if text.startswith("]", at):
            return calls, at + 1
        if not text.startswith(",", at):
            return None
        at = past_space(text, at + 1)
    return None


HERMES = MarkedJson("hermes", "<tool_call>", "</tool_call>")
GRANITE = MarkedJson("granite", "<|tool_call|>", "")
PHI4 = MarkedJson("phi4", "<|tool_call|>", "<|/tool_call|>")
NEMOTRON_JSON = MarkedJson("nemotron_json", "<TOOLCALL>", "</TOOLCALL>")
MISTRAL = MistralForm("mistral", "[TOOL_CALLS]", "")
