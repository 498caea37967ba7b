"""From an automaton over bytes to one over the tokens of a vocabulary.

The next state after a token is a walk over its bytes, on the device too, so only the masks are computed here: a token is allowed
in a state if its walk does not die. States whose tokens cannot be told apart share a mask: they are found first, by refining a
partition as many steps as the longest token has bytes (Moore 1956), and one walk of the vocabulary is made for each class.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from batchspec.structured.regular import MAX_STATES, Dfa, TooLarge
from batchspec.token_automaton import BEGIN_THOUGHT, DEAD, END_THOUGHT, NUM_SYMBOLS, TokenAutomaton, TokenSymbols

MAX_MASKS_BYTES = 64 << 20
"""Of the masks of one automaton: 3,400 masks of a vocabulary of 152,000 tokens."""
MAX_TABLE_WORDS = 4 << 20


def over_tokens(dfa: Dfa, vocabulary: TokenSymbols, end_ids: Collection[int], *, thinks: bool, may_begin: bool) -> TokenAutomaton:
    """The automaton over tokens whose texts are those of `dfa`, whose starts are that of an answer and of one after a thought.

    end_ids    tokens that end a row: allowed where the text may end, and nowhere else
    thinks     an answer may follow a thought, whose end is the symbol END_THOUGHT
    may_begin  a thought may begin with the symbol BEGIN_THOUGHT
    Raises TooLarge.
    """
    num_states, num_classes = dfa.next.shape
    thought, either = (num_states, num_states + 1) if thinks else (DEAD, DEAD)
    classes = np.zeros(NUM_SYMBOLS, np.int32)
    classes[:256] = dfa.classes
    classes[256:] = num_classes + np.arange(NUM_SYMBOLS - 256)
    table = np.zeros((num_states + 2 * thinks, 1 + num_classes + NUM_SYMBOLS - 256), np.int32)
    table[:num_states, 1 : 1 + num_classes] = dfa.next
    answer, after_thought = dfa.starts
    if thinks:
        table[thought, 1:] = thought
        table[thought, 1 + classes[END_THOUGHT]] = after_thought
        table[either] = table[answer]
        if may_begin:
            table[either, 1 + classes[BEGIN_THOUGHT]] = thought
    if table.size > MAX_TABLE_WORDS:
        raise TooLarge(f"its automaton has {num_states:,} states and {num_classes} classes of bytes, more than fit in 16 MiB")
    final = np.zeros(len(table), bool)
    final[:num_states] = dfa.final
    if thinks:
        final[either] = final[answer]
    lengths = np.diff(vocabulary.starts)
    kinds = _told_apart(table[:, 1:], int(lengths.max(initial=1)))
    words = -(-vocabulary.num_tokens // 32)
    _, first, numbers = np.unique(np.stack((kinds, final), 1), axis=0, return_index=True, return_inverse=True)
    ends, mask = np.array(sorted(end_ids), np.int64), np.zeros(32 * words, bool)
    found: dict[bytes, int] = {}
    of_kind = np.zeros(len(first), np.int32)
    for kind, state in enumerate(first.tolist()):
        mask[:] = state == DEAD
        if state != DEAD:
            _mark_allowed(table, classes, state, vocabulary, lengths, mask)
            mask[ends] = final[state]
        of_kind[kind] = found.setdefault(np.packbits(mask, bitorder="little").tobytes(), len(found))
        if 4 * words * len(found) > MAX_MASKS_BYTES:
            raise TooLarge(f"its different sets of allowed tokens take more than {MAX_MASKS_BYTES >> 20} MiB")
    table[:, 0] = of_kind[numbers.reshape(-1)]
    packed = np.frombuffer(b"".join(found), np.int32).reshape(len(found), words).copy()
    return TokenAutomaton(
        classes=classes, table=table, masks=packed, answer=answer, thought=thought, either=either, vocabulary=vocabulary
    )  # fmt: skip


def _told_apart(following: NDArray[np.int32], steps: int) -> NDArray[np.int64]:
    """A number for each state; equal ones die on the same strings of at most `steps` symbols."""
    kinds = (np.arange(len(following)) > 0).astype(np.int64)
    count = 2
    for _ in range(steps):
        rows = np.concatenate((kinds[:, None], kinds[following]), 1).astype(np.int32)
        keys = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
        found, kinds = np.unique(keys, return_inverse=True)
        if len(found) == count:
            break
        count = len(found)
    assert count <= MAX_STATES + 3
    return kinds.reshape(-1)


def _mark_allowed(
    table: NDArray[np.int32], classes: NDArray[np.int32], state: int, vocabulary: TokenSymbols, lengths: NDArray[np.int32],
    mask: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Mark the tokens whose walks from `state` do not die: all of them at once, symbol by symbol."""
    symbols, starts = vocabulary.symbols, vocabulary.starts
    tokens = np.arange(vocabulary.num_tokens)
    states = np.full(len(tokens), state, np.int32)
    step = 0
    while len(tokens):
        states = table[states, 1 + classes[symbols[starts[tokens] + step]]]
        step += 1
        live = states != DEAD
        done = live & (lengths[tokens] == step)
        mask[tokens[done]] = True
        live &= ~done
        tokens, states = tokens[live], states[live]
