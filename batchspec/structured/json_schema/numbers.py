"""Numbers of JSON Schema: bounds, which may be fractions, and multiples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

from batchspec.structured.char_dfa import CharDfa
from batchspec.structured.emptiness import marked
from batchspec.structured.json_schema.leaves import NOT_VALUES, BadSchema, Leaf, is_not_whole
from batchspec.structured.json_schema.strings import listed
from batchspec.structured.json_schema.values import DIGIT, MAX_DIGITS, any_number, integer, natural
from batchspec.structured.regular import EMPTY, NOTHING, Alt, Chars, Graph, Node, Repeat, Seq, optional, text

MAX_MULTIPLE = 1_000
"""Largest supported multiple: multiples of m take an automaton of m states."""
_LEAST_MULTIPLE = Fraction(1, 10**200)
"""Quotients by smaller divisors than this leave the range of a double."""
LIMIT = 10**MAX_DIGITS - 1
_KEYS = ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ZEROS = Repeat(text("0"), 0, None)
_FRACTION = Seq((optional(text("-")), Repeat(DIGIT, 1, 7), text("."), Repeat(DIGIT, 0, 7), Chars(((0x31, 0x39),)), _ZEROS))
"""Numbers that are not whole, with at most 15 digits that count."""
Bound = tuple[Decimal, bool]
"""A value, and whether it is itself excluded."""


def number_node(name: str, leaves: Sequence[Leaf]) -> Node:
    """The numbers, or with name `integer` the whole numbers, that all leaves allow. Raises BadSchema and TooLarge."""
    low, high = bounds_of(leaves)
    multiple, step = _multiple(leaves)
    values = [value for _, schema in leaves for value in schema.get(NOT_VALUES, ()) if type(value) in (int, float)]
    if name == "integer":
        step = _common(step, Fraction(1))
    if _is_empty(low, high, step, values):
        return NOTHING
    has_fractions = name == "number" and multiple is None
    if has_fractions and not values and not is_not_whole(leaves):
        found = any_number() if low is high is None else _numbers(low, high)
    else:
        parts = [] if is_not_whole(leaves) else [_whole(low, high, multiple, values)]
        parts += [_fractions(low, high, values)] if has_fractions else []
        found = Alt(tuple(parts))
    place = next((f"{where}/{key}" for key in _KEYS for where, schema in leaves if key in schema), leaves[0].where)
    return marked(found, f"{place}: no number that can be written fits; change it, or give other bounds")


def _is_empty(low: Bound | None, high: Bound | None, step: Fraction | None, left_out: Sequence[float]) -> bool:
    """Whether no number is within the bounds, a multiple of `step`, and none of those left out."""
    if low is None or high is None:
        return False
    least, most = Fraction(low[0]), Fraction(high[0])
    if least > most or (least == most and (low[1] or high[1])):
        return True
    if step is None:
        return least == most and any(value == least for value in left_out)
    first, last = math.ceil(least / step), math.floor(most / step)
    first += low[1] and first * step == least
    last -= high[1] and last * step == most
    if last - first >= len(left_out):
        return False
    return all(any(value == one * step for value in left_out) for one in range(first, last + 1))


def _whole(low: Bound | None, high: Bound | None, multiple: int | None, values: Sequence[float]) -> Node:
    """The whole numbers within the bounds that are multiples and none of the values."""
    whole, left_out = integer(*_inclusive(low, high)), [str(int(value)) for value in values if value % 1 == 0]
    if not left_out and multiple in (None, 1):
        return whole
    found = CharDfa.of(whole)
    if multiple is not None:
        found = found.both(CharDfa.of(_multiples(multiple)))
    return (found.without(listed(left_out)) if left_out else found).node(lambda chars: chars)


def _fractions(low: Bound | None, high: Bound | None, values: Sequence[float]) -> Node:
    """Numbers that are not whole, within the bounds and none of the values: of so few digits that all are different doubles."""
    found = CharDfa.of(_numbers(low, high)).both(CharDfa.of(_FRACTION))
    for value in values:
        digits = format(Decimal(repr(value)), "f")
        if "." in digits and value % 1:
            found = found.without(CharDfa.of(Seq((text(digits.rstrip("0")), _ZEROS))))
    return found.node(lambda chars: chars)


def bounds_of(leaves: Sequence[Leaf]) -> tuple[Bound | None, Bound | None]:
    """The lowest and the highest number that all leaves allow. Raises BadSchema."""
    low = _bound(leaves, "minimum", "exclusiveMinimum", max)
    return low, _bound(leaves, "maximum", "exclusiveMaximum", min)


def _bound(
    leaves: Sequence[Leaf], inclusive: str, exclusive: str, choose: Callable[[list[Decimal]], Decimal]
) -> Bound | None:
    found = list[Bound]()
    for where, schema in leaves:
        values = {key: schema[key] for key in (inclusive, exclusive) if key in schema}
        if isinstance(values.get(exclusive), bool):  # draft-04
            is_open = values.pop(exclusive)
            if inclusive in values:
                values = {exclusive if is_open else inclusive: values[inclusive]}
        for key, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise BadSchema(f"{where}/{key} must be a number; correct it")
            exact = Decimal(repr(value))
            if key == exclusive and len(exact.normalize().as_tuple().digits) > MAX_DIGITS:
                raise BadSchema(f"{where}/{key}={value} has more than {MAX_DIGITS} digits, which is not supported; round it")
            found.append((exact, key == exclusive))
    if not found:
        return None
    value = choose([bound for bound, _ in found])
    return value, any(is_open for bound, is_open in found if bound == value)


def _inclusive(low: Bound | None, high: Bound | None) -> tuple[int, int]:
    """The least and the greatest whole number within the bounds."""
    least, most = -LIMIT, LIMIT
    if low is not None:
        least = max(least, math.floor(low[0]) + 1 if low[1] else math.ceil(low[0]))
    if high is not None:
        most = min(most, math.ceil(high[0]) - 1 if high[1] else math.floor(high[0]))
    return least, most


def _multiple(leaves: Sequence[Leaf]) -> tuple[int | None, Fraction | None]:
    """The number whose whole multiples are written, and the one whose multiples are valid; None: any number.

    For a fraction p/q the first is p: validators divide, and the quotient must be exact.
    """
    found, step = None, None
    for where, schema in leaves:
        value = schema.get("multipleOf")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise BadSchema(f"{where}/multipleOf must be a number above 0; correct it")
        exact = Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
        error = abs(Fraction(value) / exact - 1)
        found, step = math.lcm(found or 1, exact.numerator), _common(step, exact)
        if error > Fraction(1, 2**54) or found > MAX_MULTIPLE or exact < _LEAST_MULTIPLE:
            said = f"{where}/multipleOf={json.dumps(value)[:30]} is not supported"
            raise BadSchema(f"{said}; use a whole number of at most {MAX_MULTIPLE:,}, or one like 0.01")
    return found, step


def _common(one: Fraction | None, other: Fraction) -> Fraction:
    """The least common multiple."""
    if one is None:
        return other
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


def _multiples(of: int) -> Node:
    """Digits after an optional sign, whose number is a multiple: a state for each remainder."""
    edges: list[tuple[tuple[Node, int], ...]] = [((Alt((EMPTY, text("-"))), 1),)]
    for remainder in range(of):
        edges.append(tuple((text(str(digit)), 1 + (10 * remainder + digit) % of) for digit in range(10)))
    return Graph(tuple(edges), frozenset({1}))


def _numbers(low: Bound | None, high: Bound | None) -> Node:
    """Numbers within the bounds; -0 is not written."""
    parts = list[Node]()
    for sign, least, most in (("", low, high), ("-", _negated(high), _negated(low))):
        if least is None or least[0] < 0:
            least = (Decimal(0), False)
        if most is None or most[0] >= 0:
            parts.append(Seq((text(sign), _positive(least, most, begin=bool(sign)))))
    return Alt(tuple(parts))


def _negated(bound: Bound | None) -> Bound | None:
    return None if bound is None else (-bound[0], bound[1])


def _positive(low: Bound, high: Bound | None, *, begin: bool) -> Node:
    """Numbers low .. high, neither below 0; begin: those below 1 need a fraction.

    A number must differ from an excluded bound as a double too: those of at most 15 digits do.
    """
    if low[0] > LIMIT:
        return NOTHING
    below = high if high is not None and high[0] <= LIMIT else (Decimal(LIMIT), True)
    (first, after), (last, until) = _digits(low[0]), _digits(below[0])
    most_digits = min(MAX_DIGITS - len(str(whole)) * is_open for whole, is_open in ((first, low[1]), (last, below[1])))
    most_digits = most_digits if below == high else MAX_DIGITS - len(str(first)) * low[1]
    parts = list[Node]()

    def whole(number: int, lower: Bound | None, upper: Bound | None) -> None:
        """One whole number alone and with fractions."""
        alone = (lower is None or lower[0] < number or (lower[0] == number and not lower[1])) and (
            upper is None or upper[0] > number or (upper[0] == number and not upper[1])
        )
        if alone and not (begin and number == 0):
            parts.append(text(str(number)))
        of_lower, of_upper = None if lower is None else (after, lower[1]), None if upper is None else (until, upper[1])
        parts.append(Seq((text(f"{number}."), _fraction(of_lower, of_upper, most_digits))))

    if first > last:
        return NOTHING
    if first == last:
        whole(first, low, below)
        return Alt(tuple(parts))
    whole(first, low, None)
    if first + 1 <= last - 1:
        parts.append(Seq((natural(first + 1, last - 1), Alt((EMPTY, Seq((text("."), _fraction(None, None, most_digits))))))))
    whole(last, None, below)
    return Alt(tuple(parts))


def _digits(value: Decimal) -> tuple[int, str]:
    """The whole part, and the digits after the point without zeros at the end."""
    whole = math.floor(value)
    return whole, format(value - whole, "f").partition(".")[2].rstrip("0")


def _fraction(low: tuple[str, bool] | None, high: tuple[str, bool] | None, most: int) -> Node:
    """1 .. most digits after a point, within bounds that are given as digits and whether they are excluded.

    A state is the number of digits, and for each bound whether they equal its digits so far.
    """
    states, numbers = [(0, low is not None, high is not None)], {(0, low is not None, high is not None): 0}
    edges, final = list[tuple[tuple[Node, int], ...]](), set[int]()
    for count, at_low, at_high in states:
        reached = count >= len(low[0]) and not low[1] if low is not None and at_low else True
        below = not (high is not None and at_high and count >= len(high[0]) and high[1])
        if count and reached and below:
            final.add(len(edges))
        by_target = dict[int, list[int]]()
        for digit in range(10) if count < most else ():
            least = int(low[0][count : count + 1] or 0) if low is not None and at_low else 0
            limit = int(high[0][count : count + 1] or 0) if high is not None and at_high else 9
            if least <= digit <= limit:
                after = (count + 1, at_low and digit == least, at_high and digit == limit)
                if after not in numbers:
                    numbers[after] = len(states)
                    states.append(after)
                by_target.setdefault(numbers[after], []).append(digit)
        edges.append(tuple((Chars.of((0x30 + one, 0x30 + one) for one in some), to) for to, some in by_target.items()))
    return Graph(tuple(edges), frozenset(final))
