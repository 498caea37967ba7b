"""Parses the text of a constraint (schema, grammar, regex, choice): rules of nodes, and a network for a lazy automaton."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchspec.automata.token_automaton import BREAKS_AFTER_THOUGHT, TokenSymbols
from batchspec.structured.channels import BYTES
from batchspec.structured.forced_calls import call_rules
from batchspec.structured.grammar import grammar_rules
from batchspec.structured.json_schema.schema import schema_rules
from batchspec.structured.network import Network
from batchspec.structured.regex import regex_node
from batchspec.structured.regular import Alt, Repeat, text
from batchspec.structured.rules import Rules
from batchspec.structured.unsupported import obeyed

AFTER_THOUGHT = Repeat(text("\n"), 0, BREAKS_AFTER_THOUGHT)
"""White space that is allowed between a reasoning block and the answer, because models write it."""


def rules_of(kind: str, source: str, marks: Sequence[str] = (), *, checks: bool = False) -> Rules:
    """The texts that a constraint allows: kind schema (JSON text), grammar, regex, choice (JSON text of a list of strings), or
    tool_choice (`forced_calls.call_rules`, with the vocabulary's marks).

    checks: whether finished answers are checked by whole schemas, so that the rules may allow more (`unsupported.py`)
    Raises BadSchema, BadGrammar, BadRegex.
    """
    if kind == "tool_choice":
        return call_rules(source, marks, checks=checks)
    if kind == "regex":
        return Rules(regex_node(source))
    if kind == "choice":
        return Rules(Alt(tuple(text(choice) for choice in json.loads(source))))
    if kind == "grammar":
        return grammar_rules(source)
    rules, is_weaker = obeyed(json.loads(source), schema_rules, checks=checks)
    return replace(rules, is_weaker=is_weaker)


def network_of(kind: str, source: str, vocabulary: TokenSymbols, *, checks: bool = False) -> Network:
    """The texts of `rules_of`, as a network over bytes. Raises Impossible and TooLarge too."""
    return Network(rules_of(kind, source, vocabulary.marks, checks=checks), AFTER_THOUGHT, single_bytes(vocabulary))


def single_bytes(vocabulary: TokenSymbols) -> NDArray[np.bool_]:
    """bool [256]: which bytes are tokens by themselves, or stand for one. Automata allow only these, so that no token leads to a
    dead end."""
    lengths = np.diff(vocabulary.starts)
    symbols = vocabulary.symbols[vocabulary.starts[:-1][lengths == 1]]
    found = np.zeros(256, bool)
    found[symbols[symbols < 256]] = True
    for symbol, byte in BYTES.items():
        found[byte] |= symbol in symbols
    return found
