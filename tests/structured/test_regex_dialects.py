"""What classes and the flag i mean: decode.regex writes what Python's `re` takes, a schema's pattern what ECMA-262 takes too."""

from __future__ import annotations

import re

import pytest

from batchspec.structured.char_dfa import CharDfa
from batchspec.structured.dfa import dfa_of
from batchspec.structured.regex import regex_node
from batchspec.structured.regex_dialects import equal_letters, exactly_python, letter_pairs, possible, python, sure
from batchspec.structured.regular import Chars
from tests.structured.test_structured import matches
from tests.structured.written_values import Written

EVERY = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
CASED = "".join(char for char in EVERY if char.lower() != char or char.upper() != char)


def one(char: str) -> Chars:
    return Chars(((ord(char), ord(char)),))


def text_of(chars: Chars) -> str:
    return "".join(chr(code) for low, high in chars.ranges for code in range(low, high + 1))


@pytest.mark.parametrize(
    ("regex", "written", "left_out", "no_match"),
    [
        (r"\w", "aZ_0", "éⅧ中", "- "), (r"\W", "- \xa0€😀", "", "aé中٠"), (r"[^\w]", "-\xa0😀", "", "aé中_"),
        (r"\d", "09", "٠𝟎", "a²"), (r"\D", "a²é", "", "0٠𝟎"), (r"[^\d]", "a²", "", "0٠"),
        (r"\s", " \t\n\r\f\v", "\x1c\xa0\u3000", "a\ufeff"), (r"\S", "a\ufeffé", "", " \x1c\xa0\u3000"),
        (r"[^\W]", "aé中٠_", "", "- "), (r"[^\W\d_]", "aé中", "", "٠_-"), (r"[^\S]", " \xa0\x1c", "", "a"),
        (r"[\s\S]", "a \n\xa0\x1c😀", "", ""), (r"[\w\W]", "aé-", "", ""), (r"[\D\d]", "0٠a", "", ""),
        (r"[^\s\S]|b", "b", "", "a "),
        (r"[\Wé]", "-é", "", "aÉ"), (r"[\w-]", "a-", "é", " "), (r"[a\-z]", "a-z", "", "b"), (r"[]a]", "]a", "", "b"),
        (r"[^]a]", "b[", "", "]a"), (r"[^^]", "a", "", "^"), (r"[[a]", "[a", "", "]"), (r"[\b]", "\b", "", "b"),
        (r"[a&&b]", "a&b", "", "c"),
        ("(?i:k)", "kK", "\u212a", "l"), ("(?i:s)", "sS", "ſ", "z"), ("(?i)i", "iI", "İı", "j"), ("(?i:é)", "éÉ", "", "e"),
        ("(?i:[^k])", "aé", "", "kK\u212a"), ("(?i:[^a-z])", "1é", "", "aZſİı\u212a"), ("(?i:[^ı])", "a", "", "iIİı"),
        ("(?i:ß)", "ß", "ẞ", "s"), ("(?i:[µ])", "µ", "μΜ", "m"), ("(?-i:k)|(?i:x)", "kxX", "", "K"),
        ("(?i:(?-i:k))", "k", "", "K"),
        ("(?i:\U00010428)", "\U00010400\U00010428", "", "a"), ("(?i:[\U00010428é])", "\U00010400\U00010428Éé", "", "a"),
        (".", "aé\r\u2028", "", "\n"), ("(?s).", "a\n\u2028", "", ""), ("(?s:.)", "\n", "", ""), ("(?s)(?-s:.)", "a", "", "\n"),
        (r"\x41|\u0042|\U00000043|\104|\N{LATIN CAPITAL LETTER E}|\0", "ABCDE\0", "", "F"),
        (r"[\ud800-\uffff]", "\uffff\ue000", "", "a"),
    ],
)
def test_a_character_is_written_only_if_python_takes_it(regex: str, written: str, left_out: str, no_match: str) -> None:
    """left_out: matches by `re` that the docs name."""
    dfa = CharDfa.of(regex_node(regex))
    found = {char for low, high, _ in dfa.moves[0] for char in written + left_out + no_match if low <= ord(char) <= high}
    assert {char for char in written + left_out + no_match if re.fullmatch(regex, char)} == {*written, *left_out}
    assert found == {*written}


@pytest.mark.parametrize(
    ("regex", "written", "not_written"),
    [
        ("a$", ["a"], ["a\n"]), (r"\Aa\Z", ["a"], ["a\n"]), ("a$|b", ["a", "b"], ["a\n"]), ("(^a|b)(c|d$)", ["ac", "bd"], ["c"]),
        ("a{,2}", ["", "aa"], ["aaa", "a{,2}"]), ("a{,}", ["", "aaa"], ["a{,}"]), ("a{}", ["a{}"], ["a", ""]),
        ("a{1,2,3}", ["a{1,2,3}"], ["a"]),
        ("a{2}?", ["aa"], ["a", ""]), ("a(?#b)+", ["a", "aa"], ["", "ab"]), ("(a||b)", ["", "a", "b"], ["ab"]),
        ("(?i)a(?-i:b)|c", ["Ab", "C"], ["AB"]),
        (r"\ud83d\ude00|a", ["a"], ["😀"]), ("(?P<a·>a)", ["a"], []), ("(?u)a(?u:b)", ["ab"], ["aB"]),
    ],
)
def test_a_text_is_written_if_python_takes_it(regex: str, written: list[str], not_written: list[str]) -> None:
    dfa = dfa_of(regex_node(regex))
    for text in (*written, *not_written):
        assert matches(dfa, text.encode()) == (re.fullmatch(regex, text) is not None) == (text in written), text


@pytest.mark.second
def test_letters_are_equal_if_python_finds_them_equal() -> None:
    assert {*re.findall(f"[{CASED}]", EVERY, re.IGNORECASE)} == {*CASED}, "only these have others that are equal"
    for char in CASED:
        equal = text_of(equal_letters(one(char)))
        assert {*equal} == {*re.findall(char, CASED, re.IGNORECASE)}, char
        assert {char} <= {*text_of(letter_pairs(one(char)))} <= {*equal}, char
        assert len(folded := char.casefold()) > 1 or folded in equal, f"{char}: ECMA-262 takes {folded} for equal"


def test_a_pair_of_letters_is_a_capital_and_a_small_one() -> None:
    pairs = [text_of(letter_pairs(one(char))) for char in "kKséΣſİı\u212a1中"]
    assert pairs == ["Kk", "Kk", "Ss", "Éé", "Σσ", "ſ", "İ", "ı", "\u212a", "1", "中"]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"pattern": "^(?i:[^k])$"}, "aé", "kK\u212a"), ({"pattern": "^(?i:[^s])$"}, "a", "sSſ"),
        ({"pattern": "^(?i:[^i])$"}, "a", "iIİı"), ({"not": {"pattern": "(?i:k)"}}, "aé", "kK\u212a"),
        ({"not": {"pattern": "(?i:[a-z])"}}, "1é", "azſİı\u212a"), ({"not": {"pattern": "(?i:é)"}}, "ea", "éÉ"),
        ({"pattern": "^(?!(?i:s))"}, "aé", "sSſ"), ({"pattern": "^(?=(?i:[^i]))"}, "aé", "iIİı"),
        ({"not": {"pattern": "(?i:[^k])"}}, "kK", "aé"), ({"not": {"pattern": "^(?i:µ)"}}, "a", "µμΜ"),
        ({"pattern": r"^[\s\S]$"}, "a\xa0\ufeff", ""), ({"pattern": "(?i)^k$"}, "kK", "a"),
        ({"pattern": "^(?s:.)$"}, "a\u2028", ""),
    ],
)
def test_a_pattern_of_a_schema_writes_what_all_validators_take(schema: dict[str, object], valid: str, invalid: str) -> None:
    written = Written({"type": "string", "minLength": 1, **schema})
    assert {char for char in valid + invalid if written.writes(char)} == {*valid}


def test_dialects_are_subsets_of_one_another() -> None:
    """What surely matches is what Python takes, and that possibly matches."""
    for letter in "dwsDWS":
        dialects = sure(), exactly_python(), possible()
        first, exact, last = (dialect.named(letter) for dialect in dialects)
        assert first.both(exact) == first
        assert exact.both(last) == exact
        assert python().named(letter).both(exact) == python().named(letter)
