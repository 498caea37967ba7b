"""Regular expressions in the syntax of Python's `re`, as nodes of `regular.py`. The whole text must match.

Built: literals, classes, `.`, groups, alternatives, repetitions, and `^` and `$` at the ends. Classes such as \\d, \\w and \\s
are those of ASCII. Refused: lookaround, backreferences, word boundaries, flags such as (?i). Lazy repetitions match the same
texts as greedy ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from batchspec.structured.regular import EMPTY, MAX_CODE_POINT, Alt, Chars, Node, Repeat, Seq

_parser: Any = re._parser  # type: ignore[attr-defined]
ANY = Chars.of([(0, MAX_CODE_POINT)])
LINE = Chars.of([(ord("\n"), ord("\n"))]).inverted()
CATEGORIES = {
    "DIGIT": Chars.of([(0x30, 0x39)]),
    "WORD": Chars.of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]),
    "SPACE": Chars.of([(0x09, 0x0D), (0x20, 0x20)]),
}
MAX_REPEATS = 100_000


class BadRegex(ValueError):
    """The expression is not valid, or not built; the message says what."""


def regex_node(pattern: str, of_char: Callable[[Chars], Node] = lambda chars: chars, *, anywhere: bool = False) -> Node:
    """The texts that match an expression as a whole, or that hold a match if `anywhere`.

    of_char  how a character of the text is written: as it is, or escaped as in JSON
    Raises BadRegex.
    """
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadRegex(f"{pattern!r} is no regular expression ({error})") from None
    if parsed.state.flags & ~re.UNICODE:
        raise BadRegex(f"{pattern!r} sets flags, which are not built; spell them out, as [aA] for (?i)a")
    items = list(parsed)
    begins = bool(items) and _is_at(items[0], "AT_BEGINNING", "AT_BEGINNING_STRING")
    items = items[begins:]
    ends = bool(items) and _is_at(items[-1], "AT_END", "AT_END_STRING")
    items = items[: len(items) - ends]
    node = _Reader(pattern, of_char).sequence(items)
    if not anywhere:
        return node
    more = Repeat(of_char(ANY), 0, None)
    return Seq((EMPTY if begins else more, node, EMPTY if ends else more))


def _is_at(item: Any, *kinds: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in kinds


class _Reader:
    def __init__(self, pattern: str, of_char: Callable[[Chars], Node]) -> None:
        self._pattern, self._char = pattern, of_char

    def sequence(self, items: Any) -> Node:
        return Seq(tuple(self._item(str(kind), value) for kind, value in items))

    def _item(self, kind: str, value: Any) -> Node:
        match kind:
            case "LITERAL" | "NOT_LITERAL":
                chars = Chars.of([(value, value)])
                return self._char(chars if kind == "LITERAL" else chars.inverted())
            case "ANY":
                return self._char(LINE)
            case "IN":
                return self._char(self._class(value))
            case "BRANCH":
                return Alt(tuple(self.sequence(branch) for branch in value[1]))
            case "SUBPATTERN":
                _, added, removed, inner = value
                if added or removed:
                    raise self._refused("a group with flags")
                return self.sequence(inner)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                limit = None if most is _parser.MAXREPEAT else int(most)
                if max(int(least), limit or 0) > MAX_REPEATS:
                    raise self._refused(f"a repetition of more than {MAX_REPEATS:,}")
                return Repeat(self.sequence(inner), int(least), limit)
        known = {"AT": "^, $ or \\b inside", "ASSERT": "lookahead or lookbehind", "ASSERT_NOT": "lookahead or lookbehind"}
        raise self._refused(known.get(kind, kind.lower().replace("_", " ")))

    def _class(self, items: Any) -> Chars:
        ranges: list[tuple[int, int]] = []
        inverted = False
        for kind, value in items:
            match str(kind):
                case "NEGATE":
                    inverted = True
                case "LITERAL":
                    ranges.append((value, value))
                case "RANGE":
                    ranges.append(tuple(value))
                case "CATEGORY":
                    name = str(value).removeprefix("CATEGORY_")
                    chars = CATEGORIES[name.removeprefix("NOT_")]
                    ranges += (chars.inverted() if name.startswith("NOT_") else chars).ranges
                case other:
                    raise self._refused(other.lower())
        found = Chars.of(ranges)
        return found.inverted() if inverted else found

    def _refused(self, what: str) -> BadRegex:
        return BadRegex(f"{self._pattern!r} holds {what}, which is not built; write it another way")
