"""Stop strings: they end a row when its answer has one of them, whichever tokens they span. Thoughts, marks, special tokens,
stop ids and the tool calls of a model with channels are not searched. None ends a row that has not more than `min_new_tokens`
tokens: one that these complete counts as text (as in vLLM, `update` of vllm/v1/engine/detokenizer.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchspec.engine.features.thinking import tracker_of
from batchspec.engine.features.token_kinds import Kind
from batchspec.engine.slots.request_state import RequestState, Watch
from batchspec.engine.slots.row_feature import RowFeature
from batchspec.records import Request

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""
UNFINISHED = "\ufffd"
"""Replacement characters at the end of a text: bytes of its last character are still missing."""
ALWAYS = Watch(0)


class StopStrings(RowFeature):
    """decode_of: the function that turns the tokens of a request's answer into text; None without a tokenizer."""

    def __init__(self, decode_of: Callable[[Request], Decode | None]) -> None:
        self._decode_of = decode_of
        self._rows: dict[RequestState, _Search] = {}

    def arrive(self, state: RequestState) -> bool:
        decode = self._decode_of(state.request) if state.request.stop else None
        if decode is not None:
            self._rows[state] = _Search(state, StopFinder(decode, state.request.stop))
        return decode is not None

    def examine(self, state: RequestState) -> Watch | None:
        search = self._rows[state]
        if (found := search.go_on()) is not None:
            state.cut(search.num_read, "stop", found)
            return None
        return ALWAYS

    def take_text(self, state: RequestState) -> str | None:
        """The text of the answer's last message up to the stop string that ended the row; None if none did. Call it once, when
        the row has ended."""
        search = self._rows.pop(state, None)
        return None if search is None or state.stop_reason is None else search.text


class _Search:
    """The search in one row: its tokens are read in order, those of its answer by the finder."""

    def __init__(self, state: RequestState, finder: StopFinder) -> None:
        thinking = state.request.thinking
        self._state, self._finder, self.num_read = state, finder, 0
        self._tracker = None if thinking is None else tracker_of(thinking)

    @property
    def text(self) -> str:
        return self._finder.text

    def go_on(self) -> str | None:
        """The stop string that one of the tokens not read yet completes; no token after it is read."""
        for token in self._state.tokens[self.num_read :]:
            self.num_read += 1
            if token in self._state.request.stop_ids:  # it ends the row
                continue
            kind = Kind.ANSWER if self._tracker is None else self._tracker.push(token)
            if kind in (Kind.END_OF_OUTPUT_SO_FAR, Kind.HEADER):
                self._finder.restart()
            if kind is Kind.ANSWER:
                stop = self._finder.push(token, may_end=self.num_read > self._state.request.min_new_tokens)
                if stop is not None:
                    return stop
        return None


class StopFinder:
    """Decodes a row's output token by token and finds the first stop string, whatever tokens or rounds it spans.

    What it finds depends on the tokens alone. Bytes of an unfinished character wait for the token that completes it; the text
    before them does not wait, because the row may end without that token. `text` of a row that has ended is that of all its
    tokens, decoded at once, up to the stop string.
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
        self._too_early = 0
        """Length of the text in which no stop string may end."""

    def push(self, token: int, *, may_end: bool = True) -> str | None:
        """Add one token; returns the stop string that it completes, the earliest one in the text, or None.

        may_end  whether it may complete one: not so early in the row's output
        """
        self._ids.append(token)
        before = self._decode(self._ids[self._begin : self._settled])
        now = self._decode(self._ids[self._begin :])
        if len(now) <= len(before):
            return None
        new = now[len(before) :]
        text = self.text + new.rstrip(UNFINISHED)  # text before an unfinished character is final
        self._too_early = self._too_early if may_end else len(text)
        found = self._earliest(text, max(0, len(self.text) - self._reach))
        if found is None:
            if not new.endswith(UNFINISHED):
                self.text = text
                self._begin, self._settled = self._settled, len(self._ids)
            return None
        # A tokenizer with byte fallback decodes a whole run of bytes to U+FFFD if one of them is invalid, so that a later token
        # can change earlier text.
        whole = self._decode(self._ids)
        if (in_whole := self._earliest(whole)) is not None:
            text, found = whole, in_whole
        begin, stop = found
        self.text = text[:begin]
        return stop

    def _earliest(self, text: str, search_from: int = 0) -> tuple[int, str] | None:
        """Where the first stop string of a text begins, and which it is."""
        firsts = ((max(search_from, self._too_early - len(stop) + 1), stop) for stop in self._stops)
        return min(((begin, stop) for first, stop in firsts if (begin := text.find(stop, first)) >= 0), default=None)
