"""The last check of a row with a constraint: the host walks its output through the automaton before it becomes a completion.

The device masks tokens by tables that were uploaded, placed and shared, and that may be wrong or written over. Here a row's own
tokens are walked from the beginning of its output by what the compiling process made: neither device nor places nor slots are
asked. The tokens of a lazy automaton are walked by the process that reads its text, and the row waits while the rounds go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from batchspec.engine.request_state import RequestState
from batchspec.engine.thinking import split_thoughts
from batchspec.lazy_automaton import Expanding, LazyAutomaton, Recheck
from batchspec.records import CONSTRAINT_VIOLATED, RowError
from batchspec.token_automaton import BREAKS_AFTER_THOUGHT, TokenAutomaton, TokenSymbols

CAUSE = "which only an error of the program or of the GPU can cause"
ADVICE = "decode the row again (resume=error), and report it if it comes again"


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended: the slot that it had, -1 for none, and the host's clock in seconds."""

    state: RequestState
    slot: int
    now: float


class LastCheck:
    """`add` takes every request that has ended, and `take` returns it; if it breaks its constraint, it has failed by then."""

    def __init__(self, expanding: Expanding | None, vocabulary: TokenSymbols | None) -> None:
        """expanding, vocabulary: as for `Engine`."""
        self._expanding, self._vocabulary = expanding, vocabulary
        self._done: list[Ended] = []
        self._asked: list[tuple[Ended, Recheck, Future[int | str]]] = []

    @property
    def is_idle(self) -> bool:
        return not (self._done or self._asked)

    def add(self, ended: Ended) -> None:
        """A request that has ended, its tokens complete. Those that the device failed are checked too: it may be the reason."""
        state, request = ended.state, ended.state.request
        if request.automaton is None or state.error is not None:
            self._done.append(ended)
        elif isinstance(request.automaton, TokenAutomaton):
            self._judge(ended, request.automaton.num_allowed(request.automaton_state, state.tokens))
        else:
            self._ask(ended, Recheck(request.automaton, request.automaton_state, tuple(state.tokens)))

    def take(self, wait_s: float = 0.0) -> Iterator[Ended]:
        """Those that are checked, once each.

        wait_s  longest wait for an answer, in seconds, where none is checked
        """
        if not self._done and self._asked:
            wait([answer for *_, answer in self._asked], wait_s, FIRST_COMPLETED)
        asked, self._asked = self._asked, []
        for ended, question, answer in asked:
            if not answer.done():
                self._asked.append((ended, question, answer))
            elif question.num_skipped_bytes:
                self._note_breaks(ended, question, answer.result())
            else:
                self._judge(ended, answer.result())
        done, self._done = self._done, []
        yield from done

    def _ask(self, ended: Ended, question: Recheck) -> None:
        assert self._expanding is not None, "the engine was made for requests without lazy automata"
        self._asked.append((ended, question, self._expanding.recheck(question)))

    def _judge(self, ended: Ended, found: int | str) -> None:
        """found: the number of its first tokens that are allowed, or the reason why that is unknown."""
        state = ended.state
        problem = _problem(state, found)
        if problem is None:
            state.constraint_checked = True
            if (question := self._recheck_without_breaks(state, BREAKS_AFTER_THOUGHT)) is not None:
                return self._ask(ended, question)
        elif state.finish_reason != "error" or isinstance(found, int):
            state.fail(RowError(
                code=CONSTRAINT_VIOLATED, stage="decode", retryable=True,
                message=f"{state.request.constraint_kind or 'constraint'}: {problem}; {ADVICE}",
            ))  # fmt: skip
        self._done.append(ended)

    def _recheck_without_breaks(self, state: RequestState, most: int) -> Recheck | None:
        """The question whether the answer matches without its leading line breaks, at most `most`, which may only separate it
        from the thought. None if the automaton is not lazy, or if there are none."""
        automaton, thinking = state.request.automaton, state.request.thinking
        if not isinstance(automaton, LazyAutomaton) or thinking is None or thinking.channels is not None:
            return None
        assert self._vocabulary is not None, "lazy automata need a vocabulary"
        parts = split_thoughts(state.tokens, thinking)
        text = self._vocabulary.text(parts.answer[:most])
        count = min(most, len(text) - len(text.lstrip("\n")))
        return Recheck(automaton, automaton.answer, tuple(parts.answer), count) if parts.thoughts and count else None

    def _note_breaks(self, ended: Ended, question: Recheck, found: int | str) -> None:
        """found: the reply to `_recheck_without_breaks`; a text says why it is unknown. If the answer does not match without
        these line breaks, ask about one break fewer."""
        if found == len(question.tokens):
            ended.state.num_breaks = question.num_skipped_bytes
        elif (other := self._recheck_without_breaks(ended.state, question.num_skipped_bytes - 1)) is not None:
            return self._ask(ended, other)
        self._done.append(ended)


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
