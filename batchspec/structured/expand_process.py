"""The process that computes states of lazy automata, with limits on CPU time and memory, because their texts are input.

It reads pickles from its input and answers with pickles: first (arguments of `Work`, memory in bytes, CPU seconds), then `Ask`s
and `Recheck`s. The answer to an `Ask` is an `Expansion`, whose `state` is the number of the state that was asked for; that to a
`Recheck` is a number of tokens. Either may be an error's text, or a `Defect`, after which nothing more may be asked.

All rows of an automaton share the limit on its states, and all automata of the process share its memory. The request that
reaches one of these limits need not be the cause. So the process does not answer it, but ends with OUT_OF_MEMORY or
TOO_MANY_STATES.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from batchspec.automata.lazy_automaton import Ask, Expansion, LazyAutomaton, Recheck
from batchspec.automata.token_automaton import DEAD, KEPT_STEPS, TokenSymbols
from batchspec.process.child_process import limit_cpu
from batchspec.process.limited_process import OUT_OF_MEMORY, TOO_MANY_STATES, Defect
from batchspec.process.machine import lower_limit
from batchspec.structured.compile_process import MAX_RECURSION, unexpected, why
from batchspec.structured.lazy_dfa import LazyDfa, TooManyStates
from batchspec.structured.lazy_masks import Expander
from batchspec.structured.network import Network
from batchspec.structured.parse import network_of
from batchspec.structured.regular import Impossible, TooLarge

MAX_AHEAD = 16
"""States that are computed ahead for one that is asked for; none is begun after AHEAD_S, while the row waits."""
AHEAD_S = 0.003
OWN = (TooLarge, Impossible, RecursionError)
"""Errors of the automaton that is asked about, whatever else the process holds. They leave all states right."""
LEAST_SHARE = 0.01
"""Of the texts that go on from the state that is asked for: states that fewer reach are not computed ahead."""


_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")


@dataclass(eq=False)
class _Known:
    """A lazy automaton. answered: the states whose expansions were sent in this epoch."""

    network: Network
    dfa: LazyDfa
    vocabulary: TokenSymbols
    answered: set[int] = field(default_factory=set)
    _steps: dict[int, int] = field(default_factory=dict)
    """See `TokenAutomaton`."""

    def after(self, state: int, token: int) -> int:
        """The state after a token. Raises TooLarge."""
        of = self.vocabulary
        key = state * of.num_tokens + token
        found = self._steps.get(key)
        if found is None:
            found = self.dfa.after(state, of.symbols[of.starts[token] : of.starts[token + 1]].tolist())
            if len(self._steps) >= KEPT_STEPS:
                self._steps.clear()
            self._steps[key] = found
        return found


@dataclass(eq=False)
class Work:
    """The lazy automata of a job.

    end_ids    tokens that end a row
    thinks     an answer may follow a thought, which may begin with a token if may_begin
    channels   instead, an answer is a message in the final channel of harmony
    """

    vocabulary: TokenSymbols
    end_ids: tuple[int, ...]
    thinks: bool
    may_begin: bool
    channels: bool = False
    _epoch: int = -1
    _known: dict[LazyAutomaton, _Known] = field(default_factory=dict)
    _networks: dict[LazyAutomaton, Network] = field(default_factory=dict)
    """Of automata that had states in the last epoch: building one takes longer than many states."""

    def __post_init__(self) -> None:
        self._expander = Expander(self.vocabulary, self.end_ids)
        self._weights = np.full(self.vocabulary.num_tokens, 1 / self.vocabulary.num_tokens)
        """How often rows wrote each token; all together once before any did."""

    def answer(self, ask: Ask) -> Expansion | str | Defect:
        """The expansion of the state after the tokens, `Expansion.of_dead()` if they are not allowed, or an error's text.

        Raises MemoryError and TooManyStates.
        """
        if ask.epoch != self._epoch:
            self._networks = {automaton: known.network for automaton, known in self._known.items()}
            self._known.clear()
            self._epoch = ask.epoch
        return _or_reason(self._expansion, ask)

    def recheck(self, asked: Recheck) -> int | str | Defect:
        """How many of the tokens are allowed, or an error's text. Needs no mask and no expansion: only the lazy DFA is walked.

        Raises MemoryError and TooManyStates.
        """
        return _or_reason(self._num_allowed, asked)

    def _num_allowed(self, asked: Recheck) -> int:
        known, state, skipped = self._known_of(asked.automaton), asked.state, asked.num_skipped_bytes
        for count, token in enumerate(asked.tokens):
            if token in self.end_ids:
                return count + (count + 1 == len(asked.tokens) and known.dfa.is_final(state))
            if skipped:
                symbols = self.vocabulary.symbols_of((token,))[0].tolist()
                state, skipped = known.dfa.after(state, symbols[skipped:]), max(0, skipped - len(symbols))
            else:
                state = known.after(state, token)
            if state == DEAD:
                return count
        return len(asked.tokens)

    def _known_of(self, automaton: LazyAutomaton) -> _Known:
        known = self._known.get(automaton)
        if known is None:
            network = self._networks.pop(automaton, None)
            if network is None:
                network = network_of(automaton.kind, automaton.source, self.vocabulary, checks=automaton.is_weaker)
            dfa = LazyDfa(network, thinks=self.thinks, may_begin=self.may_begin, channels=self.channels)
            known = self._known[automaton] = _Known(network, dfa, self.vocabulary)
        return known

    def _expansion(self, ask: Ask) -> Expansion:
        known, state = self._known_of(ask.automaton), ask.state
        np.add.at(self._weights, np.array(ask.written, np.int64), 1)
        for token in ask.tokens:
            state = known.after(state, token)
        if state == DEAD:
            return Expansion.of_dead()
        began = time.perf_counter()
        found, shares = self._expander.expansion(known.dfa, state, self._weights)
        known.answered.add(state)
        return replace(found, ahead=tuple(self._ahead(known, shares, began))) if ask.reads_ahead else found

    def _ahead(self, known: _Known, shares: dict[int, float], began: float) -> Iterator[Expansion]:
        """The states that most texts pass, of those that were not sent yet: best first."""
        passed = defaultdict[int, float](float, shares)
        for _ in range(MAX_AHEAD):
            fresh = [(share, state) for state, share in passed.items() if share >= LEAST_SHARE and state not in known.answered]
            if not fresh or time.perf_counter() - began > AHEAD_S or known.dfa.is_half_full:
                return
            share, state = max(fresh)
            try:
                found, following = self._expander.expansion(known.dfa, state, self._weights)
            except OWN:  # of a state that no row may reach
                return
            known.answered.add(state)
            yield found
            for target, part in following.items():
                passed[target] += share * part


def _or_reason(find: Callable[[_Asked], _Found], asked: _Asked) -> _Found | str | Defect:
    """What is found; or the text of an error of the automaton itself; or a `Defect`. Raises MemoryError and TooManyStates."""
    try:
        return find(asked)
    except OWN as error:
        return why(error)
    except (MemoryError, TooManyStates):
        raise
    except Exception as error:  # it must not end the job, and may have left wrong states
        return Defect(unexpected(error))


def main() -> None:
    gc.disable()  # networks are a hundred thousand lists, and none of them is garbage: building one took twice as long
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(MAX_RECURSION)
    read, write = sys.stdin.buffer, sys.stdout.buffer
    job, memory_bytes, cpu_s = pickle.load(read)
    work = Work(**job)
    lower_limit(resource.RLIMIT_AS, memory_bytes)
    while True:
        try:
            ask = pickle.load(read)
            limit_cpu(cpu_s)
            pickle.dump(work.recheck(ask) if isinstance(ask, Recheck) else work.answer(ask), write)
            write.flush()
        except EOFError:
            return
        except MemoryError:  # also while it writes an answer, which is then incomplete
            os._exit(OUT_OF_MEMORY)
        except TooManyStates:
            os._exit(TOO_MANY_STATES)


if __name__ == "__main__":
    main()
