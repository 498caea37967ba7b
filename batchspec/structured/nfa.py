"""The nondeterministic automaton of a node over UTF-8 bytes (Thompson 1968).

Ranges of characters become ranges of bytes. Counted repetitions are unrolled: their size is bounded by MAX_NFA_STATES.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from batchspec.structured.regular import Alt, Chars, Graph, Joined, Mark, Members, Node, Ref, Repeat, Seq, TooLarge

MAX_NFA_STATES = 250_000


class Nfa:
    """States with moves on ranges of bytes (`moves`) and empty moves (`free`)."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[int, int, int]]] = []
        """(lowest byte, highest byte, next state)"""
        self.free: list[list[int]] = []

    def _check(self, more: int) -> None:
        """Raises TooLarge if so many more states exceed MAX_NFA_STATES: called before they are built."""
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
            case Mark(byte):
                end = self.state()
                self.moves[start].append((byte, byte, end))
                return end
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
            case Graph():
                return self._graph(node, start)

    def _call(self, rule: str, start: int) -> int:
        raise AssertionError(f"rule {rule!r} in a finite automaton: it must be inlined before")

    def _chars(self, ranges: tuple[tuple[int, int], ...], start: int) -> int:
        num_states, moves = _moves_of(ranges)
        self._check(num_states)
        end = len(self.moves)
        self.moves += [[] for _ in range(num_states)]
        self.free += [[] for _ in range(num_states)]
        for state, low, high, target in moves:
            self.moves[start if state is None else end + state].append((low, high, end + target))
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

    def _graph(self, graph: Graph, start: int) -> int:
        own, end = [self.state() for _ in graph.edges], self.state()
        self.free[start].append(own[0])
        for state, edges in zip(own, graph.edges, strict=True):
            for label, target in edges:
                self.free[self.add(label, state)].append(own[target])
        for state in graph.final:
            self.free[own[state]].append(end)
        return end


@lru_cache(maxsize=1000)
def _moves_of(ranges: tuple[tuple[int, int], ...]) -> tuple[int, list[tuple[int | None, int, int, int]]]:
    """An automaton over the UTF-8 bytes of one character. Returns the number of its states and its moves (state, lowest byte,
    highest byte, next state). State None is before the character, state 0 after it. Cached: a schema holds the same ranges
    thousands of times.
    """
    rest: dict[tuple[tuple[int, int], ...], int] = {(): 0}
    moves: list[tuple[int | None, int, int, int]] = []
    for low, high in ranges:
        for sequence in utf8_ranges(low, high):
            for i in range(len(sequence) - 1, 0, -1):
                if sequence[i:] not in rest:
                    rest[sequence[i:]] = len(rest)
                    moves.append((rest[sequence[i:]], *sequence[i], rest[sequence[i + 1 :]]))
            moves.append((None, *sequence[0], rest[sequence[1:]]))
    return len(rest), moves


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
