"""Regular expressions of model folders, which choose modules by their names: `target_modules` of an adapter, `ignore` of a
quantization_config and the like. All of them are parsed here, because a folder may hold one for which `re` would take for ever.

They have the syntax and the meaning of Python's `re`, whose parser reads them. If `re` is certain to need few steps, it matches
the expression. Otherwise `position_sets.py` does, without backtracking. Lookaround is supported, because published adapters use
it; references to groups and atomic groups need backtracking and are refused.
"""

from __future__ import annotations

import importlib
import math
import re
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.checkpoint.position_sets import Alternatives, Anchor, Chars, Look, Node, Repeated, Sequence, ends
from batchspec.console.text import quoted
from batchspec.errors import OneLine

MAX_CHARS, MAX_DEPTH = 100_000, 100
"""Maximum length of an expression, and number of groups and repetitions inside of one another."""
MAX_STEPS, MAX_NAME = 1_000_000, 256
"""`re` matches an expression that takes it at most so many steps for a name of at most so many characters."""
_parser: Any = importlib.import_module("re._parser")  # it has no public name; tests compare the expressions with `re`
_ANCHORS = {
    "AT_BEGINNING": "^", "AT_BEGINNING_STRING": r"\A", "AT_END": "$", "AT_END_STRING": r"\Z", "AT_BOUNDARY": r"\b",
    "AT_NON_BOUNDARY": r"\B",
}
_CLASSES = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}
_REFUSED = {
    "GROUPREF": "a reference to a group", "GROUPREF_EXISTS": "a condition on a group", "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}
_LAST = 0x10FFFF
_ALONE = re.compile(r"\(\?P|\(\?[aiLmsux]+\)")
"""Names of groups, and flags of a whole expression: expressions with them cannot be joined."""


class BadPattern(OneLine, ValueError):
    """An expression that is invalid or not supported; the message says why, after the expression."""


def checked_pattern(config: ConfigReader, key: str, pattern: str, *, given: str | None = None) -> str:
    """An expression of this key of a model folder. given: the part of it that the folder holds; None: all.

    Raises CheckpointError, in one line, if it is invalid or not supported.
    """
    try:
        parse_pattern(pattern)
    except BadPattern as error:
        what = quoted(pattern if given is None else given)
        raise config.refusal(f"{config.shown(key)}: {what} {error}; correct it") from None
    return pattern


@lru_cache(4096)
def parse_pattern(pattern: str) -> NamePattern:
    """An expression, ready to match names. Raises BadPattern."""
    if len(pattern) > MAX_CHARS:
        raise BadPattern(f"has {len(pattern):,} characters, more than the maximum of {MAX_CHARS:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of `[[`, which may mean another class in a later Python
            parsed = _parser.parse(pattern)
            node = _sequence(parsed, parsed.state.flags, 0)
            return NamePattern(node, re.compile(pattern) if _cost(node)[1] <= MAX_STEPS else None)
    except BadPattern:
        raise
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise BadPattern(f"is not a regular expression ({error})") from None


def joined(patterns: Collection[str]) -> tuple[NamePattern, ...]:
    """The same expressions, with those for `re` as one where that is possible. Raises BadPattern."""
    found = {pattern: parse_pattern(pattern) for pattern in patterns}
    texts = [text for text, own in found.items() if own.quick is not None and not _ALONE.search(text)]
    alone = [own for text, own in found.items() if text not in texts]
    if not texts:
        return tuple(alone)
    nodes = tuple(found[text].node for text in texts)
    return NamePattern(Alternatives(nodes), re.compile("|".join(f"(?:{text})" for text in texts))), *alone


@dataclass(frozen=True, slots=True, eq=False)
class NamePattern:
    """An expression, or several of which one must match."""

    node: Node
    quick: re.Pattern[str] | None
    """The same for `re`, if it takes few steps for each name of at most MAX_NAME characters."""

    def begins(self, name: str) -> bool:
        """Whether the name begins with a match, as with `re.match`."""
        if self.quick is not None and len(name) <= MAX_NAME:
            return self.quick.match(name) is not None
        return ends(self.node, name) != 0

    def is_whole(self, name: str) -> bool:
        """Whether the whole name is a match, as with `re.fullmatch`."""
        if self.quick is not None and len(name) <= MAX_NAME:
            return self.quick.fullmatch(name) is not None
        return bool(ends(self.node, name) >> len(name))


def _sequence(parsed: Any, flags: int, depth: int) -> Node:
    """What the parser of `re` found, as nodes. flags: of `re`. Raises BadPattern for what is not supported."""
    if depth > MAX_DEPTH:
        raise BadPattern(f"is nested more than {MAX_DEPTH} deep, which is not supported")
    nodes = tuple(_node(str(kind), value, flags, depth + 1) for kind, value in parsed)
    return nodes[0] if len(nodes) == 1 else Sequence(nodes)


def _node(kind: str, value: Any, flags: int, depth: int) -> Node:
    if kind in _REFUSED:
        raise BadPattern(f"holds {_REFUSED[kind]}, which is not supported")
    match kind:
        case "LITERAL" if not flags & re.IGNORECASE:
            return chr(value)
        case "LITERAL" | "NOT_LITERAL" | "RANGE" | "CATEGORY":
            return _chars([(kind.removeprefix("NOT_"), value)], flags, inverted=kind == "NOT_LITERAL")
        case "IN":
            inverted = str(value[0][0]) == "NEGATE"
            return _chars(value[inverted:], flags, inverted=inverted)
        case "ANY":
            return Chars(((0, _LAST),)) if flags & re.DOTALL else Chars(((10, 10),), inverted=True)
        case "AT":
            return Anchor(re.compile(_ANCHORS[str(value)], flags & (re.MULTILINE | re.ASCII)))
        case "BRANCH":
            return Alternatives(tuple(_sequence(branch, flags, depth) for branch in value[1]))
        case "SUBPATTERN":
            _, added, removed, parsed = value
            kept = flags & ~re.UNICODE if added & re.ASCII else flags & ~re.ASCII if added & re.UNICODE else flags
            return _sequence(parsed, (kept | added) & ~removed, depth)
        case "MAX_REPEAT" | "MIN_REPEAT":  # the texts are the same, whether the longest repetition comes first or last
            least, most, parsed = value
            return Repeated(_sequence(parsed, flags, depth), least, None if most == _parser.MAXREPEAT else most)
        case "ASSERT" | "ASSERT_NOT":
            direction, parsed = value
            return Look(_sequence(parsed, flags, depth), direction > 0, kind == "ASSERT")
    assert kind == "FAILURE", kind  # `(?!)`
    return Alternatives(())


def _chars(items: Iterable[tuple[Any, Any]], flags: int, *, inverted: bool) -> Chars:
    ranges, classes, any_case = list[tuple[int, int]](), list[re.Pattern[str]](), bool(flags & re.IGNORECASE)
    for kind, value in items:
        if str(kind) == "CATEGORY":
            classes.append(re.compile(_CLASSES[str(value).removeprefix("CATEGORY_")], flags & re.ASCII))
        else:
            ranges.append(value if str(kind) == "RANGE" else (value, value))
    if any_case and any(high > 127 for _, high in ranges):  # `re` finds more letters equal than have a small and a capital form
        raise BadPattern("holds a character outside of ASCII with the flag i, which is not supported")
    return Chars(tuple(ranges), tuple(classes), inverted, any_case)


def _cost(node: Node) -> tuple[float, float]:
    """Bounds of what backtracking does from one position: the ways in which the node matches, and the steps to try them all."""
    match node:
        case Sequence():
            ways, steps = 1.0, 1.0
            for item in node.items:
                own_ways, own_steps = _cost(item)
                ways, steps = ways * own_ways, steps + ways * own_steps
            return ways, steps
        case Alternatives():
            costs = [_cost(item) for item in node.items]
            return sum(ways for ways, _ in costs), 1 + sum(steps for _, steps in costs)
        case Repeated():
            ways, steps = _cost(node.item)
            most = MAX_NAME if node.most is None else min(node.most, MAX_NAME)
            if ways > 1 and most > 1:
                return math.inf, math.inf
            return ways * most + 1, steps * most + 1
        case Look():
            return 1.0, 1 + _cost(node.item)[1]
    return 1.0, 1.0
