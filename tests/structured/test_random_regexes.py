"""Random regular expressions: each text that is written matches by Python's `re`, and the others are those that the docs name."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from jsonschema import SchemaError
from jsonschema.validators import Draft202012Validator

from batchspec.structured.char_dfa import CharDfa
from batchspec.structured.dfa import dfa_of
from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.json_schema.strings import matching
from batchspec.structured.regex import BadRegex, regex_node
from batchspec.structured.regex_dialects import exactly_python, python
from batchspec.structured.regular import Chars, Impossible, TooLarge
from tests.structured.random_regexes import PLAIN_TEXTS, RandomRegexes, valid
from tests.structured.test_structured import matches
from tests.structured.written_values import Written

EVERY = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def check(seed: int) -> Counter[str]:
    """What became of one expression and of texts that may match it."""
    random = RandomRegexes(seed)
    pattern = random.pattern()
    try:
        node = regex_node(pattern)
        chars = CharDfa.of(node)
        dfa = dfa_of(node)
    except BadRegex:
        return Counter(["refused"])
    except TooLarge:
        return Counter(["too large"])
    except Impossible:
        chars, dfa = CharDfa.of(node), None
        assert chars.is_empty
    for text in random.samples(chars, 30):
        assert re.fullmatch(pattern, text), f"seed {seed}: {text!r} is written, and does not match {pattern!r}"
        assert dfa is not None
        assert matches(dfa, text.encode()), f"seed {seed}: {text!r} by {pattern!r}"
    counts = Counter(["compiled"])
    for text in random.texts(pattern, 30):
        wanted = re.fullmatch(pattern, text) is not None
        written = dfa is not None and matches(dfa, text.encode())
        assert wanted or not written, f"seed {seed}: {text!r} is written, and does not match {pattern!r}"
        if random.exact or PLAIN_TEXTS.fullmatch(text):
            assert written == wanted, f"seed {seed}: {text!r} matches {pattern!r}, and is not written"
        counts[f"{'written' if written else 'not written'}, {'matches' if wanted else 'does not match'}"] += 1
    return counts


def check_class(seed: int) -> bool:
    """One class of characters against each character there is. False if it is not supported."""
    random = RandomRegexes(seed)
    while not valid(pattern := random.char_class()):
        pass
    pattern = random.random.choice(("{}", "(?i:{})")).format(pattern)
    wanted = Chars.of((ord(run[0][0]), ord(run[0][-1])) for run in re.finditer(f"(?:{pattern})+", EVERY))
    try:
        exact, found = (CharDfa.of(regex_node(pattern, dialect=dialect)) for dialect in (exactly_python(), python()))
    except BadRegex:
        return False
    assert _chars(exact) == wanted, f"seed {seed}: {pattern!r}"
    assert not _chars(found).both(wanted.inverted()).ranges, f"seed {seed}: {pattern!r}"
    return True


def _chars(dfa: CharDfa) -> Chars:
    return Chars.of((low, high) for low, high, _ in dfa.moves[0]) if dfa.moves else Chars(())


def check_schema(seed: int) -> Counter[str]:
    """A schema of patterns against `jsonschema`, which searches with Python's `re`."""
    random = RandomRegexes(seed)
    patterns = random.pattern(whole=random.random.random() < 0.4), random.pattern(whole=False)
    schema = random.schema(*patterns)
    try:
        Draft202012Validator.check_schema(schema)
        draft, found = Draft202012Validator(schema), Written(schema)
    except (BadSchema, TooLarge) as error:
        return Counter([type(error).__name__])
    except SchemaError:
        return Counter(["not valid"])  # a lookahead before flags of the whole expression
    except Impossible:
        draft, found = Draft202012Validator(schema), None
    try:
        near = [text for pattern in patterns for text in random.samples(matching(pattern, "", sure_=False), 30)]
    except (BadSchema, TooLarge):
        near = []
    near = list(dict.fromkeys([*near, *random.texts(str(schema), 30)]))
    values: list[Any] = near if schema["type"] == "string" else [{text: one} for text in near for one in (None, True)]
    try:
        texts = [json.loads(text) for text in found.texts(3, seed)] if found is not None else []
        texts += [value for value in values if found is not None and found.writes(value)]
        valid_ones = [value for value in values if draft.is_valid(value)]
    except TooLarge:
        return Counter(["TooLarge"])
    for value in texts:
        assert draft.is_valid(value), f"seed {seed}: {json.dumps(value)} is not valid by {json.dumps(schema)}"
    assert found is not None or not valid_ones, f"seed {seed}: {json.dumps(valid_ones[0])} is valid by {json.dumps(schema)}"
    return Counter({"compiled": 1, "values written": len(texts), "values valid": len(valid_ones)})


@pytest.mark.second
def test_texts_of_random_regexes_match_by_python() -> None:
    found = sum(map(check, range(150)), Counter[str]())
    assert found["compiled"] > 100
    assert found["written, matches"] > 10 * found["not written, matches"] > 0


@pytest.mark.second
def test_random_classes_have_the_characters_that_python_finds() -> None:
    assert sum(map(check_class, range(25))) > 20


@pytest.mark.second
def test_texts_of_random_patterns_of_schemas_are_valid() -> None:
    found = sum(map(check_schema, range(25)), Counter[str]())
    assert found["compiled"] > 12
    assert found["values written"] > 300


@pytest.mark.slow
def test_many_random_regexes() -> None:
    print(sum(map(check, range(5_000)), Counter[str]()))
    print(sum(map(check_class, range(1_000))))
    print(sum(map(check_schema, range(3_000)), Counter[str]()))
