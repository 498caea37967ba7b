"""From the text of a constraint to what its answers must be."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from batchspec.structured.grammar import grammar_rules
from batchspec.structured.json_schema import schema_rules
from batchspec.structured.network import Network
from batchspec.structured.regex import regex_node
from batchspec.structured.regular import Alt, Repeat, text
from batchspec.structured.rules import Rules
from batchspec.token_automaton import TokenSymbols

AFTER_THOUGHT = Repeat(text("\n"), 0, 2)
"""White space that models write between a thought and the answer."""


def rules_of(kind: str, source: str) -> Rules:
    """The texts of a constraint: kind schema (JSON text), grammar, regex, or choice (JSON text of a list of strings).

    Raises BadSchema, BadGrammar, BadRegex.
    """
    if kind == "regex":
        return Rules(regex_node(source))
    if kind == "choice":
        return Rules(Alt(tuple(text(choice) for choice in json.loads(source))))
    return grammar_rules(source) if kind == "grammar" else schema_rules(json.loads(source))


def network_of(kind: str, source: str, vocabulary: TokenSymbols) -> Network:
    """The same as a network. Raises Impossible and TooLarge too."""
    return Network(rules_of(kind, source), AFTER_THOUGHT, single_bytes(vocabulary))


def single_bytes(vocabulary: TokenSymbols) -> NDArray[np.bool_]:
    """Which bytes are tokens by themselves. A text of these can always be gone on with, whatever tokens came before."""
    lengths = np.diff(vocabulary.starts)
    symbols = vocabulary.symbols[vocabulary.starts[:-1][lengths == 1]]
    found = np.zeros(256, bool)
    found[symbols[symbols < 256]] = True
    return found
