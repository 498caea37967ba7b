"""llama3_json: calls as JSON objects that are the whole answer, {"name": "f", "parameters": {}}; several are separated by `;`.

After <|python_tag|> they may follow other text. Without that mark an answer is a call only if all of it is calls of the row's own
tools, because any JSON may have a `name`.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchspec.tool_calls.form import Found, Tools, named_call, object_at, past_space

MARK = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class LlamaJson:
    name: str = "llama3_json"

    def find(self, text: str, tools: Tools) -> list[Found]:
        begin = 0 if text.lstrip().startswith("{") else max(0, text.find(MARK))  # a string may hold the mark
        marked = text.startswith(MARK, begin)
        at = past_space(text, begin + len(MARK) * marked)
        found: list[Found] = []
        while at < len(text):
            read = object_at(text, at)
            call = None if read is None else named_call(read[0])
            if read is None or call is None or not (marked or call[0] in tools):
                return []
            at = past_space(text, read[1])
            if text.startswith((";", ","), at):
                at = past_space(text, at + 1)
            found.append(Found(found[-1].end if found else begin, at, *call))
        return found


LLAMA3_JSON = LlamaJson()
