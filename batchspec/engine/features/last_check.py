"""The last check of a row with a constraint: the host walks its output through the automaton before it becomes a completion.

The device masks tokens by tables that were uploaded, placed and shared, and that may be wrong or written over. Here a row's own
tokens are walked from the beginning of its output by what the compiling process made: neither device nor places nor slots are
asked. The tokens of a lazy automaton are walked by the process that reads its text, and the row waits while the rounds go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from batchspec.automata.lazy_automaton import Expanding, LazyAutomaton, Recheck
from batchspec.automata.token_automaton import BREAKS_AFTER_THOUGHT, TokenAutomaton, TokenSymbols
from batchspec.engine.features.thinking import split_thoughts
from batchspec.engine.slots.request_state import RequestState
from batchspec.records import CONSTRAINT_VIOLATED, RowError

CAUSE = "which only an error of the program or of the GPU can cause"
ADVICE = "decode the row again (resume=error), and report it if it comes again"


class LastCheck:
    """
    symbols    of the vocabulary
    expanding  walks tokens through lazy automata; None: no request has one
    """

    def __init__(self, symbols: TokenSymbols, expanding: Expanding | None) -> None:
        self._symbols, self._expanding = symbols, expanding
        self._checked: dict[RequestState, int] = {}
        """Number of line breaks after the thought that are not part of the answer, because it matches without them: of rows with
        lazy automata."""
        self._asked: dict[RequestState, tuple[Recheck, Future[int | str]]] = {}

    def done(self, state: RequestState) -> bool:
        """Whether a row that has ended was checked; the first call begins it. Fails a row that breaks its constraint. Rows that
        the device failed are checked too: it may be the reason."""
        if state in self._checked:
            return True
        automaton = state.request.automaton
        if state in self._asked:
            question, answer = self._asked[state]
            if answer.done():
                del self._asked[state]
                (self._note_breaks if question.num_skipped_bytes else self._judge)(state, answer.result(), question)
        elif state.error is not None:
            self._checked[state] = 0
        elif isinstance(automaton, TokenAutomaton):
            self._judge(state, automaton.num_allowed(state.request.automaton_state, state.tokens))
        elif automaton is not None:
            self._ask(state, Recheck(automaton, state.request.automaton_state, tuple(state.tokens)))
        return state in self._checked

    def take(self, state: RequestState) -> int:
        """The number of line breaks after the thought of a row that are not part of its answer; 0 if it was not checked. Call it
        once, for a row that is completed."""
        return self._checked.pop(state, 0)

    def pending(self) -> Iterable[Future[int | str]]:
        return [answer for _, answer in self._asked.values()]

    def _ask(self, state: RequestState, question: Recheck) -> None:
        assert self._expanding is not None, "the engine was made for requests without lazy automata"
        self._asked[state] = question, self._expanding.recheck(question)

    def _judge(self, state: RequestState, found: int | str, question: Recheck | None = None) -> None:
        """found: the number of its first tokens that are allowed, or the reason why that is unknown."""
        problem = _problem(state, found)
        if problem is None and (other := self._without_breaks(state, BREAKS_AFTER_THOUGHT)) is not None:
            return self._ask(state, other)
        if problem is not None and (state.finish_reason != "error" or isinstance(found, int)):
            state.fail(RowError(
                code=CONSTRAINT_VIOLATED, stage="decode", retryable=True,
                message=f"{state.request.constraint_kind or 'constraint'}: {problem}; {ADVICE}",
            ))
        self._checked[state] = 0

    def _without_breaks(self, state: RequestState, most: int) -> Recheck | None:
        """The question whether the answer matches without its leading line breaks, at most `most`, which may only separate it
        from the thought. None if the automaton is not lazy, or if there are none."""
        automaton, thinking = state.request.automaton, state.request.thinking
        if not isinstance(automaton, LazyAutomaton) or thinking is None or thinking.channels is not None:
            return None
        parts = split_thoughts(state.tokens, thinking)
        text = self._symbols.text(parts.answer[:most])
        count = min(most, len(text) - len(text.lstrip("\n")))
        return Recheck(automaton, automaton.answer, tuple(parts.answer), count) if parts.thoughts and count else None

    def _note_breaks(self, state: RequestState, found: int | str, question: Recheck) -> None:
        """found: the reply to `_without_breaks`; a text says why it is unknown. If the answer does not match without these line
        breaks, ask about one break fewer."""
        matches = found == len(question.tokens)
        if not matches and (other := self._without_breaks(state, question.num_skipped_bytes - 1)) is not None:
            return self._ask(state, other)
        self._checked[state] = question.num_skipped_bytes if matches else 0


def _problem(state: RequestState, found: int | str) -> str | None:
    """What is wrong with the output of a request that has ended, in words; None: nothing."""
    tokens = state.tokens
    if isinstance(found, str):
        return f"its {len(tokens)} output tokens cannot be checked a second time ({found})"
    if found < len(tokens):
        return f"output token {found + 1} of {len(tokens)} (id {tokens[found]}) is not allowed there, {CAUSE}"
    if state.stop_id is not None and state.stop_id not in state.request.stop_ids:
        return f"the row ended at output token {len(tokens)} (id {state.stop_id}), which is none of its stop ids, {CAUSE}"
    return None
