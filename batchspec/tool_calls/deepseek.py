"""deepseek: calls as JSON between DeepSeek's marks, which all have a bar and underscores of their own (U+FF5C, U+2581).

V3, R1  <tool_calls_begin><tool_call_begin>function<tool_sep>f, a line break, and the arguments in a block ```json<tool_call_end>
V3.1    <tool_calls_begin><tool_call_begin>f<tool_sep>{}<tool_call_end>, several of them, <tool_calls_end>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchspec.tool_calls.form import Found, Tools, object_at, past_space

MARK = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_ALL_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_BEGIN, _END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_HEAD = re.compile(
    rf"(?:{MARK}\s*)?{_BEGIN}(?:function<\uff5ctool\u2581sep\uff5c>([^\n<]+)\n```json\n|([^\n<]+)<\uff5ctool\u2581sep\uff5c>)\s*"
)
_TAIL = re.compile(rf"\s*(?:```\s*)?(?:{_END}\s*(?:{_ALL_END})?|\Z)")


@dataclass(frozen=True, slots=True)
class DeepSeek:
    name: str = "deepseek"

    def find(self, text: str, tools: Tools) -> list[Found]:
        found, at = [], 0
        while (head := _HEAD.search(text, at)) is not None:
            at = head.end()
            read = object_at(text, at)
            tail = None if read is None else _TAIL.match(text, read[1])
            if read is not None and tail is not None:
                found.append(Found(head.start(), tail.end(), (head[1] or head[2]).strip(), text[at : read[1]]))
                at = past_space(text, tail.end())
        return found


DEEPSEEK = DeepSeek()
