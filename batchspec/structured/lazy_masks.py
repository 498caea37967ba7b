"""The token mask of a state of a lazy automaton: the tokens are walked as a trie, level by level, as far as they are allowed.

In a state inside of a string nearly all tokens are allowed, and most of them consist of bytes that all lead on in the same way
(`_Plain`): these are not walked one by one. Where they lead is a chain of states, one for each number of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchspec.automata.lazy_automaton import Expansion
from batchspec.automata.token_automaton import DEAD, ENDS, Ids, TokenSymbols
from batchspec.structured.lazy_dfa import LazyDfa
from batchspec.structured.token_masks import MAX_FORCED_BYTES, Trie, tokens_of_bytes, trie_of, trie_of_some

FEWEST_PLAIN = 40
"""Smallest number of bytes that lead from a state to one and the same next state for which plain tokens are used. With fewer, so
few tokens are allowed that walking them takes less time."""
LONGEST_PLAIN = 256
"""Most bytes of a plain token; longer tokens are walked."""
FEW = 8
"""Up to so many nodes of the trie are walked one by one in Python, which takes less time than numpy's calls."""
KEPT = 50
"""Number of sets of bytes whose plain tokens are cached."""


@dataclass(frozen=True, slots=True, eq=False)
class _Plain:
    """The plain tokens of a set of bytes, which consist of these bytes alone, and the trie of all other tokens.

    tokens, lengths  int64 [P]  the plain tokens, and their numbers of bytes
    others           int64 [V - P]  the other tokens
    allowed          bool [32 ceil(V / 32)]  whether a token is plain
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    others: NDArray[np.int64]
    allowed: NDArray[np.bool_]
    trie: _Tokens


class Expander:
    """Computes states of the automata of a job.

    end_ids  tokens that end a row: allowed where the text may end, and nowhere else
    """

    def __init__(self, vocabulary: TokenSymbols, end_ids: Collection[int]) -> None:
        self._vocabulary, self._end_ids, self._ends = vocabulary, end_ids, list(end_ids)
        self._token_of = tokens_of_bytes(vocabulary)
        self._trie = _Tokens.of(trie_of(vocabulary))
        self._plain: OrderedDict[bytes, _Plain] = OrderedDict()

    def expansion(self, dfa: LazyDfa, state: int, weights: NDArray[np.float64]) -> tuple[Expansion, dict[int, float]]:
        """What the device needs to know of a state, and to which states its tokens lead, with shares that add up to 1.

        weights  float64 [V]: how often each token is written
        Raises TooLarge.
        """
        allowed, targets, written, states = self._targets(dfa, state, weights)
        allowed[self._ends] = False
        forced = ENDS if dfa.is_final(state) and not allowed.any() else _forced(dfa, state, self._token_of, self._end_ids)
        allowed[self._ends] = dfa.is_final(state)
        found = Expansion(
            state=state, mask=np.packbits(allowed, bitorder="little").view(np.int32), forced=forced,
            states=states, following=np.where(dfa.explored[states, None], dfa.next[states], DEAD), classes=dfa.classes,
        )
        first = int(targets.min(initial=dfa.num_states))
        by_target = np.bincount(targets - first, written)
        likely = np.flatnonzero(by_target)
        return found, dict(zip((likely + first).tolist(), (by_target[likely] / by_target.sum()).tolist(), strict=True))

    def _targets(
        self, dfa: LazyDfa, state: int, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.bool_], Ids, NDArray[np.float64], Ids]:
        """The tokens that do not die, states after them with the weights of the tokens that lead there, and the states that the
        tokens walk through: bool [32 ceil(V / 32)], int32 [N], float64 [N], int32 [S]. Raises TooLarge.
        """
        dfa.explore([state])
        of_bytes = dfa.next[state, dfa.classes[:256]]
        plain_bytes = of_bytes == np.bincount(of_bytes[of_bytes != DEAD], minlength=1).argmax()
        if of_bytes[plain_bytes].any() and plain_bytes.sum() >= FEWEST_PLAIN:
            plain = self._tokens_of(plain_bytes)
            chain = self._chain(dfa, state, plain_bytes, int(plain.lengths.max(initial=0)))
            if chain is not None:
                others, targets, walked = _walk(dfa, state, plain.trie)
                live = chain != DEAD
                allowed = plain.allowed.copy() if live.all() else self._of_all(plain.tokens[live[plain.lengths]])
                allowed[plain.others[others]] = True
                by_length = np.bincount(plain.lengths, weights[plain.tokens], minlength=len(chain))
                return (
                    allowed, np.concatenate((chain[live], targets)),
                    np.concatenate((by_length[live], weights[plain.others[others]])),
                    np.union1d(chain[live], walked).astype(np.int32),
                )
        tokens, targets, walked = _walk(dfa, state, self._trie)
        return self._of_all(tokens), targets, weights[tokens], walked

    def _of_all(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [32 ceil(V / 32)]: which tokens are these."""
        found = np.zeros(-(-self._vocabulary.num_tokens // 32) * 32, bool)
        found[tokens] = True
        return found

    def _chain(self, dfa: LazyDfa, state: int, plain_bytes: NDArray[np.bool_], length: int) -> Ids | None:
        """int32 [length + 1]: the state after each number of plain bytes; None if these do not all lead to the same ones."""
        classes, chain = np.unique(dfa.classes[:256][plain_bytes]), np.zeros(length + 1, np.int32)
        chain[0] = state
        for count in range(length):
            dfa.explore([state])
            following = dfa.next[state, classes]
            if (following != following[0]).any():
                return None
            chain[count + 1] = state = int(following[0])
            if state in (DEAD, chain[count]):  # it stays there
                chain[count + 2 :] = state
                break
        return chain

    def _tokens_of(self, plain_bytes: NDArray[np.bool_]) -> _Plain:
        key, of = plain_bytes.tobytes(), self._vocabulary
        found = self._plain.get(key)
        if found is None:
            lengths = np.diff(of.starts)
            is_plain = np.append(plain_bytes, np.zeros(of.symbols.max(initial=0) + 1, bool))[of.symbols]
            before = np.concatenate(([0], np.cumsum(is_plain)))
            all_plain = (before[of.starts[1:]] - before[of.starts[:-1]] == lengths) & (lengths <= LONGEST_PLAIN)
            tokens, others = np.flatnonzero(all_plain), np.flatnonzero(~all_plain)
            trie = _Tokens.of(trie_of_some(of, others))
            found = self._plain[key] = _Plain(tokens, lengths[tokens], others, self._of_all(tokens), trie)
            if len(self._plain) > KEPT:
                self._plain.popitem(last=False)
        self._plain.move_to_end(key)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """A trie, and its tokens in the order of the nodes at which they end: those of node n are tokens[begin[n] : begin[n + 1]]."""

    trie: Trie
    tokens: NDArray[np.int64]
    begin: NDArray[np.int64]

    @classmethod
    def of(cls, trie: Trie) -> _Tokens:
        order = np.argsort(trie.ends, kind="stable")
        return cls(trie, order, np.searchsorted(trie.ends[order], np.arange(len(trie.symbols) + 1)))


def _walk(dfa: LazyDfa, state: int, of: _Tokens) -> tuple[NDArray[np.int64], Ids, Ids]:
    """The tokens of the trie that do not die, the state after each, and the states that they walk through. Raises TooLarge."""
    trie, tokens, targets, walked = of.trie, [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [np.array([state], np.int32)]
    nodes, states = np.zeros(1, np.int32), np.full(1, state, np.int32)
    while len(nodes):
        if len(nodes) <= FEW:
            pairs, few = _walk_few(dfa, list(zip(nodes.tolist(), states.tolist(), strict=True)), of)
            tokens.append(np.array(few[0], np.int64))
            targets.append(np.array(few[1], np.int32))
            walked.append(np.array(few[2], np.int32))
            if not pairs:
                break
            nodes, states = np.array(pairs, np.int32).T
        missing = states[~dfa.explored[states]]
        if len(missing):
            dfa.explore(sorted(set(missing.tolist())))
        counts = trie.num_children[nodes]
        children = _ranges(trie.first_child[nodes], counts)
        after = dfa.next[np.repeat(states, counts), dfa.classes[trie.symbols[children]]]
        live = after != DEAD
        nodes, states = children[live], after[live]
        counts = of.begin[nodes + 1] - of.begin[nodes]
        tokens.append(of.tokens[_ranges(of.begin[nodes], counts)])
        targets.append(np.repeat(states, counts))
        walked.append(states)
    reached = np.zeros(dfa.num_states, bool)
    reached[np.concatenate(walked)] = True
    return np.concatenate(tokens), np.concatenate(targets), np.flatnonzero(reached).astype(np.int32)


def _walk_few(
    dfa: LazyDfa, pairs: list[tuple[int, int]], of: _Tokens
) -> tuple[list[tuple[int, int]], tuple[list[int], list[int], list[int]]]:
    """The same level by level, one node and its state after the other, as long as they have at most FEW children together.

    Returns the nodes and states that are left, and the tokens, targets and walked states that were found.
    """
    trie, tokens, targets, walked = of.trie, list[int](), list[int](), list[int]()
    while pairs and sum(int(trie.num_children[node]) for node, _ in pairs) <= FEW:
        following: list[tuple[int, int]] = []
        for node, state in pairs:
            first, count = int(trie.first_child[node]), int(trie.num_children[node])
            if count:
                dfa.explore((state,))
            for child in range(first, first + count):
                after = int(dfa.next[state, dfa.classes[trie.symbols[child]]])
                if after != DEAD:
                    following.append((child, after))
                    walked.append(after)
                    ending = of.tokens[of.begin[child] : of.begin[child + 1]].tolist()
                    tokens += ending
                    targets += [after] * len(ending)
        pairs = following
    return pairs, (tokens, targets, walked)


def _ranges(begin: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """begin .. begin + count - 1 of each, one after the other."""
    ends = np.cumsum(counts)
    found: NDArray[np.int64] = np.repeat(begin - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
    return found


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
