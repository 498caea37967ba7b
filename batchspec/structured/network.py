"""Rules as a recursive transition network over bytes: an NFA for each rule, with calls between them, and counted loops.

The place that a text has reached is a state, and a stack of what comes after the calls and loops around it (Woods 1970). A
repetition of more than UNROLLED times is a loop with a count on the stack, not a row of copies. States from which no text can end
are removed, so that every text that is begun can be completed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchspec.structured.nfa import Nfa
from batchspec.structured.regular import Alt, Graph, Impossible, Joined, Members, Node, Ref, Repeat, Seq
from batchspec.structured.rules import BadGrammar, Rules

UNROLLED = 32
"""A repetition of at most so many times is built as copies of its part."""
START = ""
"""The rule that a whole text must be."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A part that begins at `begin`, `least` to `most` times (None: without limit), then `after`."""

    least: int
    most: int | None
    begin: int
    after: int


class Network(Nfa):
    """Several NFAs that call each other; `moves` and `free` are those of an NFA.

    calls      by state: (first state of the called rule, state after the call)
    loops      all counted loops
    loop_at    by state: number of the loop that begins there; loop_end: of the loop whose part ends there
    ends       last states of the rules
    stars      states after an unlimited repetition at the end of a rule: its part may come once more, or the rule ends
    frames     by state after a call: the state that the call pushes, which is equivalent to it; None: nothing follows the call
    starts     first states of an answer, and of an answer after a reasoning block
    live       bool [states]  whether a text can end from there
    """

    def __init__(self, rules: Rules, before: Node, present: NDArray[np.bool_]) -> None:
        """before: what may precede an answer after a reasoning block. present: bool [256], the bytes that a text can hold.

        Raises Impossible, TooLarge, and BadGrammar for left recursion by way of other rules.
        """
        super().__init__()
        self.of_channel_call = rules.of_channel_call
        self.calls: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.loops: list[Loop] = []
        self.loop_at: dict[int, int] = {}
        self.loop_end: dict[int, int] = {}
        self.stars: set[int] = set()
        self._unlimited: set[int] = set()
        self._begin: dict[str, int] = {}
        self._end: dict[str, int] = {}
        self._named = {**rules.without_left_recursion().named, START: rules.start}
        self._nullable = _nullable(self._named)
        self._build(START)
        first = self.state()
        self.free[self.add(before, first)].append(self._begin[START])
        while len(self._end) < len(self._begin):
            self._build(next(name for name in self._begin if name not in self._end))
        self.ends = frozenset(self._end.values())
        self.starts = (self._begin[START], first)
        self._refuse_left_recursion()
        self._trim(present)
        self.frames = {after: self._frame(after) for calls in self.calls.values() for _, after in calls}

    def _build(self, name: str) -> None:
        if name not in self._begin:
            self._begin[name] = self.state()
        inner = self.add(self._named[name], self._begin[name])
        if inner in self._unlimited:
            self.stars.add(inner)
        end = self._end[name] = self.state()
        self.free[inner].append(end)

    def _call(self, rule: str, start: int) -> int:
        if rule not in self._begin:
            self._begin[rule] = self.state()
        after = self.state()
        self.calls[start].append((self._begin[rule], after))
        return after

    def _repeat(self, part: Node, least: int, most: int | None, start: int) -> int:
        if max(least, most or 0) <= UNROLLED or _is_nullable(part, self._nullable):
            end = super()._repeat(part, least, most, start)
            if most is None:
                self._unlimited.add(end)
            return end
        at, begin, after = self.state(), self.state(), self.state()
        self.free[start].append(at)
        self.loop_at[at] = len(self.loops)
        end = self.state()
        self.loop_end[end] = len(self.loops)
        self.loops.append(Loop(least, most, begin, after))
        self.free[self.add(part, begin)].append(end)
        return after

    def _refuse_left_recursion(self) -> None:
        """A rule must not begin with itself: the stack would grow without a byte of text."""
        names = {state: name for name, state in self._begin.items()}
        end_of = {self._begin[name]: self._nullable[name] for name in self._begin}
        inner: dict[str, set[str]] = {}
        for name, begin in self._begin.items():
            seen, todo, found = {begin}, [begin], set[str]()
            while todo:
                state = todo.pop()
                following = list(self.free[state])
                for called, after in self.calls.get(state, ()):
                    found.add(names[called])
                    following += [after] if end_of[called] else []
                if state in self.loop_at:
                    loop = self.loops[self.loop_at[state]]
                    following += [loop.begin, loop.after] if not loop.least else [loop.begin]
                todo += [one for one in following if one not in seen]
                seen.update(following)
            inner[name] = found
        for name in inner:
            path = _cycle(name, inner)
            if path:
                raise BadGrammar(
                    f"rule {name!r} begins with itself, by {' -> '.join(map(repr, path))}; "
                    "write it with a repetition, as a: b (x b)* for a: b | c and c: a x b"
                )

    def _trim(self, present: NDArray[np.bool_]) -> None:
        """Remove the moves to states from which no text can end. Raises Impossible."""
        runs = _Runs(present)
        self.moves = [[(*run, to) for low, high, to in moves for run in runs[low, high]] for moves in self.moves]
        waiting: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By state: (state, other) of which the first is live once both this and the other are."""
        for state in range(len(self.moves)):
            for target in {*(to for _, _, to in self.moves[state]), *self.free[state]}:
                waiting[target].append((state, target))
        for state, calls in self.calls.items():
            for called, after in calls:
                waiting[called].append((state, after))
                waiting[after].append((state, called))
        for state, index in self.loop_at.items():
            loop = self.loops[index]
            waiting[loop.after].append((state, loop.begin if loop.least else loop.after))
            waiting[loop.begin].append((state, loop.after))
        live = np.zeros(len(self.moves), bool)
        todo = [*self.ends, *self.loop_end]
        live[todo] = True
        while todo:
            for state, other in waiting[todo.pop()]:
                if live[other] and not live[state]:
                    live[state] = True
                    todo.append(state)
        if not live[self.starts[0]]:
            raise Impossible("no text matches")
        self.moves = [[move for move in moves if live[move[2]]] for moves in self.moves]
        self.free = [[to for to in free if live[to]] for free in self.free]
        for state, calls in self.calls.items():
            self.calls[state] = [call for call in calls if live[list(call)].all()]
        self.live = live

    def _frame(self, after: int) -> int | None:
        state = after
        while True:
            if state in self.stars:
                return state
            if self.moves[state] or self.calls.get(state) or state in self.loop_at or state in self.loop_end:
                return after
            if state in self.ends:
                return None
            if len(self.free[state]) != 1:
                return after
            (state,) = self.free[state]


class _Runs(dict[tuple[int, int], list[tuple[int, int]]]):
    """By range of bytes: the ranges within it that are present. Few are different, however many moves there are."""

    def __init__(self, present: NDArray[np.bool_]) -> None:
        super().__init__()
        self._present = present

    def __missing__(self, key: tuple[int, int]) -> list[tuple[int, int]]:
        low, high = key
        there = np.flatnonzero(self._present[low : high + 1]) + low
        runs = np.split(there, np.flatnonzero(np.diff(there) > 1) + 1)
        found = self[key] = [(int(run[0]), int(run[-1])) for run in runs if len(run)]
        return found


def _nullable(named: dict[str, Node]) -> dict[str, bool]:
    """Which rules may be the empty text."""
    found = dict.fromkeys(named, False)
    changed = True
    while changed:
        changed = False
        for name, node in named.items():
            if not found[name] and _is_nullable(node, found):
                found[name] = changed = True
    return found


def _is_nullable(node: Node, of_rule: dict[str, bool]) -> bool:
    match node:
        case Seq(parts):
            return all(_is_nullable(part, of_rule) for part in parts)
        case Alt(parts):
            return any(_is_nullable(part, of_rule) for part in parts)
        case Repeat(part, least, _):
            return least == 0 or _is_nullable(part, of_rule)
        case Joined(item, _):
            return _is_nullable(item, of_rule)
        case Members(items, _):
            return all(not required or _is_nullable(item, of_rule) for item, required in items)
        case Ref(rule):
            return of_rule[rule]
        case Graph(edges, final):
            reached, todo = {0}, [0]
            while todo:
                for label, to in edges[todo.pop()]:
                    if to not in reached and _is_nullable(label, of_rule):
                        reached.add(to)
                        todo.append(to)
            return bool(reached & final)
    return False


def _cycle(name: str, inner: dict[str, set[str]]) -> list[str]:
    """A way from a rule to itself; empty if there is none."""
    before: dict[str, str] = {}
    todo = [name]
    while todo:
        at = todo.pop()
        for other in inner[at]:
            if other == name:
                path = [at]
                while path[-1] != name:
                    path.append(before[path[-1]])
                return [*path[::-1], name]
            if other not in before:
                before[other] = at
                todo.append(other)
    return []
