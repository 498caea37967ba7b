"""Regular languages of text: nodes that are put together, and the deterministic automaton over UTF-8 bytes that they become.

Nodes -> NFA (Thompson 1968) -> DFA (subset construction) -> states that can be completed. Ranges of characters become ranges of
bytes; bytes that no part tells apart share a class, so a row of the table is tens of entries, not 256. Counted repetitions are
unrolled: their size is bounded by MAX_NFA_STATES.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_NFA_STATES = 250_000
MAX_STATES = 50_000
"""Of the automaton over bytes: a string of at most 5,000 characters takes 40,000."""
MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


class TooLarge(ValueError):
    """The automaton exceeds a bound; the message says which."""


class Impossible(ValueError):
    """No text matches."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges of code points, both ends included; sorted, without overlap."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Chars:
        """Any ranges: sorted and merged, surrogates left out."""
        kept = [
            part for low, high in ranges for part in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)) if part[0] <= part[1]
        ]
        merged: list[tuple[int, int]] = []
        for low, high in sorted(kept):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return cls(tuple(merged))

    def inverted(self) -> Chars:
        """All other characters."""
        edges = [-1, *(edge for low, high in self.ranges for edge in (low, high)), MAX_CODE_POINT + 1]
        return Chars.of((edges[i] + 1, edges[i + 1] - 1) for i in range(0, len(edges), 2) if edges[i] + 1 < edges[i + 1])

    def both(self, other: Chars) -> Chars:
        """The characters of both."""
        return Chars.of((max(a, c), min(b, d)) for a, b in self.ranges for c, d in other.ranges if max(a, c) <= min(b, d))


@dataclass(frozen=True, slots=True)
class Seq:
    """All parts, one after the other; () is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of the parts; () matches nothing."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part, `least` to `most` times; None: without limit."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Joined:
    """At least one `item`, any number of them, with `between` in between: each is built once, however many come."""

    item: Node
    between: Node


@dataclass(frozen=True, slots=True)
class Members:
    """Items in this order, those that are not required may be missing, with `between` in between those that are there."""

    items: tuple[tuple[Node, bool], ...]
    between: Node


@dataclass(frozen=True, slots=True)
class Ref:
    """What the rule of this name stands for; rules may refer to themselves (`rules.py`)."""

    rule: str


Node = Chars | Seq | Alt | Repeat | Joined | Members | Ref
EMPTY, NOTHING = Seq(()), Alt(())


def text(value: str) -> Node:
    """Exactly this text."""
    return Seq(tuple(Chars(((ord(char), ord(char)),)) for char in value))


def optional(node: Node) -> Node:
    return Repeat(node, 0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """State 0 is dead: no text goes on from it. From every other state a final one can be reached.

    next     int32 [S, C]   next state by class of byte
    classes  int32 [256]    class of each byte
    final    bool [S]       the text may end
    starts   state for each start that was asked for
    """

    next: NDArray[np.int32]
    classes: NDArray[np.int32]
    final: NDArray[np.bool_]
    starts: tuple[int, ...]


class Nfa:
    """States with moves on ranges of bytes and moves on nothing."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[int, int, int]]] = []
        """(lowest byte, highest byte, next state)"""
        self.free: list[list[int]] = []

    def _check(self, more: int) -> None:
        """Whether so many more states are within the bound, before they are built one by one."""
        if len(self.moves) + more > MAX_NFA_STATES:
            raise TooLarge(f"it has more than {MAX_NFA_STATES:,} positions; shorten its repetitions or nest it less deeply")

    def state(self) -> int:
        self._check(1)
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def add(self, node: Node, start: int) -> int:
        """Build a node from `start`; returns the state after it. Nothing else leads back into what was built."""
        match node:
            case Chars(ranges):
                return self._chars(ranges, start)
            case Seq(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Alt(parts):
                end = self.state()
                for part in parts:
                    own = self.state()
                    self.free[start].append(own)
                    self.free[self.add(part, own)].append(end)
                return end
            case Repeat(part, least, most):
                return self._repeat(part, least, most, start)
            case Joined(item, between):
                return self._joined(item, between, start)
            case Members(items, between):
                return self._members(items, between, start)
            case Ref(rule):
                return self._call(rule, start)

    def _call(self, rule: str, start: int) -> int:
        raise AssertionError(f"rule {rule!r} in a finite automaton: it must be inlined before")

    def _chars(self, ranges: Sequence[tuple[int, int]], start: int) -> int:
        end = self.state()
        rest: dict[tuple[tuple[int, int], ...], int] = {(): end}
        for low, high in ranges:
            for sequence in utf8_ranges(low, high):
                for i in range(len(sequence) - 1, 0, -1):
                    if sequence[i:] not in rest:
                        rest[sequence[i:]] = self.state()
                        self.moves[rest[sequence[i:]]].append((*sequence[i], rest[sequence[i + 1 :]]))
                self.moves[start].append((*sequence[0], rest[sequence[1:]]))
        return end

    def _repeat(self, part: Node, least: int, most: int | None, start: int) -> int:
        times, first = (least if most is None else most), len(self.moves)
        for count in range(least):
            start = self.add(part, start)
            if not count:
                self._check((times - 1) * (len(self.moves) - first))
        end = self.state()
        if most is None:
            self.free[start].append(end)
            self.free[self.add(part, end)].append(end)
            return end
        for count in range(least, most):
            if count == 1:
                self._check((times - 1) * (len(self.moves) - first))
            self.free[start].append(end)
            own = self.state()  # a part that loops on its first state must not be left from inside the loop
            self.free[start].append(own)
            start = self.add(part, own)
        self.free[start].append(end)
        return end

    def _joined(self, item: Node, between: Node, start: int) -> int:
        before = self.state()
        self.free[start].append(before)
        after = self.add(item, before)
        self.free[self.add(between, after)].append(before)
        return after

    def _members(self, items: Sequence[tuple[Node, bool]], between: Node, start: int) -> int:
        none_yet, some = start, self.state()
        for item, required in items:
            before, none_after, some_after = self.state(), self.state(), self.state()
            self.free[none_yet].append(before)
            self.free[self.add(between, some)].append(before)
            self.free[self.add(item, before)].append(some_after)
            if not required:
                self.free[none_yet].append(none_after)
                self.free[some].append(some_after)
            none_yet, some = none_after, some_after
        end = self.state()
        self.free[none_yet].append(end)
        self.free[some].append(end)
        return end


def utf8_ranges(low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """The encodings of code points low .. high as sequences of byte ranges (Cox 2007, utf8-ranges of RE2)."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            return utf8_ranges(low, last) + utf8_ranges(last + 1, high)
    if high <= 0x7F:
        return [((low, high),)]
    for bits in (6, 12, 18):
        mask = (1 << bits) - 1
        if low >> bits != high >> bits:
            if low & mask:
                return utf8_ranges(low, low | mask) + utf8_ranges((low | mask) + 1, high)
            if high & mask != mask:
                return utf8_ranges(low, (high & ~mask) - 1) + utf8_ranges(high & ~mask, high)
    return [tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))]


def dfa_of(node: Node, before: Node = EMPTY, present: NDArray[np.bool_] | None = None) -> Dfa:
    """The automaton of `node`; its starts are that of `node` and that of `before` followed by `node`.

    present  bool [256] bytes that a text can hold; None: all of them
    Raises TooLarge, and Impossible where no text matches.
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
        """What is reached for free, as far as it has moves or is the end."""
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
        targets: list[set[int] | None] = [None] * num_classes
        for state in sets[len(rows)]:
            for low, high, target in by_class[state]:
                for index in range(low, high):
                    found = targets[index]
                    if found is None:
                        targets[index] = {target}
                    else:
                        found.add(target)
        row = [0] * num_classes
        for index, found in enumerate(targets):
            if found is not None:
                key = frozenset(found)
                if key not in unions:
                    unions[key] = number(frozenset().union(*map(closure, key)))
                row[index] = unions[key]
        rows.append(row)
    final = np.array([end in states for states in sets])
    return np.array(rows, np.int32).reshape(len(rows), num_classes), classes, final, begin


def _trimmed(
    table: NDArray[np.int32],
    classes: NDArray[np.int32],
    final: NDArray[np.bool_],
    begin: Sequence[int],
    present: NDArray[np.bool_],
) -> Dfa:
    """Without states that cannot be completed with the bytes that are present."""
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
    # Classes: 0 for absent bytes, on which nothing goes on.
    renamed = np.zeros(256, np.int32)
    renamed[present] = np.searchsorted(usable, classes[present]) + 1
    following = np.concatenate((np.zeros((len(kept), 1), np.int32), numbers[table[kept][:, usable]]), 1)
    return Dfa(
        following.astype(np.int32), renamed, final[kept] & (np.arange(len(kept)) > 0), tuple(int(numbers[s]) for s in begin)
    )
