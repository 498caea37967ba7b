"""The deterministic automaton of a node over UTF-8 bytes: subset construction of its NFA, then the states that can be completed.

Bytes that no part distinguishes share a class, so a row of the table is tens of entries, not 256.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchspec.structured.nfa import Nfa
from batchspec.structured.regular import EMPTY, Impossible, Node, TooLarge

MAX_STATES = 50_000
"""Maximum number of states. A string of at most 5,000 characters has 40,000."""


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """State 0 is dead: no text continues from it. A final state can be reached from every other state.

    next     int32 [S, C]   next state by class of byte
    classes  int32 [256]    class of each byte
    final    bool [S]       the text may end
    starts   state for each requested start
    """

    next: NDArray[np.int32]
    classes: NDArray[np.int32]
    final: NDArray[np.bool_]
    starts: tuple[int, ...]


def dfa_of(node: Node, before: Node = EMPTY, present: NDArray[np.bool_] | None = None) -> Dfa:
    """The automaton of `node`; its starts are that of `node` and that of `before` followed by `node`.

    present  bool [256] bytes that a text can hold; None: all of them
    Raises TooLarge, and Impossible if no text matches.
    """
    nfa = Nfa()
    first = nfa.state()
    start = nfa.state()
    nfa.free[nfa.add(before, first)].append(start)
    end = nfa.add(node, start)
    return _trimmed(*_subsets(nfa, (start, first), end), np.ones(256, bool) if present is None else present)


def _subsets(
    nfa: Nfa, starts: Sequence[int], end: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_], list[int]]:
    """Next states [S, C], classes [256], final [S] and the start states; state 0 is the empty set."""
    edges = np.zeros(257, bool)
    edges[0] = True
    for moves in nfa.moves:
        for low, high, _ in moves:
            edges[low] = edges[high + 1] = True
    classes = (np.cumsum(edges[:256]) - 1).astype(np.int32)
    class_of, num_classes = classes.tolist(), int(classes[-1]) + 1
    by_class = [[(class_of[low], class_of[high] + 1, target) for low, high, target in moves] for moves in nfa.moves]
    closures: dict[int, frozenset[int]] = {}

    def closure(state: int) -> frozenset[int]:
        """States reached by empty moves (epsilon closure): those that have other moves, and the end."""
        if state not in closures:
            seen, todo = {state}, [state]
            while todo:
                for other in nfa.free[todo.pop()]:
                    if other not in seen:
                        seen.add(other)
                        todo.append(other)
            closures[state] = frozenset(one for one in seen if by_class[one] or one == end)
        return closures[state]

    numbers: dict[frozenset[int], int] = {frozenset(): 0}
    sets: list[frozenset[int]] = [frozenset()]

    def number(states: frozenset[int]) -> int:
        found = numbers.get(states)
        if found is None:
            if len(sets) == MAX_STATES:
                raise TooLarge(f"its automaton has more than {MAX_STATES:,} states; shorten its repetitions")
            found = numbers[states] = len(sets)
            sets.append(states)
        return found

    unions: dict[frozenset[int], int] = {}
    begin = [number(closure(start)) for start in starts]
    rows = [[0] * num_classes]
    while len(rows) < len(sets):
        row = [0] * num_classes
        for index, found in enumerate(_targets((by_class[state] for state in sets[len(rows)]), num_classes)):
            if found is not None:
                key = frozenset(found)
                if key not in unions:
                    unions[key] = number(frozenset().union(*map(closure, key)))
                row[index] = unions[key]
        rows.append(row)
    final = np.array([end in states for states in sets])
    return np.array(rows, np.int32).reshape(len(rows), num_classes), classes, final, begin


def _targets(moves: Iterable[Iterable[tuple[int, int, int]]], num_classes: int) -> list[set[int] | None]:
    """For each class the states to which these moves (first class, class after the last, next state) lead; None: no state."""
    targets: list[set[int] | None] = [None] * num_classes
    for of_state in moves:
        for low, high, target in of_state:
            for index in range(low, high):
                found = targets[index]
                if found is None:
                    targets[index] = {target}
                else:
                    found.add(target)
    return targets


def _trimmed(
    table: NDArray[np.int32],
    classes: NDArray[np.int32],
    final: NDArray[np.bool_],
    begin: Sequence[int],
    present: NDArray[np.bool_],
) -> Dfa:
    """Remove states from which no text can be completed with the bytes that are present."""
    usable = np.unique(classes[present])
    live = final.copy()
    sources, columns = np.nonzero(table[:, usable])
    targets = table[sources, usable[columns]]
    sources = sources[np.argsort(targets, kind="stable")]  # those of state s are sources[edges[s] : edges[s + 1]]
    edges = np.searchsorted(np.sort(targets), np.arange(len(live) + 1))
    todo = np.flatnonzero(live).tolist()
    while todo:
        state = todo.pop()
        before = np.unique(sources[edges[state] : edges[state + 1]])
        before = before[~live[before]]
        live[before] = True
        todo += before.tolist()
    live[0] = False
    if not live[begin[0]]:
        raise Impossible("no text matches")
    numbers = np.zeros(len(live), np.int32)
    numbers[live] = np.arange(1, live.sum() + 1)
    kept = np.concatenate(([0], np.flatnonzero(live)))
    # Classes: 0 for absent bytes, which no text holds.
    renamed = np.zeros(256, np.int32)
    renamed[present] = np.searchsorted(usable, classes[present]) + 1
    following = np.concatenate((np.zeros((len(kept), 1), np.int32), numbers[table[kept][:, usable]]), 1)
    return Dfa(
        following.astype(np.int32), renamed, final[kept] & (np.arange(len(kept)) > 0), tuple(int(numbers[s]) for s in begin)
    )
