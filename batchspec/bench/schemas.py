"""The constraints of `batchspec bench --schemas N`: N distinct regexes, each for an endless list of JSON objects.

The lists are endless so that a row decodes --gen tokens, and rounds with and without schemas have equally many rows. A --shape
has no tokenizer: its vocabulary is made up of all bytes and random words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from batchspec.automata.token_automaton import TokenAutomaton, TokenSymbols
from batchspec.batch.automata import AutomataCapacity, ConstraintOffsets
from batchspec.engine.features.automaton_places import AutomatonPlaces
from batchspec.engine.loop.engine import Engine
from batchspec.records import Request
from batchspec.structured.compiler import Compiler
from batchspec.text.tokenizer import Tokenizer

LONGEST_START = 60
"""In single rounds each row begins after up to this many tokens, so that rows are in different states."""
PIECES = (*"abcdefghijklmnopqrstuvwxyz", " ", " ", "e", "t", '"', '": ', ", ", "{", "}", "0", "17")


def symbols_of(tokenizer: Tokenizer | None, vocab_size: int) -> TokenSymbols:
    """The vocabulary's bytes, by the tokenizer or made up."""
    return _made_up(vocab_size) if tokenizer is None else tokenizer.symbols(vocab_size, {})


@cache
def _made_up(vocab_size: int) -> TokenSymbols:
    rng = random.Random(0)
    words = ("".join(rng.choices(PIECES, k=rng.randint(2, 6))).encode() for _ in range(vocab_size))
    return TokenSymbols.of([bytes([token]) if token < 256 else word for token, word in enumerate(words)])


def pattern(number: int) -> str:
    """A regex of objects, each with a text under a key of this number's own, a number, and one of three words."""
    return rf'(\{{"field_{number}": "[^"\\\n]{{0,60}}", "count": [0-9]{{1,4}}, "kind": "(red|green|blue)"\}}, )*'


def compiled(symbols: TokenSymbols, num: int, end_ids: Sequence[int]) -> list[TokenAutomaton]:
    """The automata of `num` patterns. end_ids: tokens that may end a row after an item."""
    compiler = Compiler(symbols, tuple(end_ids), thinks=False, may_begin=False)
    for number in range(num):
        compiler.begin("regex", pattern(number))
    found = [compiler.compile("regex", pattern(number)) for number in range(num)]
    return [automaton for automaton in found if isinstance(automaton, TokenAutomaton)]  # for the type: none is lazy


def begin_anywhere(engine: Engine, automata: Sequence[TokenAutomaton], request: Request) -> None:
    """Let every slot of the engine follow one of the automata, each from the state after some tokens."""
    rows = engine.executor.rows
    assert rows.automata is not None
    places = AutomatonPlaces(AutomataCapacity(num_tokens=automata[0].vocabulary.num_tokens))
    found: list[tuple[int, ConstraintOffsets]] = []
    for slot in range(len(rows.live)):
        automaton = automata[slot % len(automata)]
        assert places.bring(automaton)
        places.hold(automaton)
        found.append((slot, places.offsets(automaton, automaton.answer, _drawn(automaton, slot))))
    rows.automata.upload(places.take_uploads())
    rows.constrain(found)


def following(request: Request, automaton: TokenAutomaton) -> Request:
    """The request with an output that follows the automaton."""
    return replace(request, automaton=automaton, automaton_state=automaton.answer)


def _drawn(automaton: TokenAutomaton, seed: int) -> list[int]:
    """A random sequence of tokens that the automaton allows."""
    rng, state = random.Random(seed), automaton.answer
    tokens: list[int] = []
    for _ in range(rng.randint(0, LONGEST_START)):
        tokens.append(int(rng.choice(automaton.allowed(state).nonzero()[0])))
        state = automaton.walk(state, tokens[-1:])
    return tokens
