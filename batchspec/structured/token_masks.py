"""Token masks of the states of a DFA over bytes: they make it an automaton over the tokens of a vocabulary.

The next state after a token is a walk over its bytes, on the device too, so only the masks are computed here: a token is allowed
in a state if its walk does not die. States with equal allowed tokens share a mask. They are found first, by refining a partition
as many steps as the longest token has bytes (Moore 1956), and the vocabulary is walked once for each class of states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchspec.automata.token_automaton import (
    BEGIN_THOUGHT,
    DEAD,
    END_THOUGHT,
    ENDS,
    FORCED,
    MASK,
    NEXT,
    NUM_SYMBOLS,
    Ids,
    TokenAutomaton,
    TokenSymbols,
)
from batchspec.structured.channels import BYTES, ChannelStates, with_letters
from batchspec.structured.dfa import MAX_STATES, Dfa
from batchspec.structured.regular import TooLarge

MAX_MASKS_BYTES = 64 << 20
"""Maximum size of the masks of one automaton: 3,400 masks of a vocabulary of 152,000 tokens."""
MAX_TABLE_WORDS = 4 << 20
"""Maximum number of int32 words of the table of one automaton: 16 MiB."""
MANY_TOKENS = 1 << 19
"""States are walked together that begin about so many tokens."""
FEW_NODES = 2_000
"""States that reach fewer nodes of the trie are compared by these, the others by their masks."""
MAX_FORCED_BYTES = 32
"""Maximum size of a token that is drafted because no other text is allowed."""


def over_tokens(
    dfa: Dfa, vocabulary: TokenSymbols, end_ids: Collection[int], *, thinks: bool, may_begin: bool, channels: bool = False,
    calls: bool = False,
) -> TokenAutomaton:
    """The automaton over tokens whose texts are those of `dfa`.

    dfa        its `starts` are the states of an answer, and of an answer after a thought (a reasoning block)

    end_ids    tokens that end a row: allowed where the text may end, and nowhere else
    thinks     an answer may follow a thought, whose end is the symbol END_THOUGHT
    may_begin  a thought may begin with the symbol BEGIN_THOUGHT
    channels   instead, an answer is a message in the final channel of harmony; or, if calls, a tool call
    Raises TooLarge.
    """
    dfa = with_letters(dfa) if channels else dfa
    num_states, num_classes = dfa.next.shape
    classes = np.zeros(NUM_SYMBOLS, np.int32)
    classes[:256] = dfa.classes
    classes[256:] = num_classes + np.arange(NUM_SYMBOLS - 256)
    answer, after_thought = dfa.starts
    thought, either, around = DEAD, DEAD, np.zeros((0, num_classes + NUM_SYMBOLS - 256), np.int32)
    if channels:
        states = ChannelStates(classes, around.shape[1], first=num_states, answer=answer, calls=calls)
        thought, either, around = states.thought, states.outside, states.rows
    elif thinks:
        thought, either, around = num_states, num_states + 1, np.zeros((2, around.shape[1]), np.int32)
        around[0] = thought
        around[0, classes[END_THOUGHT]] = after_thought
        around[1, :num_classes] = dfa.next[answer]
        if may_begin:
            around[1, classes[BEGIN_THOUGHT]] = thought
    table = np.zeros((num_states + len(around), NEXT + around.shape[1]), np.int32)
    table[:num_states, NEXT : NEXT + num_classes] = dfa.next
    table[num_states:, NEXT:] = around
    for symbol, byte in BYTES.items() if channels else ():
        table[:num_states, NEXT + classes[symbol]] = dfa.next[:, dfa.classes[byte]]
    if table.size > MAX_TABLE_WORDS:
        raise TooLarge(f"its automaton has {num_states:,} states and {num_classes} classes of bytes, more than fit in 16 MiB")
    final = np.zeros(len(table), bool)
    final[:num_states] = dfa.final
    if thinks and not channels:
        final[either] = final[answer]
    masks, mask_of, ends_alone = _masks(table, classes, final, vocabulary, end_ids)
    table[:, MASK] = mask_of
    table[:num_states, FORCED] = _forced(dfa, tokens_of_bytes(vocabulary), frozenset(end_ids))
    table[num_states:, FORCED] = -1
    table[ends_alone, FORCED] = ENDS
    return TokenAutomaton(
        classes=classes, table=table, masks=masks, answer=answer, thought=thought, either=either, vocabulary=vocabulary
    )


def _masks(
    table: NDArray[np.int32], classes: NDArray[np.int32], final: NDArray[np.bool_], vocabulary: TokenSymbols,
    end_ids: Collection[int],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    """The different masks of allowed tokens, each state's among them, and the states where only the end is allowed.

    table  [S, NEXT + classes], whose columns from NEXT on are filled
    final  bool [S]: the text may end there
    Returns int32 [masks, words], int32 [S] and bool [S]. Raises TooLarge.
    """
    trie = trie_of(vocabulary)
    kinds = _distinguished(table[:, NEXT:], int(np.diff(vocabulary.starts).max(initial=1)))
    words = -(-vocabulary.num_tokens // 32)
    _, first, numbers = np.unique(np.stack((kinds, final), 1), axis=0, return_index=True, return_inverse=True)
    numbers = numbers.reshape(-1)
    ends, mask = np.array(sorted(end_ids), np.int64), np.zeros(32 * words, bool)
    found: dict[bytes, int] = {}

    def numbered(state: int, nodes: Ids) -> tuple[int, bool]:
        """The number of the state's mask, and whether only the end is allowed."""
        mask[:], alone = state == DEAD, False
        if state != DEAD:
            there = np.zeros(len(trie.symbols), bool)
            there[nodes] = True
            mask[: vocabulary.num_tokens] = there[trie.ends]
            mask[ends] = False
            alone = bool(final[state]) and not mask.any()
            mask[ends] = final[state]
        number = found.setdefault(np.packbits(mask, bitorder="little").tobytes(), len(found))
        if 4 * words * len(found) > MAX_MASKS_BYTES:
            raise TooLarge(f"its different sets of allowed tokens take more than {MAX_MASKS_BYTES >> 20} MiB")
        return number, alone

    known: dict[tuple[bool, bytes | int], tuple[int, bool]] = {}
    of_kind, ends_alone = np.zeros(len(first), np.int32), np.zeros(len(first), bool)
    for kind, (state, nodes) in enumerate(zip(first.tolist(), _reached(table, classes, first, vocabulary), strict=True)):
        key = bool(final[state]), nodes.tobytes() if state != DEAD and len(nodes) < FEW_NODES else state
        if key not in known:
            known[key] = numbered(state, nodes)
        of_kind[kind], ends_alone[kind] = known[key]
    packed = np.frombuffer(b"".join(found), np.int32).reshape(len(found), words).copy()
    return packed, of_kind[numbers], ends_alone[numbers]


def _forced(dfa: Dfa, token_of: Mapping[bytes, int], end_ids: frozenset[int]) -> NDArray[np.int32]:
    """For each state the longest token of the bytes that must come next; -1 if several may come, or the text may end."""
    num_bytes = np.bincount(dfa.classes, minlength=dfa.next.shape[1])
    forced = ((dfa.next > 0) * num_bytes).sum(1) == 1
    forced &= ~dfa.final
    column = (dfa.next > 0).argmax(1)
    byte_of = {int(index): byte for byte, index in enumerate(dfa.classes)}
    found = np.full(len(dfa.next), -1, np.int32)
    for start in np.flatnonzero(forced).tolist():
        path, state = bytearray(), start
        while forced[state] and len(path) < MAX_FORCED_BYTES:
            path.append(byte_of[int(column[state])])
            state = int(dfa.next[state, column[state]])
        tokens = (token_of.get(bytes(path[:length]), -1) for length in range(len(path), 0, -1))
        found[start] = next((token for token in tokens if token >= 0 and token not in end_ids), -1)
    return found


@lru_cache(maxsize=1)
def tokens_of_bytes(vocabulary: TokenSymbols) -> dict[bytes, int]:
    """Bytes -> the first token with these bytes."""
    symbols, found = vocabulary.symbols, dict[bytes, int]()
    for token, (begin, end) in enumerate(pairwise(vocabulary.starts.tolist())):
        if end - begin <= MAX_FORCED_BYTES and symbols[begin] < 256:
            found.setdefault(bytes(symbols[begin:end].astype(np.uint8)), token)
    return found


def _distinguished(following: NDArray[np.int32], steps: int) -> NDArray[np.int64]:
    """A number for each state; states with equal numbers die on the same strings of at most `steps` symbols."""
    kinds = (np.arange(len(following)) > 0).astype(np.int64)
    count = 2
    for _ in range(steps):
        rows = np.concatenate((kinds[:, None], kinds[following]), 1).astype(np.int32)
        keys = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
        found, kinds = np.unique(keys, return_inverse=True)
        if len(found) == count:
            break
        count = len(found)
    assert count <= MAX_STATES + 50
    return kinds.reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """V tokens as one tree of symbols. Node 0 is the root; the children of a node follow each other.

    symbols [N] of each node, first_child and num_children [N], ends [V] the node at which a token ends
    """

    symbols: Ids
    first_child: Ids
    num_children: Ids
    ends: Ids


@lru_cache(maxsize=1)
def trie_of(vocabulary: TokenSymbols) -> Trie:
    """All tokens."""
    return trie_of_some(vocabulary, np.arange(vocabulary.num_tokens))


def trie_of_some(vocabulary: TokenSymbols, tokens: NDArray[np.int64]) -> Trie:
    """These tokens. Level by level: those that are longer than a level are sorted by their node and their next symbol."""
    lengths, starts = np.diff(vocabulary.starts)[tokens], vocabulary.starts[:-1][tokens]
    at, longer = np.zeros(len(tokens), np.int64), np.arange(len(tokens))
    symbols, parents, count, depth = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], 1, 0
    while len(longer := longer[lengths[longer] > depth]):
        keys = at[longer] * NUM_SYMBOLS + vocabulary.symbols[starts[longer] + depth]
        found, numbers = np.unique(keys, return_inverse=True)
        at[longer] = count + numbers.reshape(-1)
        symbols.append(found % NUM_SYMBOLS)
        parents.append(found // NUM_SYMBOLS)
        count, depth = count + len(found), depth + 1
    parent = np.concatenate(parents)[1:]
    num_children = np.bincount(parent, minlength=count)
    first_child = 1 + np.searchsorted(parent, np.arange(count))
    return Trie(*(part.astype(np.int32) for part in (np.concatenate(symbols), first_child, num_children, at)))


def _reached(
    table: NDArray[np.int32], classes: NDArray[np.int32], states: NDArray[np.int64], vocabulary: TokenSymbols
) -> Iterator[Ids]:
    """For each state the nodes of the trie to which walks from it lead, in an order that depends on these nodes alone.

    Many states are walked at once if they allow few tokens, as those inside of a character: a class of Unicode has hundreds.
    """
    begins = vocabulary.symbols[vocabulary.starts[:-1]]
    num_tokens = (table[states][:, NEXT + classes] != DEAD) @ np.bincount(begins, minlength=NUM_SYMBOLS)
    batch = np.cumsum(num_tokens + MANY_TOKENS // 1000) // MANY_TOKENS
    for some in np.split(states, np.flatnonzero(np.diff(batch)) + 1):
        yield from _walked(table, classes, some, trie_of(vocabulary))


def _walked(table: NDArray[np.int32], classes: NDArray[np.int32], states: NDArray[np.int64], trie: Trie) -> list[Ids]:
    """A beginning that several tokens share is walked once."""
    owners, nodes, at = np.arange(len(states), dtype=np.int32), np.zeros(len(states), np.int32), states.astype(np.int32)
    found, found_by = [nodes[:0]], [owners[:0]]
    while len(nodes):
        counts = trie.num_children[nodes]
        begin = np.cumsum(counts, dtype=np.int32) - counts
        children = np.repeat(trie.first_child[nodes] - begin, counts) + np.arange(counts.sum(), dtype=np.int32)
        after = table[np.repeat(at, counts), NEXT + classes[trie.symbols[children]]]
        live = after != DEAD
        if len(states) > 1:
            owners = np.repeat(owners, counts)[live]
            found_by.append(owners)
        nodes, at = children[live], after[live]
        found.append(nodes)
    if len(states) == 1:
        return [np.concatenate(found)]
    owners = np.concatenate(found_by)
    order = np.argsort(owners, kind="stable")
    return np.split(np.concatenate(found)[order], np.searchsorted(owners[order], np.arange(1, len(states))))
