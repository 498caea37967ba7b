"""Matches regular expressions without backtracking: time grows with the length of the expression, and at most with the third
power of the text's.

A set of positions in a text is an int with a bit for each. Each node of an expression maps a set of positions where it may begin
to the set of those where it may end; for lookahead it maps ends to begins.
Source: Cameron et al. 2014, Bitwise Data Parallelism in Regular Expression Matching (sets of positions; the sum in `_repeated`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    """One character of these ranges and classes, or of none of them."""

    ranges: tuple[tuple[int, int], ...]
    classes: tuple[re.Pattern[str], ...] = ()
    inverted: bool = False
    any_case: bool = False
    known: dict[str, bool] = field(default_factory=dict)
    """Which characters it has, of those that were asked for."""

    def has(self, char: str) -> bool:
        if char not in self.known:
            forms = {char, *(form for form in (char.lower(), char.upper()) if self.any_case and len(form) == 1)}
            inside = any(low <= ord(form) <= high for form in forms for low, high in self.ranges)
            found = inside or any(one.match(form) for form in forms for one in self.classes)
            self.known[char] = found != self.inverted
        return self.known[char]


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """What matches between two characters."""

    wanted: re.Pattern[str]


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Lookahead, or lookbehind. wanted: whether the item must match there, or must not."""

    item: Node
    ahead: bool
    wanted: bool


Node = str | Chars | Anchor | Sequence | Alternatives | Repeated | Look
"""A str is one character."""


def ends(node: Node, text: str) -> int:
    """The set of positions where a match that begins at the text's begin may end."""
    return _Run(_Text.of(text), ahead=True).through(node, 1)


class _Text:
    """A text, and sets of its positions: bit i is before character i."""

    def __init__(self, text: str) -> None:
        self.text, self.all = text, (2 << len(text)) - 1
        self.of_char: dict[str, int] = {}
        for place, char in enumerate(text):
            self.of_char[char] = self.of_char.get(char, 0) | 1 << place

    @staticmethod
    @lru_cache(16)
    def of(text: str) -> _Text:
        return _Text(text)

    def before(self, chars: str | Chars) -> int:
        """The positions before these characters."""
        if isinstance(chars, str):
            return self.of_char.get(chars, 0)
        return sum(places for char, places in self.of_char.items() if chars.has(char))


class _Run:
    """Matches nodes in one text. ahead: from the positions where they begin to those where they end, or the reverse."""

    def __init__(self, text: _Text, *, ahead: bool, marks: dict[Node, int] | None = None) -> None:
        """marks: positions where lookaround and anchors match, as far as they are known; they grow."""
        self._text, self._ahead, self._marks = text, ahead, {} if marks is None else marks
        self._steps: dict[tuple[Node, int], int] = {}
        """Node and one position -> the positions to which the node leads from there."""

    def through(self, node: Node, places: int) -> int:
        """The positions to which the node leads from any of these."""
        if not places:
            return 0
        match node:
            case str() | Chars():
                before = self._text.before(node)
                return (places & before) << 1 if self._ahead else places >> 1 & before
            case Anchor() | Look():
                if node not in self._marks:
                    self._marks[node] = self._marked(node)
                return places & self._marks[node]
            case Sequence():
                for item in node.items if self._ahead else reversed(node.items):
                    places = self.through(item, places)
                return places
            case Alternatives():
                found = 0
                for item in node.items:
                    found |= self.through(item, places)
                return found
            case Repeated():
                return self._repeated(node, places)

    def _marked(self, node: Anchor | Look) -> int:
        """The positions where it matches."""
        if isinstance(node, Anchor):
            return sum(1 << found.start() for found in node.wanted.finditer(self._text.text))
        matches = _Run(self._text, ahead=not node.ahead, marks=self._marks).through(node.item, self._text.all)
        return matches if node.wanted else ~matches

    def _repeated(self, node: Repeated, places: int) -> int:
        item, least = node.item, node.least
        while least and (after := self._step(item, places)) != places:
            places, least = after, least - 1
        if node.most is None and self._ahead and isinstance(item, str | Chars):  # a carry runs through a row of ones
            before = self._text.before(item)
            return ((places & before) + before ^ before) | places
        found, new, more = places, places, node.most is None or node.most - node.least
        while new and more:
            new = self._step(item, new) & ~found
            found |= new
            more = node.most is None or more - 1
        return found

    def _step(self, item: Node, places: int) -> int:
        """As `through`. The result for a nested item is kept by position, so that repetitions inside repetitions match it once
        for each position."""
        if isinstance(item, str | Chars):
            return self.through(item, places)
        found = 0
        for place in _bits(places):
            if (item, place) not in self._steps:
                self._steps[item, place] = self.through(item, place)
            found |= self._steps[item, place]
        return found


def _bits(places: int) -> Iterator[int]:
    while places:
        yield places & -places
        places &= places - 1
