"""The automaton's states around an answer in harmony, the format of gpt-oss: headers and the channel `analysis`.

A row writes messages in the channel `analysis`, whose text is free, and then one in the channel `final`: its text is the answer.
No message in another channel, which would be part of the answer too (`engine/features/channels.py`), and no tool call may be
written.

outside   --start--> "assistant" --> role        --channel--> name
role      --message--> the answer                --channel--> name
name      "analysis" --message--> thought
name      "final" --> (" ", constrain and small letters) --message--> the answer
thought   any token but those that end the row --> thought; --end--> outside; --start--> "assistant"; --channel--> name

If the answer must be a tool call, no message in `final` may be written, and a text begins with a header only:

name      "commentary to=functions." --> the answer: the function's name, (" ", constrain, "json"), message, arguments
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from batchspec.automata.lazy_automaton import ANSWER, EITHER, THOUGHT
from batchspec.automata.token_automaton import (
    BEGIN_THOUGHT,
    CHANNEL,
    CONSTRAIN,
    DEAD,
    END_THOUGHT,
    MARKS,
    NUM_SYMBOLS,
    OTHER,
    START,
    TokenSymbols,
)
from batchspec.structured.dfa import Dfa

MESSAGE, END = BEGIN_THOUGHT, END_THOUGHT
MESSAGE_BYTE, CONSTRAIN_BYTE = MARKS[-1], MARKS[-2]
BYTES = {MESSAGE: MESSAGE_BYTE, CONSTRAIN: CONSTRAIN_BYTE}
"""Symbols that an answer with a header holds, as bytes of its automaton."""
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
CALL = "commentary to=functions."
SINGLE_BYTE_CLASSES = frozenset(LETTERS + CALL.encode())


def with_letters(dfa: Dfa) -> Dfa:
    """The same automaton, with a class of its own for each byte in SINGLE_BYTE_CLASSES, the bytes of header texts."""
    own = np.array([byte if byte in SINGLE_BYTE_CLASSES else 256 for byte in range(256)])
    _, first, classes = np.unique(np.stack((dfa.classes, own), 1), axis=0, return_index=True, return_inverse=True)
    return Dfa(dfa.next[:, dfa.classes[first]], classes.reshape(-1).astype(np.int32), dfa.final, dfa.starts)


class ChannelStates:
    """Rows of a transition table for these states, to be appended to the states of an answer.

    classes      int32 [NUM_SYMBOLS]  class of each symbol, 0 .. num_classes-1
    first        number of the first of these states
    answer       number of the state in which an answer begins
    calls        whether the answer must be a tool call
    """

    def __init__(self, classes: NDArray[np.int32], num_classes: int, *, first: int, answer: int, calls: bool) -> None:
        self._classes, self._first, self._width = classes, first, num_classes
        self._rows: list[NDArray[np.int32]] = []
        self.outside, self.thought, name = self._state(), self._state(), self._state()
        role = self._spell("assistant", self._state(from_=(self.outside, self.thought), symbols=[START]))
        for before in (self.outside, self.thought, role):
            self._go(before, [CHANNEL], name)
        self._go(self.thought, [*range(256), OTHER, CONSTRAIN, MESSAGE], self.thought)
        self._go(self.thought, [END], self.outside)
        self._go(self._spell("analysis", name), [MESSAGE], self.thought)
        if calls:
            self._go(self._spell(CALL[:-1], name), CALL[-1:].encode(), answer)
        else:
            self._go(role, [MESSAGE], answer)
            self._final(self._spell("final", name), answer)

    @property
    def rows(self) -> NDArray[np.int32]:
        """int32 [states, num_classes]: the next state by class."""
        return np.stack(self._rows)

    def _final(self, named: int, answer: int) -> None:
        spaced = self._state(from_=(named,), symbols=[ord(" ")])
        kind = self._state(from_=(named, spaced), symbols=[CONSTRAIN])
        self._go(kind, LETTERS, kind)
        for before in (named, kind):
            self._go(before, [MESSAGE], answer)

    def _state(self, from_: tuple[int, ...] = (), symbols: list[int] | None = None) -> int:
        self._rows.append(np.zeros(self._width, np.int32))
        made = self._first + len(self._rows) - 1
        for before in from_:
            self._go(before, symbols or [], made)
        return made

    def _go(self, state: int, symbols: list[int] | bytes, target: int) -> None:
        self._rows[state - self._first][self._classes[list(symbols)]] = target

    def _spell(self, word: str, state: int) -> int:
        for byte in word.encode():
            row = self._rows[state - self._first]
            known = int(row[self._classes[byte]])
            state = known or self._state(from_=(state,), symbols=[byte])
        return state


def before_answer_of(classes: NDArray[np.int32], num_classes: int, *, calls: bool) -> ChannelStates:
    """The states around an answer of a lazy automaton: numbers from EITHER on, THOUGHT being the second."""
    found = ChannelStates(classes, num_classes, first=EITHER, answer=ANSWER, calls=calls)
    assert (found.outside, found.thought) == (EITHER, THOUGHT)
    return found


def state_after_header(header: Iterable[int], vocabulary: TokenSymbols, *, calls: bool = False) -> int:
    """The state of any lazy automaton in which an output begins that continues a message with this header; DEAD if none may."""
    rows, state = before_answer_of(np.arange(NUM_SYMBOLS, dtype=np.int32), NUM_SYMBOLS, calls=calls).rows, EITHER
    for token in header:
        for symbol in vocabulary.symbols[vocabulary.starts[token] : vocabulary.starts[token + 1]].tolist():
            if state < EITHER:  # the answer has begun, or the message may not be written
                return DEAD
            state = int(rows[state - EITHER, symbol])
    return state
