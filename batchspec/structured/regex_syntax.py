"""The syntax of regular expressions: the subset of Python's `re` that `regex.py` builds, parsed into a small tree.

Only valid expressions come here: `re.compile` has refused the others. What is valid and not supported raises `NotSupported`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from batchspec.errors import OneLine
from batchspec.structured.regex_dialects import Dialect
from batchspec.structured.regular import ANY, Chars

CONTROLS = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
COUNTS = re.compile(r"\{(\d*)(?:(,)(\d*))?\}", re.ASCII)
NAMED = re.compile(r"\?P<[^>]+>")
FLAGS = re.compile(r"\?([a-zA-Z]*)-?([a-z]*)([:)])")
REFUSED_GROUPS = {
    "?=": "lookahead", "?!": "lookahead", "?<=": "lookbehind", "?<!": "lookbehind", "?P=": "a group reference",
    "?(": "a condition on a group", "?>": "an atomic group",
}


class NotSupported(OneLine, ValueError):
    """The expression holds something unsupported; the message says what."""


@dataclass(frozen=True, slots=True)
class At:
    """`^` (begin) or `$`."""

    begin: bool


@dataclass(frozen=True, slots=True)
class Group:
    """One of several sequences."""

    branches: tuple[tuple[Item, ...], ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    item: Item
    least: int
    most: int | None


Item = Chars | At | Group | Repeated


def parsed(pattern: str, dialect: Dialect) -> Group:
    """The tree of a valid expression. Raises NotSupported."""
    parser = _Parser(pattern, dialect)
    found = parser.group()
    assert parser.place == len(pattern), f"{pattern!r} is valid, and was read to {parser.place} alone"
    return found


class _Parser:
    def __init__(self, text: str, dialect: Dialect) -> None:
        self._text, self.place, self._dialect = text, 0, dialect
        self._flags: frozenset[str] = frozenset()
        """i: any case; s: `.` matches line breaks."""

    def group(self) -> Group:
        """Branches up to the end, or to a parenthesis."""
        branches: list[tuple[Item, ...]] = []
        items: list[Item] = []
        while self.place < len(self._text) and self._text[self.place] != ")":
            if self._skip("|"):
                branches.append(tuple(items))
                items = []
                continue
            item = self._item()
            if item is None and items:  # what follows a comment repeats what comes before it
                item = items.pop()
            if item is not None:
                items.append(self._repeated(item))
        return Group((*branches, tuple(items)))

    def _skip(self, text: str) -> bool:
        found = self._text.startswith(text, self.place)
        self.place += len(text) * found
        return found

    def _next(self) -> str:
        self.place += 1
        return self._text[self.place - 1]

    def _item(self) -> Item | None:
        match char := self._next():
            case ".":
                return ANY if "s" in self._flags else self._dialect.dot
            case "^" | "$":
                return At(char == "^")
            case "[":
                return self._class()
            case "(":
                return self._parenthesis()
            case "\\":
                return self._escape()
        return self._range(ord(char), ord(char))

    def _parenthesis(self) -> Group | None:
        """None for a comment, and for flags of the whole expression, with which it begins."""
        if self._skip("?#"):
            self.place = self._text.index(")", self.place) + 1
            return None
        for begin, what in REFUSED_GROUPS.items():
            if self._skip(begin):
                raise NotSupported(what)
        outside = self._flags
        if (named := NAMED.match(self._text, self.place)) is not None:
            self.place = named.end()
        elif (flags := FLAGS.match(self._text, self.place)) is not None:
            self.place = flags.end()
            on, off, end = flags.groups()
            for letter in sorted(set(on + off) - set("isu")):
                raise NotSupported(f"the flag {letter}")
            self._flags = (outside | set(on)) - set(off)
            if end == ")":
                return None
        found = self.group()
        self._skip(")")
        self._flags = outside
        return found

    def _range(self, low: int, high: int) -> Chars:
        """The characters from `low` to `high`, and those that are equal to them in a group with the flag i."""
        chars = Chars.of([(low, high)])
        if "i" not in self._flags:
            return chars
        if any(code > 0xFFFF and chr(code).lower() != chr(code) for code in (low, high)):
            raise NotSupported("a capital letter beyond U+FFFF with the flag i")  # `re` itself does not find each of them
        return self._dialect.any_case(chars)

    def _repeated(self, item: Item) -> Item:
        """The item with the repetitions that follow it; `{` begins none unless a count follows."""
        while True:
            counts = COUNTS.match(self._text, self.place)
            if counts is not None and counts[0] != "{}":
                self.place = counts.end()
                least, comma, most = counts.groups()
                limits = int(least or 0), int(most) if most else None if comma else int(least)
            elif self._skip("*"):
                limits = 0, None
            elif self._skip("+"):
                limits = 1, None
            elif self._skip("?"):
                limits = 0, 1
            else:
                return item
            if self._skip("+"):
                raise NotSupported("a possessive repetition")
            self._skip("?")  # the shortest repetition first: the texts are the same
            item = Repeated(item, *limits)

    def _escape(self) -> Item:
        char = self._next()
        if char in "AZ":
            return At(char == "A")
        if char in "bB":
            raise NotSupported("^, $ or \\b inside")
        if char in "123456789" and not re.match(r"[0-3][0-7]{2}", self._text[self.place - 1 :]):
            raise NotSupported("a group reference")
        code = self._escaped(char)
        return self._dialect.named(code) if isinstance(code, str) else self._range(code, code)

    def _escaped(self, char: str) -> int | str:
        """What follows a backslash anywhere: one of dwsDWS, or a character, which may be half of a surrogate pair."""
        if char in "dwsDWS":
            return char
        if char in CONTROLS:
            return CONTROLS[char]
        if char in HEX_DIGITS:
            self.place += HEX_DIGITS[char]
            return int(self._text[self.place - HEX_DIGITS[char] : self.place], 16)
        if char == "N":
            name = self._text[self.place + 1 : self._text.index("}", self.place)]
            self.place += len(name) + 2
            return ord(unicodedata.lookup(name))
        if char in "01234567":
            digits = re.match(r"[0-7]{1,3}", self._text[self.place - 1 :])
            assert digits is not None
            self.place += len(digits[0]) - 1
            return int(digits[0], 8)
        return ord(char)

    def _class(self) -> Chars:
        inverted, dialect = self._skip("^"), self._dialect
        if inverted:
            self._dialect = dialect.inverse()
        ranges, named, first = list[tuple[int, int]](), set[str](), True
        while first or self._text[self.place] != "]":
            first = False
            low = self._in_class()
            if isinstance(low, str):
                named.add(low)
                ranges += self._dialect.named(low).ranges
                continue
            high: int | str = low
            if self._text[self.place] == "-" and self._text[self.place + 1] != "]":
                self.place += 1
                high = self._in_class()
            assert isinstance(high, int)
            ranges += self._range(low, high).ranges
        self.place += 1
        self._dialect = dialect
        found = ANY if any(name.swapcase() in named for name in named) else Chars.of(ranges)
        return found.inverted() if inverted else found

    def _in_class(self) -> int | str:
        """What comes next between brackets: one of dwsDWS after a backslash, or a character."""
        char = self._next()
        if char != "\\":
            return ord(char)
        char = self._next()
        return 8 if char == "b" else self._escaped(char)
