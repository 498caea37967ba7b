"""The form in which a chat template wants the parts of a chat, found by rendering probes instead of by words of its source.

A probe is a small chat of words that no template writes by itself. A form is right if the rendered text has all of them, and
none of the signs of a part in the wrong form: Python's text of an object, JSON inside a JSON string, or `None`.

Where several forms are right, it is the one that vLLM gives to every template, for OpenAI's requests: arguments of tool calls as
an object, and empty text beside calls (vllm/entrypoints/chat_utils.py, _parse_chat_message_content and _postprocess_messages).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from batchspec.data.dataset.messages import THOUGHT_FIELDS, text_of
from batchspec.tool_calls.probe import ARGUMENTS, CALL_ID, FUNCTION, TOOLS, probe_call

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Mapping[str, Any]], str | None]
"""(messages, other variables) -> the text; None if the template refuses the chat."""

TOOLS_VARIABLES = ("tools", "xml_tools")
"""Variables that templates read tools from: transformers' own, and SmolLM3's."""

USER = {"role": "user", "content": "zqquestion"}
RESULT = {"role": "tool", "tool_call_id": CALL_ID, "name": FUNCTION, "content": "zqresult"}


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """What `adapted` makes of a chat for one template."""

    arguments_as_text: bool = False
    """Arguments of tool calls are JSON text, not an object."""
    content_beside_calls: str | None = ""
    """The content of a message that has tool calls and no text."""
    thought_field: str | None = None
    """The field that has the reasoning of an assistant's message; None: the template writes none."""
    roles_with_parts: frozenset[str] = frozenset()
    """Roles whose content may be a list of OpenAI's text parts. For the others a line break joins the parts, as in vLLM."""
    roles_without_text: frozenset[str] = frozenset()
    """Those of them whose content must be such a list."""
    tools_variable: str = "tools"
    """The variable with the tools of a chat."""

    def adapted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as the template wants them. Raises ValueError for a tool call that it cannot write."""
        return [self._adapted(place, message) for place, message in enumerate(messages)]

    def _adapted(self, place: int, message: Message) -> dict[str, Any]:
        changed = dict(message)
        content = changed.get("content")
        if isinstance(content, list) and changed["role"] not in self.roles_with_parts:
            if any("text" not in part for part in content):
                raise ValueError(f"it takes no parts of messages of role {changed['role']}, and message {place} has an image")
            changed["content"] = content = text_of(content)
        if isinstance(content, str) and content and changed["role"] in self.roles_without_text:
            changed["content"] = [{"type": "text", "text": content}]
        if changed.get("tool_calls"):
            changed["tool_calls"] = [self._call(place, call) for call in changed["tool_calls"]]
            if not changed.get("content"):
                changed["content"] = self.content_beside_calls
        there = [field for field in THOUGHT_FIELDS if changed.get(field)]
        if self.thought_field is not None and there and changed["role"] == "assistant":
            first = self.thought_field if self.thought_field in there else there[0]
            thought = changed[first]
            for field in there:
                del changed[field]
            changed[self.thought_field] = thought
        return changed

    def _call(self, place: int, call: Mapping[str, Any]) -> dict[str, Any]:
        """A tool call in OpenAI's form; only the function may be given."""
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"message {place} has a tool call without the name of a function")
        outer = {**call, "type": "function"} if "function" in call else {"type": "function"}
        return outer | {"function": {**function, "arguments": self._arguments(place, function)}}

    def _arguments(self, place: int, function: Mapping[str, Any]) -> Any:
        given = function.get("arguments") or {}
        if isinstance(given, str) and self.arguments_as_text:
            return given
        value = given
        if isinstance(given, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(given)
        if not isinstance(value, Mapping):
            raise ValueError(f"message {place}: the arguments of the call of {function['name'][:40]!r} are not a JSON object")
        return json.dumps(value, ensure_ascii=False) if self.arguments_as_text else value


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def find_form(render: Render) -> TemplateForm:
    """The form that a template wants. render: renders a chat by it, up to the beginning of the next answer."""
    tools = _find_tools_variable(render)
    with_tools = {tools: TOOLS}
    as_text, content = _find_call_form(render, with_tools)
    turn = assistant(content, tool_calls=[probe_call(as_text=as_text)])
    with_parts, without_text = _find_roles_with_parts(render, turn, with_tools)
    return TemplateForm(
        arguments_as_text=as_text, content_beside_calls=content, thought_field=_find_thought_field(render, turn, with_tools),
        roles_with_parts=with_parts, roles_without_text=without_text, tools_variable=tools,
    )


def _find_tools_variable(render: Render) -> str:
    return next((name for name in TOOLS_VARIABLES if FUNCTION in (render([USER], {name: TOOLS}) or "")), TOOLS_VARIABLES[0])


def _find_call_form(render: Render, with_tools: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Whether arguments are text, and the content beside calls. Those of most templates if this one writes no calls."""
    for as_text in (False, True):
        for content in ("", None):
            text = render([USER, assistant(content, tool_calls=[probe_call(as_text=as_text)]), RESULT], with_tools)
            if text is not None and _writes_call(text):
                return as_text, content
    return False, ""


def _writes_call(text: str) -> bool:
    after = text.rpartition(USER["content"])[2]
    is_python, is_in_string = str(ARGUMENTS) in after, '\\"zqkey' in after
    wanted = ("zqkey", "zqvalue", "zqflag")
    return all(word in after for word in wanted) and not (is_python or is_in_string or "None" in after)


def _find_thought_field(render: Render, turn: Message, with_tools: Mapping[str, Any]) -> str | None:
    """The field from which the template takes an assistant's reasoning; None: it writes none. Several chats are tried, because
    most templates write only the reasoning that led to the newest calls, or to the last message.

    turn  with a call
    """
    thought = "zqthought"
    for field in THOUGHT_FIELDS:
        of_answer = assistant("zqanswer", **{field: thought})
        chats: tuple[tuple[list[Message], Mapping[str, Any]], ...] = (
            ([USER, {**turn, field: thought}, RESULT], with_tools),
            ([USER, of_answer], {"add_generation_prompt": False}),
            ([USER, of_answer, USER], {}),
        )
        if any(thought in (render(*chat) or "") for chat in chats):
            return field
    return None


def _find_roles_with_parts(
    render: Render, turn: Message, with_tools: Mapping[str, Any]
) -> tuple[frozenset[str], frozenset[str]]:
    """The roles whose content may be a list of parts, and those whose content must be one. turn: with a call."""
    chats: dict[str, Callable[[Any], list[Message]]] = {
        "system": lambda content: [{"role": "system", "content": content}, USER],
        "user": lambda content: [{"role": "user", "content": content}],
        "assistant": lambda content: [USER, assistant(content), USER],
        "tool": lambda content: [USER, turn, {**RESULT, "content": content}],
    }
    variables = {role: with_tools if role == "tool" else {} for role in chats}
    parts = [{"type": "text", "text": "zqfirst"}, {"type": "text", "text": "zqsecond"}]
    found = {role for role, chat in chats.items() if _has_texts(render(chat(parts), variables[role]))}
    only = {role for role in found if "zqfirst" not in (render(chats[role]("zqfirst"), variables[role]) or "")}
    return frozenset(found), frozenset(only)


def _has_texts(text: str | None) -> bool:
    """Whether a text has both parts, and not as the text of a list."""
    _, first, after = (text or "").partition("zqfirst")
    between, second, _ = after.partition("zqsecond")
    return bool(first and second) and not set(between) & set("{}[]'\"")
