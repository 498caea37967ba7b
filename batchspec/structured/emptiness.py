"""Whether any text matches rules, and if none does, whether texts were left out that would be right.

An empty language proves that a constraint is impossible only if nothing was left out on the way to it. `LeftOut` nodes say where
something was, so every node is one of three: empty, empty but for what was left out, or with a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum

from batchspec.structured.regular import Alt, Chars, Graph, Joined, LeftOut, Mark, Members, Node, Ref, Repeat, Seq
from batchspec.structured.rules import Rules, parts_of


class Texts(IntEnum):
    NONE = 0
    LEFT_OUT = 1
    SOME = 2


def texts_of(rules: Rules) -> tuple[Texts, str]:
    """What the rules match; if only texts that were left out, what the first node of them says."""
    of_rule, before = dict.fromkeys(rules.named, Texts.NONE), None
    while of_rule != before:
        before, search = dict(of_rule), _Search(of_rule)
        for name, node in rules.named.items():
            of_rule[name] = search.of(node)
    start = search.of(rules.start)
    return start, next(search.said(rules.start, rules.named, set())) if start is Texts.LEFT_OUT else ""


def marked(node: Node, said: str) -> Node:
    """A node without references; if no text matches it, marked as one that leaves texts out."""
    return node if _Search({}).of(node) is Texts.SOME else LeftOut((), said)


class _Search:
    """of_rule: what is known of the rules so far; a rule that refers to itself has a text only if it can do without."""

    def __init__(self, of_rule: Mapping[str, Texts]) -> None:
        self._of_rule = of_rule
        self._known: dict[int, Texts] = {}
        """By the id of a node, which the rules keep alive."""

    def of(self, node: Node) -> Texts:
        found = self._known.get(id(node))
        if found is None:
            found = self._known[id(node)] = self._found(node)
        return found

    def _found(self, node: Node) -> Texts:
        match node:
            case LeftOut():
                return Texts.LEFT_OUT
            case Mark():
                return Texts.SOME
            case Chars(ranges):
                return Texts.SOME if ranges else Texts.NONE
            case Seq(parts):
                return min(map(self.of, parts), default=Texts.SOME)
            case Alt(parts):
                return max(map(self.of, parts), default=Texts.NONE)
            case Repeat(part, least, _):
                return self.of(part) if least else Texts.SOME
            case Joined(item, _):
                return self.of(item)
            case Members(items, _):
                return min((self.of(item) for item, required in items if required), default=Texts.SOME)
            case Ref(rule):
                return self._of_rule[rule]
            case Graph():
                return max((one for one in (Texts.SOME, Texts.LEFT_OUT) if self._reaches(node, one)), default=Texts.NONE)

    def _reaches(self, graph: Graph, least: Texts) -> bool:
        """Whether a path of labels that have at least this leads to a final state."""
        seen, todo = {0}, [0]
        while todo:
            fresh = {to for label, to in graph.edges[todo.pop()] if to not in seen and self.of(label) >= least}
            seen |= fresh
            todo += fresh
        return not seen.isdisjoint(graph.final)

    def said(self, node: Node, named: Mapping[str, Node], seen: set[str]) -> Iterator[str]:
        """What the nodes say that leave texts out, of those that make up this one."""
        if isinstance(node, LeftOut):
            yield node.said
        elif isinstance(node, Ref):
            if node.rule not in seen:
                seen.add(node.rule)
                yield from self.said(named[node.rule], named, seen)
        else:
            parts = [item for item, required in node.items if required] if isinstance(node, Members) else parts_of(node)
            for part in parts:
                if self.of(part) is Texts.LEFT_OUT:
                    yield from self.said(part, named, seen)
