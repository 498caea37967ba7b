"""An answer as its content and its tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from batchspec.records import Completion, Request
from batchspec.tool_calls.form import Found, ToolForm, Tools

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
ID_CHARS = 9
"""Mistral's chat templates take no other length, and letters and digits alone."""


@dataclass(frozen=True, slots=True)
class CallParser:
    """Finds the tool calls in the text of answers."""

    form: ToolForm
    decode: Callable[[Sequence[int], bool], str]
    """Token ids to text; second argument: whether special tokens are left out, by which many forms mark calls."""

    def parsed(
        self, done: Completion, request: Request, tokens: Sequence[int], *,
        text_of: Callable[[Sequence[int]], str] | None = None, found: str | None = None,
    ) -> Completion:
        """The completion with the calls of its answer as `tool_calls` and the rest as its text; without a call, or if the row has
        no tools, as it is.

        tokens   of the answer, without the stop id
        text_of  the function that made the text of an answer with a constraint; None: `decode`
        found    the answer's text without special tokens, up to the stop string that ended the row; None: none did
        """
        if request.tools is None or done.text is None:
            return done
        if text_of is not None:
            raw = text_of(tokens) if found is None else found
        else:
            raw = self.decode(tokens, False) if found is None else self._marked(found, tokens)
        read = self.form.find(raw, Tools(request.tools))
        if not read:
            return done
        kept = read[:1] if request.one_call else read  # as vLLM
        calls = [openai_call(request, place, call.name, call.arguments) for place, call in enumerate(kept)]
        return done.replace(text=self._rest(raw, read, tokens), tool_calls=json_of(calls))

    def _marked(self, text: str, tokens: Sequence[int]) -> str:
        """The beginning `text` of an answer, with the special tokens in it and right after it."""
        for count in range(len(tokens), 0, -1):
            before = self.decode(tokens[:count], True)
            if text.startswith(before):
                return self.decode(tokens[:count], False) + text[len(before) :]
        return text

    def _rest(self, raw: str, found: Sequence[Found], tokens: Sequence[int]) -> str:
        """The text outside of the calls, without special tokens; a line break joins its parts."""
        ends = [0, *(call.end for call in found)]
        begins = [*(call.begin for call in found), len(raw)]
        parts = [raw[end:begin] for end, begin in zip(ends, begins, strict=True)]
        if any(part.strip() for part in parts):
            special = {self.decode([token], False) for token in set(tokens) if not self.decode([token], True)} - {""}
            for text in special:
                parts = [part.replace(text, "") for part in parts]
        return "\n".join(part.strip() for part in parts if part.strip())


def openai_call(request: Request, place: int, name: str, arguments: str) -> dict[str, Any]:
    """The call at this place among a row's calls, in the form of OpenAI's chat format."""
    return {"id": call_id(request, place), "type": "function", "function": {"name": name, "arguments": arguments}}


def call_id(request: Request, place: int) -> str:
    """The id of a row's call: the same in every run, and another one in each turn of a conversation, as each has its own seed."""
    key = f"{request.row_index} {request.sample_index} {request.seed} {place}"
    number = int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
    letters = []
    for _ in range(ID_CHARS):
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)


def json_of(calls: Sequence[dict[str, Any]]) -> str:
    """The column `tool_calls`."""
    return json.dumps(calls, ensure_ascii=False)
