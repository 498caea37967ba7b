"""What a chat template leaves out of a chat.

A template is code: whether it writes a part may depend on the roles around it, on what else the message has, and on variables. So
a chat's outline is rendered: the same messages, tools and variables, but each text is replaced by a unique word. A part was
dropped if its words are missing in the rendered outline. The result is kept: chats with the same outline have the same one.
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from batchspec.data.dataset.messages import THOUGHT_FIELDS

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str | None]
"""Renders a chat as the one that is checked is rendered; None if the template refuses it."""

MAX_KEPT = 8192
"""Number of outlines whose results are kept."""
REASONING = "reasoning"
_LINKS = {"role", "content", "tool_calls", "tool_call_id", *THOUGHT_FIELDS}
"""Keys of a message with checks of their own, or that need none, because they only say to which call a result belongs."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """parts: what must not be missing; keys: names of other fields of messages, which most templates do not read."""

    parts: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


class DroppedParts:
    """Finds what one template drops of chats; results are kept by outline."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Dropped] = OrderedDict()

    def of(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any],
        render: Render,
    ) -> Dropped:
        """What the template drops of a chat. variables: whatever else `render` depends on."""
        outline = _Outline()
        turns = [outline.message(place, message) for place, message in enumerate(messages)]
        functions = None if tools is None else [outline.tool(tool) for tool in tools]
        whole = json.dumps([turns, functions, variables], default=str, sort_keys=True)
        key = blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key not in self._kept:
            text = render(turns, functions)
            self._kept[key] = Dropped() if text is None else outline.missing_in(text)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


@dataclass(slots=True)
class _Outline:
    """Replaces the texts of a chat by words, and remembers which part or key each word belongs to."""

    parts: dict[str, list[str]] = field(default_factory=dict)
    """Part -> its words, all of which the template must write."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Key of a message -> its words, one of which is enough."""
    _called: dict[str, str] = field(default_factory=dict)
    """Name of a function -> the word in its place in the newest call of it, for the name that the call's result may have."""
    _calls: dict[str, str] = field(default_factory=dict)
    _number: Any = field(default_factory=itertools.count)

    def _word(self) -> str:
        return f"zq{next(self._number)}qz"

    def _replaced(self, part: str, text: Any) -> Any:
        """A word of this part in place of its text; blank text stays."""
        if not isinstance(text, str) or not text.strip():
            return text
        word = self._word()
        self.parts.setdefault(part, []).append(word)
        return word

    def message(self, place: int, message: Mapping[str, Any]) -> dict[str, Any]:
        turn = dict(message)
        where = f"message {place} (role {turn['role']})"
        content = turn.get("content")
        if isinstance(content, list):
            turn["content"] = [
                {**part, "text": self._replaced(f"the text of {where}", part["text"])} if "text" in part else part
                for part in content
            ]
        else:
            turn["content"] = self._replaced(f"the text of {where}", content)
        if turn.get("tool_calls"):
            turn["tool_calls"] = [self._call(f"the tool calls of {where}", call) for call in turn["tool_calls"]]
        if "tool_call_id" in turn:
            turn["tool_call_id"] = self._call_id(turn["tool_call_id"])
        for name in turn.keys() - _LINKS:
            if name == "name" and turn["role"] == "tool":
                turn[name] = self._called.get(str(turn[name]), "zqfunction")
            else:
                turn[name] = self._other(name, turn[name])
        for name in THOUGHT_FIELDS:
            if name in turn:
                turn[name] = self._other(REASONING, turn[name])
        return turn

    def _call(self, part: str, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call counts as written if its arguments are, or its name if it has none: no other call and no tool has that word."""
        function, given = dict(call["function"]), call["function"]["arguments"]
        self._called[function["name"]] = word = self._word()
        function["name"] = word
        if given and given != "{}":
            words = {self._word(): self._word()}
            self.parts.setdefault(part, []).extend([*words.keys(), *words.values()])
            function["arguments"] = json.dumps(words) if isinstance(given, str) else words
        else:
            self.parts.setdefault(part, []).append(word)
        return {**call, "function": function} | ({"id": self._call_id(call["id"])} if "id" in call else {})

    def _call_id(self, given: Any) -> str:
        """Nine letters and digits, as Mistral's templates want them."""
        return self._calls.setdefault(str(given), f"zq{len(self._calls):07}")

    def _other(self, key: str, value: Any) -> Any:
        """The value of another key, with words in place of its texts."""
        if isinstance(value, str) and value.strip():
            word = self._word()
            self.keys.setdefault(key, []).append(word)
            return word
        if isinstance(value, Mapping):
            return {name: self._other(key, item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._other(key, item) for item in value]
        return value if isinstance(value, bool) or value is None else 7

    def tool(self, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return tool  # not a function: the template alone knows what it is
        name, parameter = self._word(), self._word()
        self.parts.setdefault("the tools", []).append(name)
        outline: dict[str, Any] = {key: "zqtext" for key in function if key not in ("name", "parameters")} | {"name": name}
        if function.get("parameters"):
            self.parts["the tools"].append(parameter)
            described = {parameter: {"type": "string", "description": "zqtext"}}
            outline["parameters"] = {"type": "object", "properties": described, "required": [parameter]}
        return {**tool, "function": outline} if "function" in tool else outline

    def missing_in(self, text: str) -> Dropped:
        return Dropped(
            tuple(part for part, words in self.parts.items() if not all(word in text for word in words)),
            tuple(sorted(key for key, words in self.keys.items() if not any(word in text for word in words))),
        )
