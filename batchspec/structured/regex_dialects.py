"""What classes, `.`, `$` and the flag i of a regular expression mean.

Python's `re` itself is asked which characters \\w, \\d and \\s have, and which are equal with the flag i. To write all of them
needs large automata (\\w of Unicode has 300 states, [A-Za-z0-9_] one), and few are meant: they are written in ASCII. What \\W or
[^...] excludes is excluded with all its characters, so that each text that is written matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from batchspec.structured.regular import MAX_CODE_POINT, SURROGATES, Chars

LINE = Chars.of([(ord("\n"), ord("\n"))]).inverted()
ASCII = {
    "d": Chars.of([(0x30, 0x39)]), "w": Chars.of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]),
    "s": Chars.of([(0x09, 0x0D), (0x20, 0x20)]),
}
BREAKS = Chars.of([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
"""Characters that `.` does not match by ECMA-262; by Python it excludes only the first."""
PUNCTUATION = Chars.of([(0x2010, 0x2027), (0x2030, 0x203E), (0x2041, 0x2053), (0x20A0, 0x20BF), (0x3001, 0x3003)])
"""Characters outside of ASCII that are word characters neither by ECMA-262 nor by Python."""
NUM_MAYBE_CASED = 0x20000 - (SURROGATES[1] + 1 - SURROGATES[0])
"""Characters of the first two planes, surrogates left out: no other has a small and a capital letter."""


@dataclass(frozen=True, slots=True)
class Dialect:
    named: Callable[[str], Chars]
    """The characters of \\d \\w \\s \\D \\W \\S, by the letter."""
    dot: Chars
    end: Chars | None
    """A character that may follow `$`."""
    any_case: Callable[[Chars], Chars]
    """The characters with the flag i."""
    inverse: Callable[[], Dialect]
    """The dialect of the characters that [^...] excludes."""


@cache
def unicode_class(letter: str) -> Chars:
    """The characters that \\d, \\w or \\s has by Python's `re`."""
    return Chars.of((ord(run[0][0]), ord(run[0][-1])) for run in re.finditer(rf"\{letter}+", _every()))


@lru_cache(maxsize=1000)
def equal_letters(chars: Chars) -> Chars:
    """The characters that `re` finds equal to one of these with the flag i: K also to U+212A, i to U+0130 and U+0131."""
    return _with(chars, re.findall(_class_of(chars), _cased(), re.IGNORECASE))


@lru_cache(maxsize=1000)
def letter_pairs(chars: Chars) -> Chars:
    """These characters, and the capital and small letters of one another."""
    pairs = [(char, other) for char in re.findall(_class_of(chars), _cased()) for other in (char.lower(), char.upper())]
    return _with(chars, [other for char, other in pairs if len(other) == 1 and char in (other.lower(), other.upper())])


@cache
def python() -> Dialect:
    """A subset of what Python's `re` matches: \\w \\d \\s in ASCII; i without characters such as U+212A."""
    return Dialect(lambda name: ASCII.get(name) or _exactly(name), LINE, None, letter_pairs, exactly_python)


@cache
def exactly_python() -> Dialect:
    return Dialect(_exactly, LINE, None, equal_letters, exactly_python)


@cache
def sure() -> Dialect:
    """A text matches if it does by ECMA-262 and by Python's `re`, which differ in the characters outside of ASCII."""
    words = Chars.of([*ASCII["w"].inverted().both(Chars(((0, 0x7F),))).ranges, *PUNCTUATION.ranges])
    return Dialect(
        lambda name: words if name == "W" else ASCII.get(name) or possible().named(name.lower()).inverted(),
        BREAKS.inverted(), None, letter_pairs, possible,
    )


@cache
def possible() -> Dialect:
    """A text matches if it does by ECMA-262 or by Python's `re`: a text without a match has none by either."""

    def named(name: str) -> Chars:
        found = unicode_class(name) if name in ASCII else ASCII[name.lower()].inverted()
        return Chars.of([*found.ranges, (0xFEFF, 0xFEFF)]) if name == "s" else found

    return Dialect(named, LINE, Chars.of([(0x0A, 0x0A)]), equal_letters, sure)


def _exactly(name: str) -> Chars:
    return unicode_class(name) if name in ASCII else unicode_class(name.lower()).inverted()


@cache
def _every() -> str:
    """All characters."""
    codes = np.arange(MAX_CODE_POINT + 1, dtype="<u4")
    return np.delete(codes, np.s_[SURROGATES[0] : SURROGATES[1] + 1]).tobytes().decode("utf-32-le")


@cache
def _cased() -> str:
    """The characters that the flag i makes equal to others."""
    some = _every()[:NUM_MAYBE_CASED]
    return "".join(char for char, low, up in zip(some, map(str.lower, some), map(str.upper, some), strict=True) if low != up)


def _class_of(chars: Chars) -> str:
    """Written as ranges alone: `re` does not find a single capital letter beyond U+FFFF in a class with the flag i."""
    return "[" + "".join(rf"\U{low:08x}-\U{high:08x}" for low, high in chars.ranges) + "]" if chars.ranges else "(?!)"


def _with(chars: Chars, more: list[str]) -> Chars:
    return Chars.of([*chars.ranges, *((ord(char), ord(char)) for char in more)])
