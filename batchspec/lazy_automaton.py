"""Automata whose states are found where texts get to, while rows follow them: what the engine and the host process exchange.

A lazy automaton has the same masks and the same walk over symbols as a `TokenAutomaton`; only its states come one after the
other, each as an `Expansion`. This module does not import torch.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from batchspec.token_automaton import DEAD, Ids

ANSWER, EITHER, THOUGHT = 1, 2, 3
"""States in which an answer begins, in which an answer or a thought may begin, and inside a thought."""
NOT_EXPANDED = -3
"""In the column FORCED of a state of which the device knows no mask yet: a row waits there."""
NONE = np.zeros(0, np.int32)


class LazyAutomaton(NamedTuple):
    """A constraint without a finite automaton, or with too large a one: states are found on the host where texts get to.

    Equal ones are one automaton. `Expanding` knows its states; it begins in ANSWER, EITHER or THOUGHT.
    """

    kind: str
    source: str
    """As given: a grammar, a regex, or the JSON text of a schema or a list of strings."""

    @property
    def answer(self) -> int:
        return ANSWER

    @property
    def thought(self) -> int:
        return THOUGHT

    @property
    def either(self) -> int:
        return EITHER


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expansion:
    """What was found of one state of a lazy automaton: the tokens that may follow, and the states that these walk through.

    mask       int32 [ceil(V / 32)]  as of `TokenAutomaton`
    forced     the longest token of the bytes that must come next, -1 where more than one may, or ENDS
    states     int32 [S]     those that the symbols of any token lead to, itself included
    following  int32 [S, C]  of each of these the next state by class; DEAD also where no token of this state goes on
    classes    int32 [NUM_SYMBOLS]  class of each symbol, the same for all states of the automaton
    """

    state: int
    mask: Ids
    forced: int
    states: Ids
    following: Ids
    classes: Ids

    @classmethod
    def of_dead(cls) -> Expansion:
        """Of a text that is not allowed."""
        return cls(state=DEAD, mask=NONE, forced=-1, states=NONE, following=NONE.reshape(0, 0), classes=NONE)


@dataclass(frozen=True, slots=True)
class Ask:
    """The expansion of the state after these tokens from `state`. With another `epoch` than before states are numbered anew."""

    automaton: LazyAutomaton
    state: int
    tokens: tuple[int, ...]
    epoch: int


Answer = Expansion | str | None
"""A text says why the state cannot be found; None: who numbered the states is lost, ask in another epoch."""
_EPOCHS = itertools.count()


class Expanding(Protocol):
    """What knows the states of lazy automata."""

    def submit(self, ask: Ask) -> Future[Answer]:
        """Answers come in the order of the asks. The expansion of DEAD, without more, if the tokens are not allowed."""


def new_epoch() -> int:
    """A number that no ask of this process had."""
    return next(_EPOCHS)
