"""Deterministic automata over characters, which can be intersected, subtracted and counted; `Graph` nodes are made of them.

They are needed if a language is not one expression: a pattern with a length, several patterns, all keys except some. A character
is one code point, however it is written in JSON. States from which no text can be completed are removed at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeVar

from batchspec.structured.nfa import Nfa
from batchspec.structured.regular import Chars, Graph, Node, TooLarge

MAX_STATES = 1_500
State = TypeVar("State", bound=Hashable)
Move = tuple[int, int, int]
"""First and last code point, next state."""


@dataclass(frozen=True, slots=True)
class CharDfa:
    """State 0 is the start; there are no states if no text matches.

    moves  by state, sorted and without overlap
    final  bool by state
    """

    moves: tuple[tuple[Move, ...], ...]
    final: tuple[bool, ...]

    @classmethod
    def of(cls, node: Node) -> CharDfa:
        """The texts of a node without references. Raises TooLarge."""
        nfa = _CharNfa()
        start = nfa.state()
        end = nfa.add(node, start)

        @cache
        def closure(states: frozenset[int]) -> frozenset[int]:
            seen = set(states)
            todo = list(seen)
            while todo:
                fresh = set(nfa.free[todo.pop()]) - seen
                seen |= fresh
                todo += fresh
            return frozenset(state for state in seen if nfa.moves[state] or state == end)

        def step(states: frozenset[int]) -> list[tuple[int, int, frozenset[int]]]:
            split = _split([move for state in states for move in nfa.moves[state]])
            return [(low, high, closure(targets)) for low, high, targets in split]

        return _explored(closure(frozenset([start])), step, lambda states: end in states)

    @property
    def is_empty(self) -> bool:
        """No text matches."""
        return not self.final

    def both(self, other: CharDfa) -> CharDfa:
        """The texts of both. Raises TooLarge."""
        if self.is_empty or other.is_empty:
            return NO_TEXT

        def step(pair: tuple[int, int]) -> list[tuple[int, int, tuple[int, int]]]:
            return [
                (max(a, c), min(b, d), (ours, theirs))
                for a, b, ours in self.moves[pair[0]]
                for c, d, theirs in other.moves[pair[1]]
                if max(a, c) <= min(b, d)
            ]

        return _explored((0, 0), step, lambda pair: self.final[pair[0]] and other.final[pair[1]])

    def without(self, other: CharDfa) -> CharDfa:
        """The texts that are not of the other. Raises TooLarge."""
        if self.is_empty or other.is_empty:
            return self

        def step(pair: tuple[int, int | None]) -> list[tuple[int, int, tuple[int, int | None]]]:
            found = list[tuple[int, int, tuple[int, int | None]]]()
            for low, high, ours in self.moves[pair[0]]:
                for c, d, theirs in () if pair[1] is None else other.moves[pair[1]]:
                    if d < low or c > high:
                        continue
                    if low < c:
                        found.append((low, c - 1, (ours, None)))
                    found.append((max(low, c), min(high, d), (ours, theirs)))
                    low = d + 1
                if low <= high:
                    found.append((low, high, (ours, None)))
            return found

        start: tuple[int, int | None] = (0, 0)
        return _explored(start, step, lambda pair: self.final[pair[0]] and (pair[1] is None or not other.final[pair[1]]))

    def of_length(self, least: int, most: int | None) -> CharDfa:
        """The texts of least .. most characters; long ones are left out if MAX_STATES would be exceeded.

        Raises TooLarge if that leaves none.
        """
        if self.is_empty:
            return self
        cap, layer, count = least if most is None else most, {0}, 1
        for length in range(cap):
            layer = {target for state in layer for _, _, target in self.moves[state]}
            count += len(layer)
            if count > MAX_STATES - (len(self.final) if most is None else 0):
                if most is None or length < least:
                    raise TooLarge(f"a text of {least:,} characters and a pattern takes more than {MAX_STATES:,} states")
                most = cap = length
                break

        def step(place: tuple[int, int]) -> list[tuple[int, int, tuple[int, int]]]:
            state, length = place
            if most is not None and length == most:
                return []
            return [(low, high, (target, min(length + 1, cap))) for low, high, target in self.moves[state]]

        return _explored((0, 0), step, lambda place: self.final[place[0]] and place[1] >= least)

    def node(self, of_char: Callable[[Chars], Node]) -> Node:
        """The texts as a node; of_char: how characters are written."""
        edges = list[tuple[tuple[Node, int], ...]]()
        for moves in self.moves:
            by_target = defaultdict[int, list[tuple[int, int]]](list)
            for low, high, target in moves:
                by_target[target].append((low, high))
            edges.append(tuple((of_char(Chars.of(ranges)), target) for target, ranges in by_target.items()))
        return Graph(tuple(edges) or ((),), frozenset(state for state, final in enumerate(self.final) if final))


NO_TEXT = CharDfa((), ())


class _CharNfa(Nfa):
    """Moves are on code points, not bytes."""

    def _chars(self, ranges: Sequence[tuple[int, int]], start: int) -> int:
        end = self.state()
        self.moves[start] += [(low, high, end) for low, high in ranges]
        return end


def _split(moves: Sequence[Move]) -> list[tuple[int, int, frozenset[int]]]:
    """Ranges without overlap, in order, each with all its targets."""
    begins, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for low, high, target in moves:
        begins[low].append(target)
        ends[high + 1].append(target)
    count, found = defaultdict[int, int](int), list[tuple[int, int, frozenset[int]]]()
    edges = sorted({*begins, *ends})
    for edge, following in pairwise(edges):
        for target in begins[edge]:
            count[target] += 1
        for target in ends[edge]:
            count[target] -= 1
            if not count[target]:
                del count[target]
        if count:
            found.append((edge, following - 1, frozenset(count)))
    return found


def _explored(start: State, step: Callable[[State], list[tuple[int, int, State]]], is_final: Callable[[State], bool]) -> CharDfa:
    """The automaton of all states that a text reaches and that can be completed. Raises TooLarge."""
    numbers, states = {start: 0}, [start]
    rows = list[list[Move]]()
    while len(rows) < len(states):
        row = list[Move]()
        for low, high, target in step(states[len(rows)]):
            number = numbers.setdefault(target, len(states))
            if number == len(states):
                if number >= 4 * MAX_STATES:
                    raise TooLarge(f"its patterns together take more than {4 * MAX_STATES:,} states; simplify them")
                states.append(target)
            if row and row[-1][1] + 1 == low and row[-1][2] == number:
                row[-1] = (row[-1][0], high, number)
            else:
                row.append((low, high, number))
        rows.append(row)
    final = [is_final(state) for state in states]
    return _trimmed(rows, final)


def _trimmed(rows: Sequence[Sequence[Move]], final: Sequence[bool]) -> CharDfa:
    before = defaultdict[int, set[int]](set)
    for state, row in enumerate(rows):
        for _, _, target in row:
            before[target].add(state)
    todo = [state for state, ends in enumerate(final) if ends]
    live = set(todo)
    while todo:
        fresh = before[todo.pop()] - live
        live |= fresh
        todo += fresh
    if 0 not in live:
        return NO_TEXT
    numbers = {state: number for number, state in enumerate(sorted(live))}
    moves = tuple(tuple((low, high, numbers[target]) for low, high, target in rows[state] if target in live) for state in numbers)
    return CharDfa(moves, tuple(final[state] for state in numbers))
