"""Stands in for the process of lazy automata, and reaches a limit at a given place.

Run it with `python -m tests.structured.exhausted_expander`. The first token of a `Recheck` is the place: while the process
works, while it answers, at the limit of states, or nowhere.
"""

from __future__ import annotations

from typing import Any

from batchspec.automata.lazy_automaton import Recheck
from batchspec.structured import expand_process
from batchspec.structured.lazy_dfa import TooManyStates

WORKING, ANSWERING, STATES, NOWHERE = range(4)
CUT_OFF = 1 << 17
"""Bytes of an answer that are written before memory runs out: more than a buffer holds."""


class Unwritable:
    def __reduce__(self) -> Any:
        raise MemoryError


def limited(where: int, answer: Any) -> Any:
    if where == WORKING:
        raise MemoryError
    if where == STATES:
        raise TooManyStates
    return {"begin": bytes(CUT_OFF), "end": Unwritable()} if where == ANSWERING else answer


def _recheck(work: object, asked: Recheck) -> Any:
    return limited(asked.tokens[0], len(asked.tokens))


if __name__ == "__main__":
    expand_process.Work.recheck = _recheck  # type: ignore[method-assign, assignment]
    expand_process.main()
