"""glm4: the name of a function, a line break, and its arguments as JSON, as the whole answer (GLM-4-0414).

Source: the chat template of zai-org/GLM-4-32B-0414, which writes `metadata`, a line break and the content of such a turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchspec.tool_calls.form import Found, Tools, object_at

_NAME = re.compile(r"\s*([^\s{}<>|]+)[ \t]*\n\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class Glm4:
    name: str = "glm4"

    def find(self, text: str, tools: Tools) -> list[Found]:
        head = _NAME.match(text)
        read = None if head is None or head[1] not in tools else object_at(text, head.end())
        if head is None or read is None or text[read[1] :].strip():
            return []
        return [Found(0, len(text), head[1], text[head.end() : read[1]])]


GLM4 = Glm4()
