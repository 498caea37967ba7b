"""The lazy DFA of a network: an automaton over bytes whose states are computed when a text reaches them, as in RE2.

A DFA state is the set of places that a text may have reached in the network: each a network state, and a stack of the calls and
loops around it. Equal sets are one DFA state, whatever text led there, so that after a while nearly every text moves among known
states. Stacks are linked lists that share their lower parts. Two entries on top of each other for the same repetition at a rule's
end are merged to one, because what may follow is the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from batchspec.automata.lazy_automaton import ANSWER, EITHER, THOUGHT
from batchspec.automata.token_automaton import BEGIN_THOUGHT, DEAD, END_THOUGHT, NUM_SYMBOLS
from batchspec.structured.channels import BYTES, SINGLE_BYTE_CLASSES, before_answer_of
from batchspec.structured.network import Network
from batchspec.structured.regular import TooLarge

MAX_PLACES = 2_000
"""Limit of the places of one state: the ways in which an ambiguous grammar may have read a text so far."""
MAX_STATES = 200_000
"""Limit of the states of one automaton: all rows that follow it share them."""
FINAL = (-1, 0)
Place = tuple[int, int]
"""State of the network, and number of a stack; FINAL: the text may end."""
_CALL = -1


class TooManyStates(Exception):
    """An automaton has MAX_STATES states. The text that needs one more need not be the cause: other texts share these states."""


class LazyDfa:
    """States DEAD, ANSWER, EITHER and THOUGHT have these numbers; the others are numbered as they are found.

    classes  int32 [NUM_SYMBOLS]   class of each symbol, 0 .. C-1
    next     int32 [capacity, C]   next state by class, of the states that are explored
    """

    def __init__(self, network: Network, *, thinks: bool, may_begin: bool, channels: bool = False) -> None:
        """
        thinks     an answer may follow a thought, which may begin with a token if may_begin
        channels   instead, an answer is a message in the final channel of harmony
        """
        self._network, self._channels = network, channels
        edges = np.zeros(257, bool)
        edges[0] = True
        for byte in SINGLE_BYTE_CLASSES if channels else ():
            edges[byte : byte + 2] = True
        for moves in network.moves:
            for low, high, _ in moves:
                edges[low] = edges[high + 1] = True
        of_bytes = np.cumsum(edges[:256]) - 1
        self._num_classes = int(of_bytes[-1]) + 1
        self.classes = np.concatenate((of_bytes, self._num_classes + np.arange(NUM_SYMBOLS - 256))).astype(np.int32)
        of = of_bytes.tolist()
        self._moves = [[(of[low], of[high] + 1, target) for low, high, target in moves] for moves in network.moves]
        self._stacks: list[tuple[int, int, int]] = [(_CALL, _CALL, 0)]
        """Entry 0 is the empty stack; else a state and _CALL, or a loop and a count; and what is below."""
        self._stack_of: dict[tuple[int, int, int], int] = {}
        self._closures: dict[Place, frozenset[Place]] = {}
        self._unions: dict[frozenset[Place], int] = {}
        self._numbers: dict[frozenset[Place], int] = {frozenset(): DEAD}
        self._sets: list[frozenset[Place]] = [frozenset()]
        width = self._num_classes + NUM_SYMBOLS - 256
        self.next = np.zeros((256, width), np.int32)
        self.explored = np.zeros(256, bool)
        answer, after_thought = (self._closure(start, 0) for start in network.starts)
        self._number(answer)
        before_answer = np.zeros((2, width), np.int32)
        if channels:
            before_answer = before_answer_of(self.classes, width, calls=network.of_channel_call).rows
        for number in range(len(before_answer)):  # EITHER, THOUGHT, and with channels those inside of a header
            self.next[self._number(frozenset({(-2 - number, 0)}))] = before_answer[number]
        self.explored[[DEAD, *range(EITHER, self.num_states)]] = True
        if thinks and not channels:
            self._add_thoughts(self._number(after_thought), may_begin=may_begin)

    def _add_thoughts(self, after_thought: int, *, may_begin: bool) -> None:
        self.next[THOUGHT] = THOUGHT
        self.next[THOUGHT, self.classes[END_THOUGHT]] = after_thought
        self.explore([ANSWER])
        self.next[EITHER] = self.next[ANSWER]
        if may_begin:
            self.next[EITHER, self.classes[BEGIN_THOUGHT]] = THOUGHT

    @property
    def num_states(self) -> int:
        return len(self._sets)

    @property
    def is_half_full(self) -> bool:
        """Whether it has half of the states that it may have: none should be computed that no row has reached."""
        return self.num_states > MAX_STATES // 2

    def is_final(self, state: int) -> bool:
        """Whether the text may end."""
        return FINAL in self._sets[ANSWER if state == EITHER and not self._channels else state]

    def explore(self, states: Iterable[int]) -> None:
        """Compute the next states of these states by every class. Raises TooLarge and TooManyStates."""
        for state in states:
            if not self.explored[state]:
                row = self._row(self._sets[state])
                self.next[state, : len(row)] = row
                for symbol, byte in BYTES.items() if self._channels else ():
                    self.next[state, self.classes[symbol]] = row[self.classes[byte]]
                self.explored[state] = True

    def after(self, state: int, symbols: Iterable[int]) -> int:
        """The state after a text from `state`. Raises as `explore`."""
        for symbol in symbols:
            self.explore([state])
            state = int(self.next[state, self.classes[symbol]])
        return state

    def _row(self, places: frozenset[Place]) -> list[int]:
        targets: list[set[Place] | None] = [None] * self._num_classes
        for state, stack in places:
            for low, high, target in self._moves[state] if state >= 0 else ():
                for index in range(low, high):
                    found = targets[index]
                    if found is None:
                        targets[index] = {(target, stack)}
                    else:
                        found.add((target, stack))
        row = [DEAD] * self._num_classes
        for index, found in enumerate(targets):
            if found is not None:
                key = frozenset(found)
                if key not in self._unions:
                    self._unions[key] = self._number(frozenset().union(*(self._closure(*place) for place in key)))
                row[index] = self._unions[key]
        return row

    def _number(self, places: frozenset[Place]) -> int:
        found = self._numbers.get(places)
        if found is None:
            if len(places) > MAX_PLACES:
                raise TooLarge(f"a text may be read in more than {MAX_PLACES:,} ways; make the grammar less ambiguous")
            found = len(self._sets)
            if found >= MAX_STATES:
                raise TooManyStates
            if found == len(self.next):
                self.next, self.explored = (np.concatenate((x, np.zeros_like(x))) for x in (self.next, self.explored))
            self._sets.append(places)
            self._numbers[places] = found  # last: memory may run out in each line before, and then no number is given twice
        return found

    def _push(self, entry: int, count: int, below: int) -> int:
        key = (entry, count, below)
        found = self._stack_of.get(key)
        if found is None:
            found = len(self._stacks)
            self._stacks.append(key)
            self._stack_of[key] = found  # last, as in `_number`
        return found

    def _called(self, after: int, stack: int) -> int:
        """The stack inside a rule that is called with `after` as its return state."""
        frame = self._network.frames[after]
        if frame is None or (frame in self._network.stars and self._stacks[stack][:2] == (frame, _CALL)):
            return stack
        return self._push(frame, _CALL, stack)

    def _closure(self, state: int, stack: int) -> frozenset[Place]:
        """The places that are reached from this one without a byte, and at which a byte or the end may follow."""
        found = self._closures.get((state, stack))
        if found is not None:
            return found
        net, kept = self._network, set[Place]()
        seen, todo = {(state, stack)}, [(state, stack)]
        while todo:
            state_, stack_ = todo.pop()
            if self._moves[state_]:
                kept.add((state_, stack_))
            following = [(target, stack_) for target in net.free[state_]]
            following += [(begin, self._called(after, stack_)) for begin, after in net.calls.get(state_, ())]
            if state_ in net.loop_at:
                following += self._next_turn(net.loop_at[state_], 0, stack_)
            if state_ in net.loop_end:
                index, count, below = self._stacks[stack_]
                following += self._next_turn(index, count, below)
            if state_ in net.ends:
                if not stack_:
                    kept.add(FINAL)
                else:
                    after, _, below = self._stacks[stack_]
                    following.append((after, below))
            todo += [one for one in following if one not in seen]
            seen.update(following)
            if len(seen) > 8 * MAX_PLACES:
                raise TooLarge("a text may be read in too many ways; make the grammar less ambiguous")
        found = self._closures[state, stack] = frozenset(kept)
        return found

    def _next_turn(self, index: int, count: int, stack: int) -> list[Place]:
        """The places after `count` turns of a loop: one more turn, the end of the loop, or both."""
        loop = self._network.loops[index]
        more = [] if loop.most is not None and count >= loop.most else [
            (loop.begin, self._push(index, min(count + 1, loop.least) if loop.most is None else count + 1, stack))
        ]
        done = [(loop.after, stack)] if count >= loop.least and self._network.live[loop.after] else []
        return [place for place in more if self._network.live[place[0]]] + done
