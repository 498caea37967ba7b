"""How JSON values are written: strings and their escapes, numbers within bounds, literals, arrays and objects of anything."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from batchspec.structured.regular import EMPTY, NOTHING, Alt, Chars, Joined, Members, Node, Repeat, Seq, optional, text

MAX_DIGITS = 15
"""Maximum number of digits of a whole number and of a fraction: 15 decimal digits are exact in a double."""
MAX_DEPTH = 3
"""Maximum nesting of arrays and objects in a value without a type."""
SPACE = optional(text(" "))
COLON, COMMA = Seq((text(":"), SPACE)), Seq((text(","), SPACE))
DIGIT = Chars(((0x30, 0x39),))
PLAIN = Chars.of([(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))]).inverted()
SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_HEX = Chars.of([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)])
_NOT_D = Chars.of([(0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)])
_D, _LOW = Chars.of([(ord("D"), ord("D")), (ord("d"), ord("d"))]), Chars.of([(0x30, 0x37)])
CHARACTER = Alt(
    (
        PLAIN,
        Seq((text("\\"), Chars.of((ord(one), ord(one)) for one in '"\\/bfnrt'))),
        Seq((text("\\u"), Alt((Seq((_NOT_D, _HEX)), Seq((_D, _LOW)))), _HEX, _HEX)),  # no halves of surrogate pairs
    )
)
"""One character of a string, as it is or escaped."""


def wrapped(begin: str, node: Node, end: str) -> Node:
    return Seq((text(begin), node, text(end)))


def string(least: int, most: int | None) -> Node:
    """A string of least .. most characters."""
    return NOTHING if most is not None and most < least else wrapped('"', Repeat(CHARACTER, least, most), '"')


ANY_STRING = string(0, None)


def escaped(chars: Chars) -> Node:
    """One of these characters inside a string: escaped only if it must be. One that needs \\u00 is left out of several."""
    parts: list[Node] = [plain] if (plain := chars.both(PLAIN)).ranges else []
    special = [code for low, high in chars.both(PLAIN.inverted()).ranges for code in range(low, high + 1)]
    short = [ord(SHORT[chr(code)]) for code in special if chr(code) in SHORT]
    parts += [Seq((text("\\"), Chars.of((code, code) for code in short)))] if short else []
    parts = parts or [text(f"\\u{code:04x}") for code in special]
    return parts[0] if len(parts) == 1 else Alt(tuple(parts))


def literal(value: Any) -> Node:
    """A value as it is; only the space after colons and commas is free. Raises ValueError for an infinite number."""
    if isinstance(value, dict):
        items = tuple((Seq((literal(str(key)), COLON, literal(item))), True) for key, item in value.items())
        return wrapped("{", Members(items, COMMA), "}")
    if isinstance(value, list):
        return wrapped("[", Members(tuple((literal(item), True) for item in value), COMMA), "]")
    return text(json.dumps(value, ensure_ascii=False, allow_nan=False))


@cache
def any_value(depth: int) -> Node:
    """Any JSON value with arrays and objects nested at most `depth` levels deep."""
    plain = (ANY_STRING, any_number(), text("true"), text("false"), text("null"))
    if depth == 0:
        return Alt(plain)
    inner = any_value(depth - 1)
    return Alt((*plain, wrapped("[", Alt((EMPTY, Joined(inner, COMMA))), "]"), any_object(inner)))


def any_object(inner: Node) -> Node:
    """An object with any keys and values of `inner`."""
    return wrapped("{", Alt((EMPTY, Joined(Seq((ANY_STRING, COLON, inner)), COMMA))), "}")


def integer(least: int, most: int) -> Node:
    """Whole numbers least .. most, without -0."""
    parts: list[Node] = [] if least > most or least >= 0 else [Seq((text("-"), natural(max(1, -most), -least)))]
    if max(least, 0) <= most:
        parts.append(natural(max(least, 0), most))
    return Alt(tuple(parts))


def natural(least: int, most: int) -> Node:
    """The numbers least .. most without a sign, 0 <= least <= most."""
    parts: list[Node] = []
    for width in range(len(str(least)), len(str(most)) + 1):
        low, high = max(least, 10 ** (width - 1) if width > 1 else 0), min(most, 10**width - 1)
        parts.append(_digits(str(low), str(high)))
    return Alt(tuple(parts))


def _digits(low: str, high: str) -> Node:
    """Strings of digits from low to high, of equal lengths."""
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return Repeat(DIGIT, len(low), len(low))
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return Seq((text(low[0]), _digits(low[1:], high[1:])))
    parts: list[Node] = []
    if set(low[1:]) - {"0"}:
        parts.append(Seq((text(low[0]), _digits(low[1:], "9" * rest))))
        first += 1
    if set(high[1:]) - {"9"}:
        parts.append(Seq((text(high[0]), _digits("0" * rest, high[1:]))))
        last -= 1
    if first <= last:
        parts.append(Seq((Chars(((0x30 + first, 0x30 + last),)), Repeat(DIGIT, rest, rest))))
    return Alt(tuple(parts))


_FRACTION = Seq((text("."), Repeat(DIGIT, 1, MAX_DIGITS)))
_EXPONENT = Seq(
    (
        Chars.of([(ord("E"), ord("E")), (ord("e"), ord("e"))]),
        optional(Chars.of([(0x2B, 0x2B), (0x2D, 0x2D)])),
        DIGIT,
        optional(DIGIT),
    )
)


def any_number() -> Node:
    """Any number: at most MAX_DIGITS digits before and after the point, and two of an exponent."""
    return Seq((optional(text("-")), natural(0, 10**MAX_DIGITS - 1), optional(_FRACTION), optional(_EXPONENT)))
