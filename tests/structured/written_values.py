"""Which values a schema's automaton lets be written, in any order of keys, and random texts of it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from batchspec.automata.lazy_automaton import ANSWER
from batchspec.automata.token_automaton import DEAD
from batchspec.structured.json_schema.schema import schema_rules
from batchspec.structured.lazy_dfa import LazyDfa
from batchspec.structured.network import Network
from batchspec.structured.regular import EMPTY

MAX_FORMS = 200
LONG_BYTES, LONGEST_BYTES = 60, 3_000
CLOSING = b'"}]0e'
"""What a text prefers after LONG_BYTES; one that has not ended after LONGEST_BYTES is given up."""


class Written:
    """The automaton of a schema. Raises BadSchema, Impossible and TooLarge."""

    def __init__(self, schema: Any) -> None:
        self._dfa = LazyDfa(Network(schema_rules(schema), EMPTY, np.ones(256, bool)), thinks=False, may_begin=False)

    def accepts(self, text: str) -> bool:
        state = self._dfa.after(ANSWER, text.encode())
        return state != DEAD and self._dfa.is_final(state)

    def writes(self, value: Any) -> bool:
        return any(self.accepts(text) for text in itertools.islice(forms(value), MAX_FORMS))

    def texts(self, count: int, seed: int) -> list[str]:
        rng = random.Random(seed)
        return [text.decode() for text in (self._text(rng) for _ in range(count)) if text is not None]

    def _text(self, rng: random.Random) -> bytes | None:
        dfa, state, text = self._dfa, ANSWER, bytearray()
        while len(text) < LONGEST_BYTES:
            dfa.explore([state])
            ways = np.flatnonzero(dfa.next[state, dfa.classes[:256]]).tolist()
            long = len(text) > LONG_BYTES
            if dfa.is_final(state) and (not ways or long or rng.random() < 0.3):
                return bytes(text)
            closing = [byte for byte in CLOSING if byte in ways] if long and rng.random() < 0.9 else []
            by_class: dict[int, list[int]] = {}
            for byte in ways:
                by_class.setdefault(int(dfa.classes[byte]), []).append(byte)
            text.append(closing[0] if closing else rng.choice(rng.choice(list(by_class.values()))))
            state = int(dfa.next[state, dfa.classes[text[-1]]])
        return None


def forms(value: Any) -> Iterator[str]:
    """The value as JSON text, with the keys of each object in every order, and whole numbers with and without a fraction."""
    if isinstance(value, dict):
        for order in itertools.permutations(value):
            for items in itertools.product(*(list(itertools.islice(forms(value[name]), 8)) for name in order)):
                pairs = (f"{json.dumps(name, ensure_ascii=False)}:{item}" for name, item in zip(order, items, strict=True))
                yield "{" + ",".join(pairs) + "}"
    elif isinstance(value, list):
        for items in itertools.product(*(list(itertools.islice(forms(one), 8)) for one in value)):
            yield "[" + ",".join(items) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and value % 1 == 0:
            yield str(int(value))
