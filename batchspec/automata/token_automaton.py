"""The compiled form of a schema, regex, choice or grammar: which tokens may follow, as tables that the device walks.

A text is matched byte by byte. Every token is a string of symbols: its bytes, or one symbol if it is not text (`OTHER` and the
think tokens). A token that marks tool calls, such as <tool_call>, is one byte that no UTF-8 text has (MARKS), so that text which
is spelled like the mark is not taken for it. A state's row of `table` holds the number of its mask, a token to draft where the
text is forced, and the next state for each class of symbols; the next state after a token is a walk over its symbols, so no table
by token is needed. Masks that several states share are stored once. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

BEGIN_THOUGHT, END_THOUGHT, OTHER, START, CHANNEL, CONSTRAIN = range(256, 262)
"""Symbols after the 256 bytes: the two think tokens; any other token that is not text (special, unknown); and with harmony, whose
`<|message|>` and `<|end|>` are the first two, the tokens of these names."""
MARKS = range(0xF8, 0x100)
"""Bytes that no UTF-8 text has: each stands for a token that marks tool calls."""
BREAKS_AFTER_THOUGHT = 2
"""Line breaks that an automaton allows at most between a thought and the answer, of which they are no part."""
NUM_SYMBOLS = 262
MASK, FORCED, NEXT = 0, 1, 2
"""Columns of a state's row: the number of its mask, the token that is drafted (-1: several may come; ENDS), and from NEXT on the
next state by class."""
ENDS = -2
"""In place of a forced token: the text can only end."""
DEAD = 0
"""The state after a token that is not allowed. It allows every token, because nothing of what follows is kept."""
KEPT_STEPS = 1 << 17
"""Maximum number of steps, each from a state by a token, whose results an automaton keeps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSymbols:
    """The symbols of every token of a vocabulary of V tokens: token v is symbols[starts[v] : starts[v + 1]].

    symbols  int32 [sum of lengths]
    starts   int32 [V + 1]
    marks    texts of the tokens whose symbols are the bytes of MARKS, in their order
    """

    symbols: Ids
    starts: Ids
    marks: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.starts) - 1

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens: their bytes, and those of marks, without tokens that are not text. Bytes that are not valid UTF-8
        become U+FFFD.

        A tokenizer's decoder may drop a space at the beginning, which a constraint asks for.
        """
        found, _ = self.symbols_of(tokens)
        data = bytes(found[found < 256].astype(np.uint8))
        for byte, mark in zip(MARKS, self.marks, strict=False):
            data = data.replace(bytes([byte]), mark.encode())
        return data.decode("utf-8", "replace")

    def symbols_of(self, tokens: Sequence[int]) -> tuple[Ids, NDArray[np.int64]]:
        """The symbols of tokens, concatenated, and for each token the index after its last symbol."""
        ids = np.asarray(tokens, np.int64)
        starts = self.starts[ids]
        lengths = self.starts[ids + 1] - starts
        ends = lengths.cumsum(dtype=np.int64)
        return self.symbols[np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)], ends

    @classmethod
    def of(cls, tokens: Sequence[bytes | int], marks: tuple[str, ...] = ()) -> TokenSymbols:
        """Of each token its bytes, not empty, or the one symbol that it is."""
        strings = [[token] if isinstance(token, int) else list(token) for token in tokens]
        starts = np.zeros(len(strings) + 1, np.int32)
        np.cumsum([len(string) for string in strings], out=starts[1:])
        symbols = np.array([symbol for string in strings for symbol in string], np.int32)
        return cls(symbols=symbols, starts=starts, marks=marks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenAutomaton:
    """A finite automaton over tokens. State 0 is DEAD.

    classes  int32 [NUM_SYMBOLS]      class of each symbol, 0 .. C-1
    table    int32 [S, 2 + C]         row s: the number of the state's mask; the longest token of the bytes that must come
                                      next, -1 where more than one may, ENDS where none may; then the next state by class
    masks    int32 [M, ceil(V / 32)]  bit v % 32 of word v // 32: token v is allowed
    """

    classes: Ids
    table: Ids
    masks: Ids
    answer: int
    """State in which an answer begins."""
    thought: int
    """State inside a thought, in which every token is allowed but those that end the row; DEAD without think tokens."""
    either: int
    """State in which an answer or a thought may begin, with harmony any message; DEAD without think tokens."""
    vocabulary: TokenSymbols
    is_weaker: bool = False
    """Whether it allows answers that its schema does not, which are checked at the end."""
    _steps: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    """The next state, by state * V + token, of steps that were walked before: rows of one automaton take the same ones."""

    @property
    def num_states(self) -> int:
        return len(self.table)

    @property
    def num_words(self) -> int:
        """int32 words of classes and table."""
        return self.classes.size + self.table.size

    @property
    def nbytes(self) -> int:
        return 4 * (self.num_words + self.masks.size)

    def walk(self, state: int, tokens: Sequence[int]) -> int:
        """The state after these tokens."""
        steps, num_tokens, begin = self._steps, self.vocabulary.num_tokens, state
        try:
            for token in tokens:
                state = steps[state * num_tokens + token]
        except KeyError:
            return self._walk_symbols(begin, tokens)
        return state

    def _walk_symbols(self, state: int, tokens: Sequence[int]) -> int:
        """As `walk`, if some steps are new: numpy finds the classes of all symbols at once, and a loop reads the next states."""
        steps, num_tokens, width = self._steps, self.vocabulary.num_tokens, self.table.shape[1]
        symbols, ends = self.vocabulary.symbols_of(tokens)
        columns, words, begin = (NEXT + self.classes[symbols]).tolist(), self.table.ravel().data, 0
        for token, end in zip(tokens, ends.tolist(), strict=True):
            key = state * num_tokens + token
            after = steps.get(key)
            if after is None:
                for column in columns[begin:end]:
                    state = words[state * width + column]
                if len(steps) >= KEPT_STEPS:
                    steps.clear()
                steps[key] = after = state
            state, begin = after, end
        return state

    def read(self, state: int, data: bytes) -> int:
        """The state after these bytes."""
        for byte in data:
            state = self.table.item(state, NEXT + self.classes.item(byte))
        return state

    def num_allowed(self, state: int, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are allowed one after the other. The last may be one that ends a row."""
        before = self.walk(state, tokens[:-1])
        if not tokens or (before != DEAD and self.allows(before, tokens[-1])):
            return len(tokens)
        for count, token in enumerate(tokens[:-1]):
            state = self.walk(state, (token,))
            if state == DEAD:
                return count
        return len(tokens) - 1

    def allows(self, state: int, token: int) -> bool:
        """Whether a token is allowed in a state."""
        return bool(self.masks.item(self.table.item(state, MASK), token >> 5) >> (token & 31) & 1)

    def allowed(self, state: int) -> NDArray[np.bool_]:
        """Which tokens are allowed in a state, bool [V]."""
        bits = np.unpackbits(self.masks[self.table[state, MASK]].view(np.uint8), bitorder="little")
        return bits[: self.vocabulary.num_tokens].astype(bool)
