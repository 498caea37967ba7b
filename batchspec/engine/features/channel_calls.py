"""The tool calls that a model with channels (harmony) makes, as JSON text in the form of OpenAI's chat format."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from batchspec.engine.features.thinking import Call
from batchspec.records import Channels, Request
from batchspec.tool_calls.split import json_of, openai_call

NAMESPACE = "functions."
"""Recipients that are the user's own tools begin with this; others, such as `python`, belong to the model's format."""
_RECIPIENT = re.compile(r"\bto=(\S+)")
_NAMES = re.compile(r"^(\s*(assistant|analysis|commentary|final)\b)+")


def tool_calls(calls: Sequence[Call], request: Request, decode: Callable[[Sequence[int]], str]) -> tuple[str | None, list[str]]:
    """JSON text of the list of calls (None if there is none), and the texts of those that turn out to have no recipient.

    A call is {"id", "type": "function", "function": {"name", "arguments"}, "recipient", "content_type"}: name is the recipient
    without `functions.`, arguments the message's text, content_type the type that the header names, such as json, or null.
    """
    channels = request.thinking.channels if request.thinking is not None else None
    assert channels is not None or not calls
    found: list[dict[str, Any]] = []
    texts = []
    for call in calls:
        assert channels is not None
        before, kind = _header_texts(call.header, channels, decode)
        arguments, recipient = decode(call.arguments), _RECIPIENT.search(before)
        if recipient is None:
            texts += _text_of_no_call(call, channels, f"{_NAMES.sub('', before).strip()}{arguments}")
            continue
        words = before.replace(recipient[0], " ").split()
        named = " ".join(word for word in words if word not in ("assistant", "analysis", "commentary", "final"))
        name = recipient[1].removeprefix(NAMESPACE)
        of_harmony = {"recipient": recipient[1], "content_type": kind.strip() or named or None}
        found.append(openai_call(request, len(found), name, arguments) | of_harmony)
    found = found[:1] if request.one_call else found
    return (json_of(found) if found else None), texts


def _text_of_no_call(call: Call, channels: Channels, text: str) -> list[str]:
    """The text of a message without a recipient; [] if the output ended inside ` to=NAME` in a header, which is not text."""
    return [] if channels.channel_id in call.header and text in ("to", "to=") else [text]


def _header_texts(header: Sequence[int], channels: Channels, decode: Callable[[Sequence[int]], str]) -> tuple[str, str]:
    """The texts before and after the constrain token; a space joins the parts that other special tokens separate."""
    parts: list[list[int]] = [[]]
    index = next((index for index, token in enumerate(header) if token == channels.constrain_id), len(header))
    for token in header[:index]:
        if token in (channels.start_id, channels.channel_id, channels.message_id):
            parts.append([])
        else:
            parts[-1].append(token)
    kind = [token for token in header[index + 1 :] if token not in (channels.channel_id, channels.message_id)]
    return " ".join(decode(part) for part in parts), decode(kind)
