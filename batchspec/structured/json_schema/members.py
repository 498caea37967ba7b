"""The members of an object in their order, and how many of them there are."""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.structured.json_schema.leaves import BadSchema, Leaf
from batchspec.structured.json_schema.values import COMMA
from batchspec.structured.regular import EMPTY, Graph, Joined, Members, Node, Repeat, Seq

MAX_COUNTED = 2_000
"""Maximum of the number of properties times the largest count."""


def members_node(
    items: Sequence[tuple[Node, bool]], other: Node | None, least: int, most: int | None, leaves: Sequence[Leaf]
) -> Node:
    """Members in this order, of which optional ones may be missing; then any number of `other`; least .. most in all.

    Members after the first begin with a comma. A state is the index of the next item, and how many were written, as far as
    it is counted.
    """
    num_required = sum(required for _, required in items)
    if most is not None and most >= len(items) and other is None:
        most = None
    if least <= num_required and most is None:
        more = [] if other is None else [(Joined(other, COMMA), False)]
        return Members((*items, *more), COMMA)
    named, cap = len(items), least if most is None else most
    if least > named + (other is not None) or cap * max(1, named) > MAX_COUNTED:
        where = next((where for where, schema in leaves if "minProperties" in schema or "maxProperties" in schema), "")
        raise BadSchema(
            f"{where}/minProperties={least}: this many properties are not written, because only {named} are named; name more"
        )
    cap = max(cap, 1)
    edges: list[list[tuple[Node, int]]] = [[] for _ in range((2 * named + 1) * (cap + 1))]

    def state(item: int, count: int) -> int:
        return 2 * item * (cap + 1) + count

    for number, (item, required) in enumerate(items):
        for count in range(cap + 1):
            if not required:
                edges[state(number, count)].append((EMPTY, state(number + 1, count)))
            if most is not None and count == most:
                continue
            before = state(number, count) + cap + 1
            after = count + 1
            if most is None and after >= cap:  # all that are no longer counted share the item
                before, after = state(number, cap) + cap + 1, cap
            edges[state(number, count)].append((COMMA if count else EMPTY, before))
            if (item, state(number + 1, after)) not in edges[before]:
                edges[before].append((item, state(number + 1, after)))
    final = set[int]()
    for count in range(cap + 1):
        last = state(named, count)
        if count >= least:
            final.add(last)
        if other is not None and count + 1 >= least and (most is None or count < most):
            left = None if most is None else most - count - 1
            tail = Seq((COMMA if count else EMPTY, other, Repeat(Seq((COMMA, other)), 0, left)))
            edges.append([])
            edges[last].append((tail, len(edges) - 1))
            final.add(len(edges) - 1)
    return Graph(tuple(map(tuple, edges)), frozenset(final))
