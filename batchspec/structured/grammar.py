"""Context-free grammars as rules: in the syntax of Lark, or in that of GBNF (llama.cpp, XGrammar), known by its `::=`.

A text is accepted if the start rule (`start` in Lark, `root` in GBNF) derives it character by character. So Lark's terminals are
not found by a lexer: a text is accepted if it can be divided into terminals in any way, with ignored text between them,
before and after. Lark's own parser reads the grammar; imports are possible only from `common`.
"""

from __future__ import annotations

import re

import lark
from lark.exceptions import LarkError
from lark.grammar import NonTerminal, Terminal
from lark.lexer import PatternStr

from batchspec.structured.gbnf import read_gbnf
from batchspec.structured.regex import BadRegex, regex_node
from batchspec.structured.regular import Alt, Node, Ref, Repeat, Seq, text
from batchspec.structured.rules import BadGrammar, Rules

MAX_SAID = 160
_IMPORT = re.compile(r"^\s*%import\s+([^\s(]+)", re.MULTILINE)
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/')
_ESCAPED_STRING = (".*?(?<!\\\\)(\\\\\\\\)*?", '(?:[^"\\\\\\n]|\\\\.)*')
"""How common.ESCAPED_STRING is written between its quotes, and the same without a lookbehind."""
_IGNORED = "%ignore"


def grammar_rules(source: str) -> Rules:
    """The rules of a grammar. Raises BadGrammar."""
    if "::=" in _QUOTED.sub("", source):
        return read_gbnf(source)
    return _read_lark(source)


def _read_lark(source: str) -> Rules:
    for module in _IMPORT.findall(_QUOTED.sub("", source)):
        if not module.startswith("common") or module.removeprefix("common")[:1] not in ("", "."):
            raise BadGrammar(f"%import {module}: only what `common` has can be imported; write the rule out")
    try:
        read = lark.Lark(source, parser="earley", lexer="dynamic", maybe_placeholders=False)
    except (LarkError, re.error, ValueError, AssertionError, KeyError, AttributeError, OSError) as error:
        raise BadGrammar(f"it is not a Lark grammar ({one_line(error)}); correct it") from None
    terminals = {terminal.name: _terminal(terminal) for terminal in read.terminals}
    ignored = Repeat(Alt(tuple(terminals[name] for name in read.ignore_tokens)), 0, None) if read.ignore_tokens else None
    named: dict[str, Node] = {} if ignored is None else {_IGNORED: ignored}
    alternatives: dict[str, list[Node]] = {}
    for rule in read.rules:
        parts: list[Node] = []
        for symbol in rule.expansion:
            if isinstance(symbol, NonTerminal):
                parts.append(Ref(str(symbol.name)))
            elif isinstance(symbol, Terminal):
                parts += [terminals[symbol.name], *([Ref(_IGNORED)] if ignored is not None else [])]
        alternatives.setdefault(str(rule.origin.name), []).append(Seq(tuple(parts)))
    named |= {name: Alt(tuple(found)) for name, found in alternatives.items()}
    return Rules(Seq((Ref(_IGNORED), Ref("start"))) if ignored is not None else Ref("start"), named)


def _terminal(terminal: lark.lexer.TerminalDef) -> Node:
    pattern = terminal.pattern
    if isinstance(pattern, PatternStr) and not pattern.flags:
        return text(pattern.value)
    try:
        return regex_node(pattern.to_regexp().replace(*_ESCAPED_STRING))
    except BadRegex as error:
        raise BadGrammar(f"terminal {terminal.name}: {error}") from None


def one_line(error: object) -> str:
    """An error's text in one line, not too long."""
    said = " ".join(str(error).split())
    return said if len(said) <= MAX_SAID else f"{said[:MAX_SAID]}..."
