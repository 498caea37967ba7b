"""The channels of a harmony output (gpt-oss), told apart by token ids: thoughts, answer, tool calls.

A message is a header, `<|message|>`, text and a token that ends it. A header decides what the text is:

with a recipient (` to=NAME`)   a tool call
channel `analysis`              a thought
any other, or no channel        the answer: `final`, and preambles to the user in `commentary`

Models leave out or repeat these tokens, and no text may be lost by that. Text outside of messages is part of the answer. A header
that no `<|message|>` ends, as in `<|channel|>final` and text right after it, is text too, without role and channel name (or the
beginning of one, where the output ends).
"""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.engine.token_kinds import Header, Kind, Tracker
from batchspec.records import Channels


class ChannelTracker(Tracker):
    """`header` is what the prompt has of the message that the output continues: `Thinking.header`."""

    def __init__(self, channels: Channels, header: Sequence[int]) -> None:
        super().__init__()
        self._channels = channels
        self._in_header = False
        self._text = Kind.ANSWER
        """What a token of text is, outside of headers."""
        self._dropped: Header | None = None
        for token in header:
            self.push(token)

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
        """Whether a token right after the role cannot be of a header: the answer begins without one."""
        channels = self._channels
        goes_on = {channels.channel_id, channels.constrain_id} | channels.recipient
        return tuple(self.header[1:]) in channels.role and token not in goes_on


def _without_name(part: list[int], names: frozenset[tuple[int, ...]]) -> list[int]:
    """The tokens after a name, or none of a name that is cut off."""
    if any(name[: len(part)] == tuple(part) for name in names):
        return []
    return part[max((len(name) for name in names if tuple(part[: len(name)]) == name), default=0) :]
