"""Tool calls that a row writes in its answer, in the form of its chat template (`batchspec/tool_calls`)."""

from __future__ import annotations

from batchspec.automata.token_automaton import TokenSymbols
from batchspec.engine.features.thinking import split_thoughts
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RowFeature
from batchspec.records import Completion
from batchspec.tool_calls.split import CallParser


class ToolCalls(RowFeature):
    """Of rows with tools. symbols: the bytes of each token; with a constraint, those of its tokens are the row's answer."""

    def __init__(self, parser: CallParser, symbols: TokenSymbols | None) -> None:
        self._parser, self._symbols = parser, symbols

    def arrive(self, state: RequestState) -> bool:
        return state.request.tools is not None

    def finish(self, state: RequestState, done: Completion) -> Completion:
        request = state.request
        tokens = state.tokens[:-1] if state.stop_id is not None else state.tokens
        if request.thinking is not None:
            tokens = split_thoughts(tokens, request.thinking).answer
        text_of = None if request.automaton is None or self._symbols is None else self._symbols.text
        return self._parser.parsed(done, request, tokens, text_of=text_of, stop=state.stop_reason)
