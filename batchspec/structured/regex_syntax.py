"""The syntax of regular expressions: the subset of Python's `re` that `regex.py` builds, parsed into a small tree.

Only valid expressions come here: `re.compile` has refused the others. What is valid and not supported raises `NotSupported`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from batchspec.structured.regular import MAX_CODE_POINT, SURROGATES, Chars

ANY = Chars.of([(0, MAX_CODE_POINT)])
LINE = Chars.of([(ord("\n"), ord("\n"))]).inverted()
DIGIT = Chars.of([(0x30, 0x39)])
WORD = Chars.of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACE = Chars.of([(0x09, 0x0D), (0x20, 0x20)])
CLASSES = {
    "d": DIGIT, "w": WORD, "s": SPACE, "D": DIGIT.inverted(), "W": WORD.inverted(), "S": SPACE.inverted()
}  # fmt: skip
BREAKS = Chars.of([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
"""Characters that `.` does not match by ECMA-262; by Python it excludes only the first."""
PUNCTUATION = Chars.of([(0x2010, 0x2027), (0x2030, 0x203E), (0x2041, 0x2053), (0x20A0, 0x20BF), (0x3001, 0x3003)])
"""Characters outside of ASCII that are word characters in neither dialect."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The meaning of classes, `.` and `$`. `inverse` makes the dialect for the characters that [^...] excludes."""

    classes: Mapping[str, Chars]
    dot: Chars
    end: Chars | None
    """A character that may follow `$`."""
    inverse: Callable[[], Dialect] | None = None


ASCII = Dialect(CLASSES, LINE, None)


@cache
def sure() -> Dialect:
    """A text matches if it does by ECMA-262 and by Python's `re`, which differ in the characters outside of ASCII."""
    possible_ = possible()
    classes = dict(CLASSES) | {name.upper(): possible_.classes[name].inverted() for name in "ds"}
    classes["W"] = Chars.of([*WORD.inverted().both(Chars(((0, 0x7F),))).ranges, *PUNCTUATION.ranges])
    return Dialect(classes, BREAKS.inverted(), None, possible)


@cache
def possible() -> Dialect:
    """A text matches if it does by ECMA-262 or by Python's `re`: a text without a match has none by either."""
    every = "".join(map(chr, (*range(SURROGATES[0]), *range(SURROGATES[1] + 1, MAX_CODE_POINT + 1))))
    found = {name: Chars.of((ord(run[0][0]), ord(run[0][-1])) for run in re.finditer(rf"\{name}+", every)) for name in "dws"}
    found["s"] = Chars.of([*found["s"].ranges, (0xFEFF, 0xFEFF)])
    classes = found | {name.upper(): CLASSES[name].inverted() for name in "dws"}
    return Dialect(classes, LINE, Chars.of([(0x0A, 0x0A)]), sure)


CONTROLS = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
COUNTS = re.compile(r"\{(\d*)(?:(,)(\d*))?\}", re.ASCII)
NAMED = re.compile(r"\?P<\w+>")
REFUSED_GROUPS = {
    "?=": "lookahead", "?!": "lookahead", "?<=": "lookbehind", "?<!": "lookbehind", "?P=": "a group reference",
    "?(": "a condition on a group", "?>": "an atomic group",
}  # fmt: skip


class NotSupported(ValueError):
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


def parsed(pattern: str, dialect: Dialect = ASCII) -> Group:
    """The tree of a valid expression. Raises NotSupported."""
    parser = _Parser(pattern, dialect)
    found = parser.group()
    assert parser.place == len(pattern), f"{pattern!r} is valid, and was read to {parser.place} alone"
    return found


class _Parser:
    def __init__(self, text: str, dialect: Dialect) -> None:
        self._text, self.place, self._any_case, self._dialect = text, 0, False, dialect

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
                return self._dialect.dot
            case "^" | "$":
                return At(char == "^")
            case "[":
                return self._class()
            case "(":
                return self._parenthesis()
            case "\\":
                return self._escape()
        return self._cased(Chars.of([(ord(char), ord(char))]))

    def _parenthesis(self) -> Group | None:
        """None for a comment."""
        if self._skip("?#"):
            self.place = self._text.index(")", self.place) + 1
            return None
        for begin, what in REFUSED_GROUPS.items():
            if self._skip(begin):
                raise NotSupported(what)
        if (named := NAMED.match(self._text, self.place)) is not None:
            self.place = named.end()
        any_case = self._any_case
        if named is None and self._skip("?i:"):
            self._any_case = True
        elif named is None and not self._skip("?:") and self._skip("?"):
            raise NotSupported("a group with flags other than i")
        found = self.group()
        self._skip(")")
        self._any_case = any_case
        return found

    def _cased(self, chars: Chars) -> Chars:
        """The characters; in a group with the flag i with small and capital letters of ASCII alike."""
        if not self._any_case:
            return chars
        cases = ((0x61, -32), (0x41, 32))
        others = [(low + by, high + by) for first, by in cases for low, high in chars.both(Chars(((first, first + 25),))).ranges]
        return Chars.of([*chars.ranges, *others])

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
        return self._cased(Chars.of(self._escaped(char).ranges))

    def _escaped(self, char: str) -> Chars:
        """After a backslash, in a class or outside of one: a class, or one character, which may be half of a surrogate pair."""
        if char in CLASSES:
            return self._dialect.classes[char]
        if char in CONTROLS:
            return _one(CONTROLS[char])
        if char in HEX_DIGITS:
            self.place += HEX_DIGITS[char]
            return _one(int(self._text[self.place - HEX_DIGITS[char] : self.place], 16))
        if char == "N":
            name = self._text[self.place + 1 : self._text.index("}", self.place)]
            self.place += len(name) + 2
            return _one(ord(unicodedata.lookup(name)))
        if char in "01234567":
            digits = re.match(r"[0-7]{1,3}", self._text[self.place - 1 :])
            assert digits is not None
            self.place += len(digits[0]) - 1
            return _one(int(digits[0], 8))
        return _one(ord(char))

    def _class(self) -> Chars:
        inverted, ranges, first, dialect = self._skip("^"), list[tuple[int, int]](), True, self._dialect
        if inverted and dialect.inverse is not None:
            self._dialect = dialect.inverse()
        while first or self._text[self.place] != "]":
            first = False
            low = self._in_class()
            if self._text[self.place] == "-" and self._text[self.place + 1] != "]":
                self.place += 1
                ranges.append((low.ranges[0][0], self._in_class().ranges[0][0]))
            else:
                ranges += low.ranges
        self.place += 1
        self._dialect = dialect
        found = self._cased(Chars.of(ranges))
        return found.inverted() if inverted else found

    def _in_class(self) -> Chars:
        char = self._next()
        if char != "\\":
            return _one(ord(char))
        char = self._next()
        return _one(8) if char == "b" else self._escaped(char)


def _one(code: int) -> Chars:
    return Chars(((code, code),))
