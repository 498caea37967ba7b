"""Finds stop strings in a row's text while it is decoded, whichever tokens they span."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchspec.records import Request
from batchspec.token_automaton import TokenSymbols

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""
UNFINISHED = "\ufffd"
"""Replacement characters at the end of a text: bytes of its last character are still missing."""


def decode_of_answer(request: Request, decode: Decode | None, vocabulary: TokenSymbols | None) -> Decode | None:
    """The function that turns the tokens of a row's answer into text. With a constraint the text is their exact bytes, because
    `decode` may drop a space that the constraint asks for. None without a tokenizer."""
    return decode if request.automaton is None or vocabulary is None or decode is None else vocabulary.text


class StopFinder:
    """Decodes a row's output token by token and finds the first stop string, whatever tokens or rounds it spans.

    What it finds depends on the tokens alone. Bytes of an unfinished character wait for the token that completes it; the text
    before them does not wait, because the row may end without that token.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._reach = max(len(stop) for stop in stops) - 1
        self.restart()

    def restart(self) -> None:
        """Forget what was pushed."""
        self._ids: list[int] = []
        self._settled = 0
        """Number of tokens whose text is final: it is in `text`."""
        self._begin = 0
        """Where decoding begins: some settled tokens earlier, because tokenizers put a space between tokens, but not before the
        first one."""
        self.text = ""

    def push(self, token: int) -> str | None:
        """Add one token; returns the stop string that is now complete, the earliest one in the text, or None."""
        self._ids.append(token)
        before = self._decode(self._ids[self._begin : self._settled])
        now = self._decode(self._ids[self._begin :])
        if len(now) <= len(before):
            return None
        new = now[len(before) :]
        text = self.text + new.rstrip(UNFINISHED)  # text before an unfinished character is final
        search_from = max(0, len(self.text) - self._reach)
        places = [(place, stop) for stop in self._stops if (place := text.find(stop, search_from)) >= 0]
        if not places:
            if not new.endswith(UNFINISHED):
                self.text = text
                self._begin, self._settled = self._settled, len(self._ids)
            return None
        place, stop = min(places)
        self.text = text[:place]
        return stop
