"""Tells thoughts, answer and tool calls of a harmony output (gpt-oss) apart, by token ids.

A message consists of a header, `<|message|>`, its text and an end token. The header decides what the text is:

with a recipient (` to=NAME`)   a tool call
channel `analysis`              a thought
another channel, or none        the answer: channel `final`, and preambles to the user in channel `commentary`

Models sometimes leave out or repeat these tokens; no text may be lost then. Text outside of messages belongs to the answer. The
same holds for text in a header without `<|message|>`, as in `<|channel|>final` with the text right after it: the role and the
channel name are removed, and the rest is text. If the output ends within such a name, the part of the name is removed.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.engine.features.token_kinds import Header, Kind, Tracker
from batchspec.records import Channels


class ChannelTracker(Tracker):
    """The tracker for harmony. header: how the prompt begins the message that the output continues (`Thinking.header`)."""

    def __init__(self, channels: Channels, header: Sequence[int]) -> None:
        super().__init__()
        self._channels = channels
        self._in_header = False
        self._text = Kind.ANSWER
        """The kind of a text token outside of headers."""
        self._dropped: Header | None = None
        for token in header:
            self.push(token)

    @property
    def in_call(self) -> bool:
        return self._text is Kind.CALL and not self._in_header

    def push(self, token: int) -> Kind:
        channels = self._channels
        repeated = not self._in_header or channels.channel_id in self.header
        if token == channels.start_id or (token == channels.channel_id and repeated):
            return self._begin_header(token)
        if token == channels.message_id:
            return self._begin_text() if self._in_header else Kind.END
        if token in channels.end_ids:
            self._dropped = self.finish()
            self._in_header, self.inside, self._text = False, False, Kind.ANSWER
            return Kind.END
        if not self._in_header:
            return Kind.END if token == channels.constrain_id else self._text
        if self._is_text(token):
            self._in_header, self._text = False, Kind.ANSWER
            return Kind.ANSWER
        self.header.append(token)
        return Kind.HEADER

    def take_dropped(self) -> Header | None:
        found, self._dropped = self._dropped, None
        return found

    def finish(self) -> Header | None:
        if not self._in_header:
            return None
        channels, tokens = self._channels, self.header
        if channels.is_call(tokens):
            return Header(tokens, [], is_call=True)
        text: list[int] = []
        part: list[int] = []
        for token in [*tokens, channels.start_id]:
            if token not in (channels.start_id, channels.channel_id, channels.constrain_id):
                part.append(token)
                continue
            text += _without_name(part, channels.role | channels.analysis | channels.others)
            part = []
        return Header(tokens, text, is_call=False)

    def _begin_header(self, token: int) -> Kind:
        self._dropped = self.finish()
        self.header, self._in_header, self.inside = [token], True, False
        return Kind.HEADER

    def _begin_text(self) -> Kind:
        channels, self._in_header = self._channels, False
        self.header.append(channels.message_id)
        if channels.is_call(self.header):
            self._text = Kind.CALL
            return Kind.BEGIN_CALL
        self.inside = channels.begins_thought(self.header)
        self._text = Kind.THOUGHT if self.inside else Kind.ANSWER
        return Kind.BEGIN if self.inside else Kind.HEADER

    def _is_text(self, token: int) -> bool:
        """Whether the header so far is `<|start|>` and a role, and the token cannot continue it: then it begins the answer."""
        channels = self._channels
        continues = {channels.channel_id, channels.constrain_id} | channels.recipient
        return tuple(self.header[1:]) in channels.role and token not in continues


def _without_name(part: list[int], names: frozenset[tuple[int, ...]]) -> list[int]:
    """The tokens of `part` after the name with which it begins; [] if `part` is the beginning of a name."""
    if any(name[: len(part)] == tuple(part) for name in names):
        return []
    return part[max((len(name) for name in names if tuple(part[: len(name)]) == name), default=0) :]
