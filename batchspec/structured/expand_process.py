"""The process that computes states of lazy automata, with limits on CPU time and memory, because their texts are input.

It reads pickles from its input and answers with pickles: first (arguments of `Work`, memory in bytes, CPU seconds), then `Ask`s.
An answer is an `Expansion`, whose `state` is the number of the state that was asked for, or the text of an error.
"""

from __future__ import annotations

import pickle
import resource
import sys
import time
from dataclasses import dataclass, field

from batchspec.lazy_automaton import Ask, Expansion, LazyAutomaton
from batchspec.structured.compile_process import MAX_RECURSION
from batchspec.structured.lazy_dfa import LazyDfa
from batchspec.structured.lazy_masks import TokenTrie, expansion
from batchspec.structured.parse import network_of
from batchspec.structured.regular import Impossible, TooLarge
from batchspec.structured.token_masks import tokens_of_bytes
from batchspec.token_automaton import DEAD, TokenSymbols


@dataclass(eq=False)
class Work:
    """The lazy automata of a job; arguments as of `Compiler`."""

    vocabulary: TokenSymbols
    end_ids: tuple[int, ...]
    thinks: bool
    may_begin: bool
    channels: bool = False
    _epoch: int = -1
    _known: dict[LazyAutomaton, LazyDfa] = field(default_factory=dict)
    _trie: TokenTrie | None = None

    def answer(self, ask: Ask) -> Expansion | str:
        """The expansion of the state after the tokens, `Expansion.of_dead()` if they are not allowed, or an error's text."""
        if ask.epoch != self._epoch:
            self._known.clear()
            self._epoch = ask.epoch
        try:
            return self._expansion(ask)
        except (TooLarge, Impossible, RecursionError) as error:
            return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        except MemoryError:
            return "its states take more memory than allowed"

    def _expansion(self, ask: Ask) -> Expansion:
        dfa = self._known.get(ask.automaton)
        if dfa is None:
            network = network_of(ask.automaton.kind, ask.automaton.source, self.vocabulary)
            dfa = self._known[ask.automaton] = LazyDfa(
                network, thinks=self.thinks, may_begin=self.may_begin, channels=self.channels
            )
        if self._trie is None:
            self._trie = TokenTrie.of(self.vocabulary)
        state, of = ask.state, self.vocabulary
        for token in ask.tokens:
            state = dfa.after(state, of.symbols[of.starts[token] : of.starts[token + 1]].tolist())
        if state == DEAD:
            return Expansion.of_dead()
        return expansion(dfa, state, self._trie, self.end_ids, tokens_of_bytes(of))


def limit(cpu_s: int) -> None:
    """From now on the process has so many seconds of CPU time."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + cpu_s, resource.RLIM_INFINITY))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(MAX_RECURSION)
    read, write = sys.stdin.buffer, sys.stdout.buffer
    job, memory_bytes, cpu_s = pickle.load(read)
    work = Work(**job)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes,) * 2)
    while True:
        try:
            ask = pickle.load(read)
        except EOFError:
            return
        limit(cpu_s)
        pickle.dump(work.answer(ask), write)
        write.flush()


if __name__ == "__main__":
    main()
