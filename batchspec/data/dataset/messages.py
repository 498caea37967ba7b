"""A row's chat in the form that the chat template reads and in the form of the output: OpenAI's messages, or ShareGPT's turns.

message   {"role", "content"} and whatever else the template reads: name, tool_calls, tool_call_id ...
ShareGPT  {"from": human|gpt|system|tool, "value"}

JSON values reach the template in the form that it wants (text/template_form.py). A field that is null or empty counts as
missing, however a row leaves it out: all structs of an Arrow column have the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchspec.config.schema import COMPLETE
from batchspec.data.dataset.json_text import BadJson, called, json_of, parse
from batchspec.data.dataset.untyped_columns import json_kinds
from batchspec.errors import OneLine

Message = dict[str, Any]

FINAL = ("error", "continue", "drop")
"""What to do with a chat that ends with the assistant's turn: input.final_assistant, or the row's own column."""
TOOL_FIELDS = ("name", "tool_calls", "tool_call_id")
"""Fields of a message in the output besides role and content, if the input's messages may have them; tool_calls is JSON text."""
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message that hold its reasoning, as servers and templates call them."""
THINKING_FIELD = "thinking"
"""Field of an assistant's message for its thought, as the chat templates of gpt-oss name it."""
USUAL_SYSTEM = "input.system"
"""Name of a row's value that replaces input.system: its text, if that is a template."""
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system", "tool": "tool", "observation": "tool",
}


_EMPTY: tuple[Any, ...] = (None, "", [], {})


IMAGE_MARK = "<image>"
"""An image in a text: where one of the row's column goes, and in place of an image in the output."""
IMAGE_PART = {"type": "image"}
_OF_IMAGES = ("image", "image_url")
"""Types of parts that are images: of OpenAI's requests and of Qwen's chats."""
DETAIL = "detail"
"""OpenAI's name for how many tokens an image has."""


class FromColumn:
    """In place of an image that a part does not give: the next one of the row's column."""


class BadChat(OneLine, ValueError):
    """What is wrong with a chat, in one line."""

    code = "bad_messages"


class NoVision(BadChat):
    """The chat has an image, and nothing reads images."""

    code = "no_vision"


def read_chat(
    prompt: Any, system: str | None = None, final: str = "error", usual_system: str | None = None,
    images: list[Any] | None = None,
) -> list[Message]:
    """The turns of a prompt: text, messages, or JSON text of messages. Raises BadChat.

    system  the row's own: replaces the system turn at the beginning, or goes before the first turn
    usual_system  the job's: goes before the first turn of a chat that begins neither with a system turn nor with a developer's
    final   error: refuse a chat that ends with the assistant's turn; drop: leave that turn out; continue, or COMPLETE:
            keep it
    images  what the parts of images give is appended, in their order: bytes, text, a struct, or `FromColumn`; each part is then
            IMAGE_PART. None: nothing reads images (NoVision)
    """
    turns = [_turn(place, message, images) for place, message in enumerate(prompt)]
    begins = turns[0]["role"] if turns else ""
    if system is not None:
        turns = [{"role": "system", "content": system}, *(turns[1:] if begins == "system" else turns)]
    elif usual_system is not None and begins not in ("system", "developer"):
        turns = [{"role": "system", "content": usual_system}, *turns]
    if not turns or turns[-1]["role"] != "assistant":
        return turns
    if final == "drop":
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if not any(turn["role"] != "system" for turn in turns):
            raise BadChat("the chat holds no turn but the assistant's; drop the row")
    elif final == COMPLETE:
        return turns
    elif turns[-1].get("tool_calls"):
        raise BadChat("the chat ends with tool calls; add the messages of role tool that answer them")
    elif final == "error":
        raise BadChat(
            "the chat ends with an assistant's turn; set input.final_assistant=continue to have the model go on with it, or drop "
            "to have it answer the turns before; the column final_assistant says so for its row"
        )
    return turns


def with_user_turn(chat: Sequence[Any], text: str) -> list[Any]:
    """The chat and the user's next turn. Raises BadChat unless the chat ends with an answer."""
    last = _turn(len(chat) - 1, chat[-1], [])
    if last["role"] != "assistant" or last.get("tool_calls"):
        ends = "tool calls" if last["role"] == "assistant" else f"a turn of role {last['role']}"
        raise BadChat(f"the chat ends with {ends}, and input.prompt adds a user turn after an answer; correct it or drop the row")
    return [*chat, {"role": "user", "content": text}]


def messages_of(cell: Any) -> list[Any] | None:
    """The messages of a cell: a list, or JSON text of one. Raises BadChat."""
    if isinstance(cell, str) and cell.strip():
        try:
            cell = parse(cell)
        except BadJson as error:
            raise BadChat(f"messages hold text, and {error}; write a JSON list of messages") from None
    if cell is None or cell == "":
        return cell if cell is None else []
    if not isinstance(cell, list):
        raise BadChat(f"messages are {called(cell)}, not a list of messages; correct the row")
    return cell


def without_nulls(value: Any) -> Any:
    """An Arrow value without the fields that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _turn(place: int, message: Any, images: list[Any] | None = None) -> Message:
    if not isinstance(message, dict):
        raise BadChat(f"message {place} is {called(message)}, not an object with role and content; correct it or drop the row")
    if "role" not in message and "from" in message:
        message = _from_sharegpt(place, message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadChat(f"message {place} has role {role!r}, which must be text; correct it or drop the row")
    calls = _tool_calls(place, message.get("tool_calls") or [])
    turn: Message = {key: value for key, value in message.items() if value not in _EMPTY} | {"role": role}
    turn.pop("tool_calls", None)
    if calls:
        turn["tool_calls"] = calls
    content = message.get("content")
    if content is None and not (calls or any(field in turn for field in THOUGHT_FIELDS)):
        raise BadChat(f"message {place} has content None, which must be text; correct it or drop the row")
    if content is not None:
        turn["content"] = _content(place, content, role, images)
    elif not calls or "content" in message:
        turn["content"] = None if calls else ""
    return turn


def _from_sharegpt(place: int, message: Mapping[str, Any]) -> Message:
    role = _ROLES.get(str(message["from"]).lower())
    if role is None:
        said = f"message {place} is from {str(message['from'])[:40]!r}; ShareGPT has {', '.join(sorted(_ROLES))}"
        raise BadChat(f"{said}: correct it or drop the row")
    return {"role": role, "content": message.get("value")}


def _content(place: int, content: Any, role: str, images: list[Any] | None) -> str | list[dict[str, str]]:
    """Text as it is; OpenAI's list of text parts as one without other fields, or as text if it has at most one part. images: as
    in `read_chat`."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [_text(part) for part in content]
        found = [_image(place, part, role, images) for part, text in zip(content, texts, strict=True) if text is None]
        if images is not None:
            images += found
        parts = [dict(IMAGE_PART) if text is None else {"type": "text", "text": text} for text in texts]
        return parts if len(parts) > 1 or found else "".join(text or "" for text in texts)
    raise BadChat(f"message {place} has content that is {called(content)}, which must be text; correct it or drop the row")


def _text(part: Any) -> str | None:
    """The text of a part; None if it is no text, or gives an image too."""
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) and all(part.get(key) in _EMPTY for key in _OF_IMAGES) else None


def _image(place: int, part: Any, role: str, images: list[Any] | None) -> Any:
    """What a part that is no text gives, which must be an image. Raises BadChat, also for a key that would have no effect."""
    kind = part.get("type") if isinstance(part, dict) else called(part)
    where = f"message {place} holds a part of type {str(kind)[:40]!r}"
    if not isinstance(part, dict) or kind not in _OF_IMAGES:
        raise BadChat(f"{where}, and batchspec takes texts and images alone; drop the row")
    if role not in ("user", "tool"):
        raise BadChat(f"{where} with role {role[:40]!r}, and images are read of the roles user and tool alone; drop the row")
    found = part.get(kind)
    if images is None:
        loads = "name the column of its images, input.columns.images=COLUMN" if found is None else "set model.vision=true"
        raise NoVision(f"{where}, and the model's vision encoder is not loaded; {loads}, or drop the row")
    _refuse_other(where, part, ("type", kind))
    if kind == "image":
        return FromColumn() if found is None else found
    if isinstance(found, dict):
        if (detail := found.get(DETAIL)) not in (None, "auto"):
            raise BadChat(
                f"{where} with detail={str(detail)[:40]!r}, which would have no effect; limit pixels by input.max_pixels or a "
                "column max_pixels, and leave it out (of OpenAI's requests: input.drop=[detail])"
            )
        _refuse_other(f"{where} whose image_url", found, ("url", DETAIL))
        return found.get("url")
    return found


def _refuse_other(where: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises BadChat for a key with a value that is not known."""
    if other := [key for key, value in values.items() if key not in known and value not in _EMPTY]:
        raise BadChat(
            f"{where} has {str(other[0])[:40]}={str(values[other[0]])[:40]!r}, which would have no effect; put the image under "
            "image or image_url, as type says, and limits in the columns min_pixels and max_pixels"
        )


def _tool_calls(place: int, calls: Any) -> list[Any]:
    if isinstance(calls, str):
        try:
            calls = parse(calls)
        except BadJson as error:
            raise BadChat(f"message {place} has tool_calls that are text, and {error}; correct it or drop the row") from None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadChat(f"message {place} has tool_calls that are not a list of objects; correct it or drop the row")
    return calls


def text_of(content: str | Sequence[Mapping[str, str]] | None) -> str | None:
    """The text of a message, with a mark for each image; None if it has tool calls alone. A line break joins parts, as in vLLM
    (chat_utils.py, _parse_chat_message_content_parts)."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part.get("text", IMAGE_MARK) for part in content)


def kept_turn(turn: Mapping[str, Any], fields: Sequence[str]) -> Message:
    """A message as the output's column `messages` holds it."""
    kept = {name: turn.get(name) for name in fields} | {"content": text_of(turn.get("content"))}
    if kept.get("tool_calls") is not None:
        kept["tool_calls"] = json_of(kept["tool_calls"])
    return kept


def may_call_tools(field: pa.Field) -> bool:
    """Whether messages of this input column may have more fields than role and content, judged by its type."""
    kinds = json_kinds(field)
    if kinds:
        return bool(kinds & {"tool_calls", "text"})
    kind = field.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.types.is_struct(kind.value_type) and any(item.name.startswith("tool_call") for item in kind.value_type)
    return True
