"""Arrays of JSON Schema: elements by index, number of elements, `contains`, and distinct elements of a listed set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from batchspec.structured.json_schema.leaves import BadSchema, Leaf, Parts, count_of, listed_values
from batchspec.structured.json_schema.objects import Reading
from batchspec.structured.json_schema.validity import fits, same
from batchspec.structured.json_schema.values import COMMA, MAX_DEPTH, any_value, literal, wrapped
from batchspec.structured.regular import EMPTY, NOTHING, Alt, Graph, Joined, Members, Node, Repeat, Seq

MAX_DISTINCT = 5
"""Maximum number of distinct values in any order; more come in the order in which they are listed."""
MAX_COUNTED = 100
"""Limit on the elements that a schema with `contains` must count."""


def element_schemas(leaves: Sequence[Leaf], place: int) -> Parts:
    """The schemas that hold for the element at an index."""
    found = list[tuple[str, Any]]()
    for where, schema in leaves:
        first, rest, key = _split(schema, where)
        if place < len(first):
            found.append((f"{where}/{'items' if key == 'additionalItems' else 'prefixItems'}/{place}", first[place]))
        elif rest is not True:
            found.append((f"{where}/{key}", rest))
    return found


def array_node(leaves: Sequence[Leaf], reading: Reading) -> Node:
    """The arrays that all leaves allow. Raises BadSchema and TooLarge."""
    least, most = count_of(leaves, "minItems", max) or 0, count_of(leaves, "maxItems", min)
    if most is not None and most < least:
        return NOTHING
    num_fixed = max(len(_split(schema, where)[0]) for where, schema in leaves)
    num_fixed = num_fixed if most is None else min(num_fixed, most)
    unique = next((leaf for leaf in leaves if leaf.schema.get("uniqueItems")), None)
    wanted = [leaf for leaf in leaves if "contains" in leaf.schema]
    if wanted:
        if num_fixed or unique is not None or len(wanted) > 1 or "maxContains" in wanted[0].schema:
            raise BadSchema(
                f"{wanted[0].where}/contains beside prefixItems, uniqueItems or maxContains is not supported; leave it out"
            )
        return wrapped("[", _containing(leaves, wanted[0], least, most, reading), "]")
    if unique is not None and most not in (0, 1):
        return wrapped("[", _distinct(leaves, unique.where, least, most, num_fixed, reading), "]")
    fixed = [_element(leaves, place, reading) for place in range(num_fixed)]
    rest = _element(leaves, num_fixed, reading)
    if not fixed and least <= 1 and most is None:
        return wrapped("[", Alt((Joined(rest, COMMA), *((EMPTY,) if least == 0 else ()))), "]")
    return wrapped("[", _elements(fixed, rest, least, most), "]")


def _split(schema: Mapping[Any, Any], where: str) -> tuple[list[Any], Any, str]:
    """Schemas of the first elements, that of the others, and its keyword."""
    items, first = schema.get("items", True), schema.get("prefixItems", [])
    if isinstance(items, list):  # draft-07
        return items, schema.get("additionalItems", True), "additionalItems"
    if not isinstance(first, list):
        raise BadSchema(f"{where}/prefixItems must be a list of schemas; correct it")
    return first, items, "items"


def _element(leaves: Sequence[Leaf], place: int, reading: Reading, more: Parts = ()) -> Node:
    inner = [*element_schemas(leaves, place), *more]
    return reading.value(inner) if inner else any_value(MAX_DEPTH - 1)


def _elements(fixed: list[Node], rest: Node, least: int, most: int | None) -> Node:
    """First `fixed`, then any of `rest`; least .. most of them together."""
    tail: Node = EMPTY
    repeated = Seq((COMMA, rest))
    count = max(len(fixed), 1)
    if most is None or most > count:
        tail = Repeat(repeated, max(0, least - count), None if most is None else most - count)
    elements = fixed or [rest]
    if most == 0:
        return EMPTY
    for i in range(len(elements) - 1, -1, -1):
        one = Seq((*((COMMA,) if i else ()), elements[i], tail))
        tail = one if i < least else Alt((EMPTY, one))
    return tail


def _containing(leaves: Sequence[Leaf], wanted: Leaf, least: int, most: int | None, reading: Reading) -> Node:
    """Elements of which enough fit `contains`. A state is the number of elements and of fitting ones, as far as counted."""
    times = wanted.schema.get("minContains", 1)
    if times == 0 and "minContains" in reading.document.ignored:
        times = 1
    cap = max(least, times if isinstance(times, int) else -1, 1) if most is None else most
    if not isinstance(times, int) or isinstance(times, bool) or times < 0 or (cap + 1) * (times + 1) > MAX_COUNTED:
        raise BadSchema(f"{wanted.where}/contains with such a count of elements is not supported; lower minContains or maxItems")
    any_, one = (
        _element(leaves, 0, reading),
        _element(leaves, 0, reading, [(f"{wanted.where}/contains", wanted.schema["contains"])]),
    )
    edges, final = list[tuple[tuple[Node, int], ...]](), set[int]()
    for count in range(cap + 1):
        for found in range(times + 1):
            if count >= least and found == times:
                final.add(len(edges))
            if most is not None and count == most:
                edges.append(())
                continue
            after = min(count + 1, cap) * (times + 1)
            comma = COMMA if count else EMPTY
            more = [] if found == times else [(Seq((comma, one)), after + found + 1)]
            edges.append(((Seq((comma, any_)), after + found), *more))
    return Graph(tuple(edges), frozenset(final))


def _distinct(
    leaves: Sequence[Leaf], where: str, least: int, most: int | None, num_fixed: int, reading: Reading
) -> Node:
    """Different values of a listed set; an automaton cannot remember other written values. Raises BadSchema."""
    values = None if num_fixed else _listed(element_schemas(leaves, 0), reading)
    if values is None:
        raise BadSchema(
            f"{where}/uniqueItems is not supported unless the elements are listed by enum: values written before would have to "
            "be remembered; leave it out"
        )
    most = len(values) if most is None else min(most, len(values))
    if least > most:
        return NOTHING
    nodes = [literal(value) for value in values]
    if len(values) > MAX_DISTINCT:
        return _in_order(nodes, least, most)
    sets = [frozenset(some) for size in range(most + 1) for some in combinations(range(len(values)), size)]
    number = {some: i for i, some in enumerate(sets)}
    edges = tuple(
        tuple(
            (Seq((COMMA if some else EMPTY, node)), number[some | {i}])
            for i, node in enumerate(nodes)
            if i not in some and len(some) < most
        )
        for some in sets
    )
    return Graph(edges, frozenset(i for i, some in enumerate(sets) if len(some) >= least))


def _in_order(nodes: Sequence[Node], least: int, most: int) -> Node:
    """Some of the nodes, least .. most of them, in their order."""
    if not least and most == len(nodes):
        return Members(tuple((node, False) for node in nodes), COMMA)
    edges: list[list[tuple[Node, int]]] = [[] for _ in range((len(nodes) + 1) * (most + 1))]
    for i, node in enumerate(nodes):
        for count in range(most + 1):
            at, after = i * (most + 1) + count, (i + 1) * (most + 1) + count
            edges[at].append((EMPTY, after))
            if count < most:
                edges[at].append((Seq((COMMA if count else EMPTY, node)), after + 1))
    last = len(nodes) * (most + 1)
    return Graph(tuple(map(tuple, edges)), frozenset(range(last + least, last + most + 1)))


def _listed(inner: Parts, reading: Reading) -> list[Any] | None:
    """The different values that fit all of these schemas, if they are listed."""
    flat = reading.document.flat(inner)
    if flat is None:
        return []
    lists = [values for _, schema in flat.leaves if (values := listed_values(schema)) is not None]
    if not lists and any(schema.get("type") == "boolean" for _, schema in flat.leaves):
        lists = [[False, True]]
    if not lists:
        return None
    found = list[Any]()
    for value in lists[0]:
        if not any(same(value, one) for one in found) and all(
            fits(value, where, schema, reading.document) for where, schema in flat.leaves
        ):
            found.append(value)
    return found
