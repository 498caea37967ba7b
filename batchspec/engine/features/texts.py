"""The texts of a finished row: its answer, its thoughts and its tool calls, without stop string, stop id and special tokens."""

from __future__ import annotations

from batchspec.automata.token_automaton import BREAKS_AFTER_THOUGHT, DEAD, TokenAutomaton, TokenSymbols
from batchspec.engine.features.channel_calls import tool_calls
from batchspec.engine.features.last_check import LastCheck
from batchspec.engine.features.stop_strings import UNFINISHED, Decode, StopStrings
from batchspec.engine.features.thinking import Parts, split_thoughts
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RowFeature
from batchspec.records import Completion, Request
from batchspec.structured.checked_text import checked_text
from batchspec.tool_calls.split import CallParser


def decode_of_answer(request: Request, decode: Decode | None, symbols: TokenSymbols | None) -> Decode | None:
    """The function that turns the tokens of a row's answer into text. With a constraint the text is their exact bytes, because
    `decode` may drop a space that the constraint asks for. None without a tokenizer."""
    return decode if request.automaton is None or symbols is None or decode is None else symbols.text


class Texts(RowFeature):
    """Makes the texts of rows that have ended.

    decode   token ids -> text; None without a tokenizer
    symbols  the bytes of each token: with a constraint, the bytes of its tokens are the row's answer
    stops    has the text of a row that a stop string ended; check: has checked a row with a constraint
    calls    finds the tool calls in answers; None: calls stay text, or are messages of their own
    defers   leave the decoding of text that is simply that of a row's tokens to the maker of the table
             (`Completion.num_undecoded`)
    """

    def __init__(
        self, decode: Decode | None, symbols: TokenSymbols | None, stops: StopStrings, check: LastCheck | None,
        calls: CallParser | None = None, *, defers: bool,
    ) -> None:
        self._decode, self._symbols, self._defers = decode, symbols, defers
        self._stops, self._check, self._calls = stops, check, calls

    def arrive(self, state: RequestState) -> bool:
        return True

    def finish(self, state: RequestState, done: Completion) -> Completion:
        found, breaks = self._stops.take_text(state), 0 if self._check is None else self._check.take(state)
        if done.token_ids is None:
            return done
        thinking, decode = state.request.thinking, self._decode
        if thinking is None and decode is None:
            return done
        if thinking is None and self._defers and found is None and state.request.tools is None:
            return done.replace(num_undecoded=len(state.text_tokens))
        if thinking is None:
            return self._of_all(state, done, found)
        return self._split(state, done, split_thoughts(state.text_tokens, thinking), found, breaks)

    def _of_all(self, state: RequestState, done: Completion, found: str | None) -> Completion:
        """Of a row without thoughts. found: the answer's text, if a stop string ended the row."""
        of_answer = decode_of_answer(state.request, self._decode, self._symbols)
        assert of_answer is not None
        text = of_answer(state.text_tokens) if found is None else found
        return self._with_calls(state, checked_text(done.replace(text=text)), state.text_tokens, found)

    def _with_calls(self, state: RequestState, done: Completion, answer: list[int], found: str | None) -> Completion:
        """The completion with the calls of its answer in place of their text.

        answer  the answer's tokens
        found   its text, if a stop string ended the row
        """
        if self._calls is None:
            return done
        text_of = None if state.request.automaton is None or self._symbols is None else self._symbols.text
        return self._calls.parsed(done, state.request, answer, text_of=text_of, found=found)

    def _split(self, state: RequestState, done: Completion, parts: Parts, found: str | None, breaks: int) -> Completion:
        """The answer, the thought (None if there was none) and the tool calls.

        found   the text of the last message, if a stop string ended the row
        breaks  number of line breaks after the thought that are not part of an answer with a lazy automaton

        White space between thought and answer is dropped. An empty line separates the messages of an answer.
        """
        request, decode = state.request, self._decode
        label = "" if request.thinking is None else request.thinking.label
        cut_off = bool(done.reasoning_truncated) or (parts.inside and state.truncated)
        done = done.replace(reasoning_truncated=cut_off, reasoning_tokens=parts.num_reasoning)
        of_answer = decode_of_answer(request, decode, self._symbols)
        if decode is None or of_answer is None:
            return done
        messages = [of_answer(message) for message in parts.answers()]
        if found is not None:
            messages[-1] = found
        calls, more = tool_calls(parts.calls, request, decode)
        messages += more
        text = "\n\n".join([message for message in messages if message.strip()]) if len(messages) > 1 else messages[0]
        text = _after_thought(text, state, parts, breaks)
        done = checked_text(done.replace(text=text, reasoning=_reasoning(parts, decode, label), tool_calls=calls))
        return self._with_calls(state, done, parts.answer, found)


def _reasoning(parts: Parts, decode: Decode, label: str) -> str | None:
    if not parts.thoughts:
        return None
    thoughts = (decode(thought).removeprefix(label).strip() for thought in parts.thoughts)
    return "\n\n".join(thought for thought in thoughts if thought)


def _after_thought(text: str, state: RequestState, parts: Parts, breaks: int) -> str:
    """An answer without the white space that separates it from the thought: chat templates add their own.

    If the answer follows a constraint, only leading line breaks are removed, and only if it matches without them.
    """
    automaton, thinking = state.request.automaton, state.request.thinking
    if not parts.thoughts:
        return text
    if automaton is None:
        return text.lstrip()
    if thinking is None or thinking.channels is not None:
        return text
    leading = len(text) - len(text.lstrip("\n"))
    if not isinstance(automaton, TokenAutomaton):
        return text[min(leading, breaks) :]
    counts = range(min(leading, BREAKS_AFTER_THOUGHT), 0, -1)
    return text[next((count for count in counts if _matches(text[count:], state, automaton)), 0) :]


def _matches(text: str, state: RequestState, automaton: TokenAutomaton) -> bool:
    """Whether a text, from which leading line breaks were removed, matches. True if no answer may begin with a line break."""
    if automaton.read(automaton.answer, b"\n") == DEAD:
        return True
    after = automaton.read(automaton.answer, text.rstrip(UNFINISHED).encode())
    return after != DEAD and (state.stop_id is None or automaton.allows(after, state.stop_id))
