"""Named rules of nodes, which may refer to themselves: the form of grammars and of recursive schemas.

Without recursion the rules are inlined, and the node has a finite automaton. Recursive rules become a network (`network.py`),
whose automaton is computed while it is used (`lazy_dfa.py`). A rule that begins with itself is rewritten as a repetition:
a = a x | y becomes a = y x*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from batchspec.errors import OneLine
from batchspec.structured.regular import Alt, Graph, Joined, Members, Node, Ref, Repeat, Seq


class BadGrammar(OneLine, ValueError):
    """The grammar is not valid, or holds something unsupported; the message says where and what."""


@dataclass(frozen=True, slots=True)
class Rules:
    """A text must match `start`, whose references are to `named`."""

    start: Node
    named: Mapping[str, Node] = field(default_factory=dict)
    of_channel_call: bool = False
    """Whether the text is a tool call in a model with channels, from the function's name on (`channels.py`)."""
    is_weaker: bool = False
    """Whether texts match that the constraint does not allow, so that the answer must be checked (`unsupported.py`)."""

    def inlined(self) -> Node | None:
        """One node without references; None if a rule refers to itself."""
        done: dict[str, Node] = {}
        named = self.without_left_recursion().named
        for name in _innermost_first(self.start, named) or ():
            done[name] = _mapped(named[name], done)
        return _mapped(self.start, done) if done.keys() >= references(self.start) else None

    def without_left_recursion(self) -> Rules:
        """The same texts, without direct left recursion (a = a x). `Network` refuses indirect left recursion."""
        return replace(self, named={name: _as_repetition(name, node) for name, node in self.named.items()})


def renamed(rules: Rules, prefix: str) -> Rules:
    """The same texts; the names of the rules begin with the prefix."""
    names: dict[str, Node] = {name: Ref(prefix + name) for name in rules.named}
    return Rules(_mapped(rules.start, names), {prefix + name: _mapped(node, names) for name, node in rules.named.items()})


def references(node: Node) -> set[str]:
    """Names of the rules that a node names."""
    found, todo, seen = set[str](), [node], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Ref):
            found.add(one.rule)
        todo += parts_of(one)
    return found


def parts_of(node: Node) -> list[Node]:
    match node:
        case Seq(parts) | Alt(parts):
            return list(parts)
        case Repeat(part, _, _):
            return [part]
        case Joined(item, between):
            return [item, between]
        case Members(items, between):
            return [*(item for item, _ in items), between]
        case Graph(edges, _):
            return [label for of_state in edges for label, _ in of_state]
    return []


def _innermost_first(start: Node, named: Mapping[str, Node]) -> list[str] | None:
    """Rules that the start needs, each after the rules that it names; None if a rule refers to itself."""
    found: dict[str, None] = {}
    opened: list[str] = []
    todo = [(name, False) for name in references(start)]
    while todo:
        name, closes = todo.pop()
        if closes:
            opened.remove(name)
            found[name] = None
        elif name in opened:
            return None
        elif name not in found:
            opened.append(name)
            todo.append((name, True))
            todo += [(inner, False) for inner in references(named[name])]
    return list(found)


def _mapped(node: Node, done: Mapping[str, Node]) -> Node:
    match node:
        case Ref(rule):
            return done.get(rule, node)
        case Seq(parts):
            return Seq(tuple(_mapped(part, done) for part in parts))
        case Alt(parts):
            return Alt(tuple(_mapped(part, done) for part in parts))
        case Repeat(part, least, most):
            return Repeat(_mapped(part, done), least, most)
        case Joined(item, between):
            return Joined(_mapped(item, done), _mapped(between, done))
        case Members(items, between):
            return Members(tuple((_mapped(item, done), required) for item, required in items), _mapped(between, done))
        case Graph(edges, final):
            return Graph(tuple(tuple((_mapped(label, done), to) for label, to in of_state) for of_state in edges), final)
    return node


def _as_repetition(name: str, node: Node) -> Node:
    after, others = list[Node](), list[Node]()
    for alternative in _alternatives(node):
        parts = _flat(alternative)
        if parts and parts[0] == Ref(name):
            if len(parts) > 1:  # a = a has no effect
                after.append(Seq(tuple(parts[1:])))
        else:
            others.append(alternative)
    if not after and len(others) == len(_alternatives(node)):
        return node
    return Seq((Alt(tuple(others)), Repeat(Alt(tuple(after)), 0, None)))


def _alternatives(node: Node) -> list[Node]:
    """The alternatives of a node."""
    if isinstance(node, Alt):
        return [alternative for part in node.parts for alternative in _alternatives(part)]
    if isinstance(node, Seq) and len(node.parts) == 1:
        return _alternatives(node.parts[0])
    return [node]


def _flat(node: Node) -> list[Node]:
    """A node as parts that follow one another."""
    return [part for inner in node.parts for part in _flat(inner)] if isinstance(node, Seq) else [node]
