"""Lazy automata: constraints whose states are computed when rows reach them. What the engine and the computing process exchange.

A lazy automaton has the same masks and the same walk over symbols as a `TokenAutomaton`, but its states come one by one, each as
an `Expansion`. This module does not import torch.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from batchspec.automata.token_automaton import DEAD, Ids

ANSWER, EITHER, THOUGHT = 1, 2, 3
"""States in which an answer begins, in which an answer or a thought may begin, and inside a thought."""
NOT_EXPANDED = -3
"""In the column FORCED of a state of which the device knows no mask yet: a row waits there."""
NONE = np.zeros(0, np.int32)


class LazyAutomaton(NamedTuple):
    """A constraint without a finite automaton, or with too large a one. `Expanding` computes its states.

    Equal ones are the same automaton. A row begins in ANSWER, EITHER or THOUGHT, or with channels in a state inside a
    header (`token_automaton.py`). These have the same numbers in all epochs.
    """

    kind: str
    source: str
    """As given: a grammar, a regex, or the JSON text of a schema or a list of strings."""
    retryable: bool = False
    """Another run may find a finite automaton: there was too little time or memory for one, because of other constraints."""
    is_weaker: bool = False
    """Whether it allows answers that its schema does not, which are checked at the end."""

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
    """One state of a lazy automaton: the mask of the tokens that may follow, and the states that these walk through.

    state      its number

    mask       int32 [ceil(V / 32)]  as in `TokenAutomaton`
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
    ahead: tuple[Expansion, ...] = ()
    """States that tokens of this one are likely to lead to, each as if it had been asked for."""

    @classmethod
    def of_dead(cls) -> Expansion:
        """The answer about tokens that are not allowed: state DEAD, all arrays empty."""
        return cls(state=DEAD, mask=NONE, forced=-1, states=NONE, following=NONE.reshape(0, 0), classes=NONE)


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for the expansion of the state after these tokens from `state`.

    epoch        states are numbered within an epoch: the first ask of another epoch drops all states
    from_beginning  `state` is the one in which the row's output begins, and `tokens` are all of it: the answer does not depend on
                 the epoch, so another process can give it
    written      tokens that the row wrote since its last ask: which states are likely is learned from them
    reads_ahead  states that are likely to follow may be computed too: no other row waits
    """

    automaton: LazyAutomaton
    state: int
    tokens: tuple[int, ...]
    epoch: int
    from_beginning: bool
    written: tuple[int, ...] = ()
    reads_ahead: bool = True


class Recheck(NamedTuple):
    """Asks how many of these tokens, the whole output of a row, are allowed from `state` on, in which the output begins.

    num_skipped_bytes  number of bytes at the beginning of the tokens that are not read: does the answer match without them?
    """

    automaton: LazyAutomaton
    state: int
    tokens: tuple[int, ...]
    num_skipped_bytes: int = 0


class MachineError(str):
    """Why there is no answer, if the machine is the cause (a process was killed, or none can be started), not the automaton."""


Answer = Expansion | str | None
"""A text says why the state cannot be computed, even in a process without other states. None: the process that numbered the
states has ended; ask again in a new epoch."""
_EPOCHS = itertools.count()


class Expanding(Protocol):
    """Computes states of lazy automata."""

    def submit(self, ask: Ask) -> Future[Answer]:
        """Answers about one automaton come in the order of the asks. `Expansion.of_dead()` if the tokens are not allowed."""

    def recheck(self, asked: Recheck) -> Future[int | str]:
        """How many tokens are allowed, as `TokenAutomaton.num_allowed`; a text says why that cannot be found."""


def new_epoch() -> int:
    """A number that no ask of this process had."""
    return next(_EPOCHS)
