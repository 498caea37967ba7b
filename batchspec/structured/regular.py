"""Regular languages of text, put together from nodes; `nfa.py` and `dfa.py` make automata over UTF-8 bytes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchspec.errors import OneLine

MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


class TooLarge(OneLine, ValueError):
    """The automaton exceeds a bound; the message says which."""


class Impossible(OneLine, ValueError):
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


ANY = Chars.of([(0, MAX_CODE_POINT)])


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
    """At least one `item`, any number of them, with `between` in between: each is built only once."""

    item: Node
    between: Node


@dataclass(frozen=True, slots=True)
class Members:
    """Items in this order, those that are not required may be missing, with `between` in between those that are there."""

    items: tuple[tuple[Node, bool], ...]
    between: Node


@dataclass(frozen=True, slots=True)
class Ref:
    """The texts of the rule with this name; rules may refer to themselves (`rules.py`)."""

    rule: str


@dataclass(frozen=True, slots=True)
class Graph:
    """The labels on a path from state 0 to a final state, one after the other.

    edges  by state: (label, next state)
    """

    edges: tuple[tuple[tuple[Node, int], ...], ...]
    final: frozenset[int]


@dataclass(frozen=True, slots=True)
class LeftOut(Alt):
    """No text; it stands for texts that would be right and are not written. said: which, and what to do."""

    said: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A token that marks tool calls, as the byte that stands for it (`token_automaton.MARKS`)."""

    byte: int


Node = Chars | Mark | Seq | Alt | Repeat | Joined | Members | Ref | Graph
EMPTY, NOTHING = Seq(()), Alt(())


def text(value: str) -> Node:
    """Exactly this text."""
    return Seq(tuple(Chars(((ord(char), ord(char)),)) for char in value))


def optional(node: Node) -> Node:
    return Repeat(node, 0, 1)
