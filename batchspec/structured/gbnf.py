"""GBNF, the grammars of llama.cpp and XGrammar: rules `name ::= a | b`, with literals, classes of characters and
repetitions.

Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md. Refused: tokens (<...>) and lookahead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from batchspec.structured.regular import ANY, Alt, Chars, Node, Ref, Repeat, Seq
from batchspec.structured.rules import BadGrammar, Rules, references

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<name>[A-Za-z_][\w.-]*)|(?P<is>::=)|(?P<literal>"(?:[^"\\\n]|\\.)*")
    |(?P<chars>\[(?:[^\]\\\n]|\\.)*\])|(?P<times>\{\s*\d*\s*(?:,\s*\d*\s*)?\})|(?P<sign>[|()*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|(.)", re.DOTALL)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
MAX_REPEATS = 100_000
Token = tuple[str, str, int]
"""Kind, text, line."""


def read_gbnf(source: str) -> Rules:
    """The rules of a grammar whose start is `root`. Raises BadGrammar."""
    named = _Reader(source).rules()
    if "root" not in named:
        raise BadGrammar("it has no rule `root`, with which a text begins; add it")
    for name, node in named.items():
        for other in sorted(references(node) - named.keys()):
            raise BadGrammar(f"rule {name!r} names {other!r}, which is not a rule; add it or correct the name")
    return Rules(Ref("root"), named)


def _tokens(source: str) -> Iterator[Token]:
    place, line = 0, 1
    while place < len(source):
        found = _TOKEN.match(source, place)
        if found is None:
            near = source[place : place + 20]
            raise BadGrammar(f"line {line}: {near!r} is not supported in a grammar with `::=`; write it another way")
        if found.lastgroup != "space":
            yield str(found.lastgroup), found.group(), line
        line += found.group().count("\n")
        place = found.end()


class _Reader:
    def __init__(self, source: str) -> None:
        self._tokens = [*_tokens(source), ("end", "", 0), ("end", "", 0)]
        self._place = 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while self._kind() != "end":
            kind, name, line = self._take()
            if kind != "name" or self._take()[0] != "is":
                raise BadGrammar(f"line {line}: {name!r} does not begin a rule; write name ::= what it is")
            if name in found:
                raise BadGrammar(f"line {line}: rule {name!r} is defined twice; join them with `|`")
            found[name] = self._alternatives()
        return found

    def _kind(self, ahead: int = 0) -> str:
        return self._tokens[self._place + ahead][0]

    def _take(self) -> Token:
        self._place += self._kind() != "end"
        return self._tokens[self._place - 1] if self._place else self._tokens[0]

    def _alternatives(self) -> Node:
        alternatives = [self._sequence()]
        while self._tokens[self._place][1] == "|":
            self._take()
            alternatives.append(self._sequence())
        return alternatives[0] if len(alternatives) == 1 else Alt(tuple(alternatives))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while True:
            kind, said, line = self._tokens[self._place]
            if kind == "name" and self._kind(1) != "is":
                part: Node = Ref(said)
            elif kind == "literal":
                part = Seq(tuple(Chars(((ord(char),) * 2,)) for char, _ in _characters(said[1:-1])))
            elif kind == "chars":
                part = _class(said, line)
            elif said == ".":
                part = ANY
            elif said == "(":
                self._take()
                part = self._alternatives()
                if self._tokens[self._place][1] != ")":
                    raise BadGrammar(f"line {line}: a group is not closed; add `)`")
            elif said in ("", "|", ")") or kind == "name":
                return Seq(tuple(parts))
            else:
                raise BadGrammar(f"line {line}: {said!r} is where a part of a rule must be; correct it")
            self._take()
            parts.append(self._repeated(part))

    def _repeated(self, part: Node) -> Node:
        while (said := self._tokens[self._place])[1] in ("*", "+", "?") or said[0] == "times":
            self._take()
            part = Repeat(part, *_times(said))
        return part


def _times(token: Token) -> tuple[int, int | None]:
    kind, said, line = token
    if kind != "times":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[said]
    low, comma, high = (one.strip() for one in said[1:-1].partition(","))
    least = int(low or 0)
    most = int(high) if high else (None if comma else least)
    if not (low or high) or (most is not None and most < least) or max(least, most or 0) > MAX_REPEATS:
        raise BadGrammar(f"line {line}: {said} is not a repetition count of at most {MAX_REPEATS:,}; correct it")
    return least, most


def _characters(said: str) -> Iterator[tuple[str, bool]]:
    """The characters that are written, and whether by an escape."""
    for escape, plain in _ESCAPE.findall(said):
        if plain:
            yield plain, False
        elif escape[0] in "xuU" and len(escape) > 1:
            code = int(escape[1:], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise BadGrammar(f"\\{escape} is not a character; correct it")
            yield chr(code), True
        else:
            yield _CONTROL.get(escape, escape), True


def _class(said: str, line: int) -> Node:
    inverted = said.startswith("[^")
    chars = list(_characters(said[2:-1] if inverted else said[1:-1]))
    ranges, place = list[tuple[int, int]](), 0
    while place < len(chars):
        low = ord(chars[place][0])
        ranged = place + 2 < len(chars) and chars[place + 1] == ("-", False)
        high = ord(chars[place + 2][0]) if ranged else low
        if high < low:
            raise BadGrammar(f"line {line}: {said} holds a range that ends before it begins; correct it")
        ranges.append((low, high))
        place += 3 if ranged else 1
    found = Chars.of(ranges)
    return found.inverted() if inverted and ranges else ANY if inverted else found
