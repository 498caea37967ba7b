"""The token mask of a state of a lazy automaton: all tokens of the vocabulary are walked at once, as a trie, level by level."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchspec.lazy_automaton import Expansion
from batchspec.structured.lazy_dfa import LazyDfa
from batchspec.structured.token_masks import MAX_FORCED_BYTES
from batchspec.token_automaton import DEAD, ENDS, NUM_SYMBOLS, Ids, TokenSymbols


@dataclass(frozen=True, slots=True, eq=False)
class TokenTrie:
    """The symbol strings of a vocabulary's V tokens as a trie, level by level.

    levels    for each depth from 1: (int64 [N] parent of each node in the level above, int32 [N] symbol of each node)
    nodes     int64 [V]  the node at which each token ends, in the numbering of all levels one after the other
    """

    levels: tuple[tuple[NDArray[np.int64], Ids], ...]
    nodes: NDArray[np.int64]

    @classmethod
    def of(cls, vocabulary: TokenSymbols) -> TokenTrie:
        lengths, starts = np.diff(vocabulary.starts), vocabulary.starts[:-1]
        group, nodes = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
        levels, first = [], 0
        for depth in range(int(lengths.max(initial=0))):
            going = np.flatnonzero(lengths > depth)
            keys = group[going] * NUM_SYMBOLS + vocabulary.symbols[starts[going] + depth]
            found, group[going] = np.unique(keys, return_inverse=True)
            levels.append((found // NUM_SYMBOLS, (found % NUM_SYMBOLS).astype(np.int32)))
            ending = going[lengths[going] == depth + 1]
            nodes[ending] = first + group[ending]
            first += len(found)
        return cls(tuple(levels), nodes)

    def walk(self, dfa: LazyDfa, state: int) -> Ids:
        """int32 [nodes of all levels]: the state after the symbols of each node, from `state`. Raises TooLarge."""
        before = np.array([state], np.int32)
        found = []
        for parents, symbols in self.levels:
            from_ = before[parents]
            reached = np.zeros(dfa.num_states, bool)
            reached[from_] = True
            dfa.explore(np.flatnonzero(reached & ~dfa.explored[: len(reached)]).tolist())
            before = dfa.next[from_, dfa.classes[symbols]]
            found.append(before)
            if not before.any():
                break
        states = np.concatenate(found)
        return np.concatenate((states, np.zeros(sum(len(symbols) for _, symbols in self.levels) - len(states), np.int32)))


def expansion(dfa: LazyDfa, state: int, trie: TokenTrie, end_ids: Collection[int], token_of: Mapping[bytes, int]) -> Expansion:
    """What the device needs to know of a state. Raises TooLarge.

    end_ids   tokens that end a row: allowed where the text may end, and nowhere else
    token_of  bytes -> token, for those that are drafted where nothing else can come
    """
    after = trie.walk(dfa, state)
    allowed = np.zeros(-(-len(trie.nodes) // 32) * 32, bool)
    allowed[: len(trie.nodes)] = after[trie.nodes] != DEAD
    allowed[list(end_ids)] = False
    forced = ENDS if dfa.is_final(state) and not allowed.any() else _forced(dfa, state, token_of, end_ids)
    allowed[list(end_ids)] = dfa.is_final(state)
    reached = np.zeros(dfa.num_states, bool)
    reached[after] = reached[state] = True
    reached[DEAD] = False
    states = np.flatnonzero(reached).astype(np.int32)
    return Expansion(
        state=state, mask=np.packbits(allowed, bitorder="little").view(np.int32), forced=forced,
        states=states, following=np.where(dfa.explored[states, None], dfa.next[states], DEAD), classes=dfa.classes,
    )  # fmt: skip


def _forced(dfa: LazyDfa, state: int, token_of: Mapping[bytes, int], end_ids: Collection[int]) -> int:
    """The longest token of the bytes that must come next; -1 where several may come, or the text may end."""
    path, tokens = bytearray(), list[int]()
    while len(path) < MAX_FORCED_BYTES and dfa.explored[state] and not dfa.is_final(state):
        bytes_ = np.flatnonzero(dfa.next[state, dfa.classes])
        if len(bytes_) != 1 or bytes_[0] > 255:
            break
        path.append(int(bytes_[0]))
        state = int(dfa.next[state, dfa.classes[bytes_[0]]])
        token = token_of.get(bytes(path), -1)
        tokens += [token] if token >= 0 and token not in end_ids else []
    return tokens[-1] if tokens else -1
