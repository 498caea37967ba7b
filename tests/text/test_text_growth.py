"""A tokenizer whose rules let text grow without bounds is refused in one line; rules of real tokenizers pass."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from batchspec.errors import CheckpointError
from batchspec.text.text_growth import MAX_GROWTH, MAX_STRING, growth_of, growth_problem
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.models import make_tokenizer

HUGE = "x" * 10_000_000
LOWER, NFKC, BYTES = {"type": "Lowercase"}, {"type": "NFKC"}, {"type": "ByteLevel"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
PREPEND = {"type": "Prepend", "prepend": "\u2581"}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
PRE_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
Facts = dict[str, Any]


def replace(content: str, *, string: str | None = None, regex: str | None = None) -> Facts:
    return {"type": "Replace", "pattern": {"String": string} if regex is None else {"Regex": regex}, "content": content}


def chain(name: str, *steps: Facts) -> Facts:
    return {"type": "Sequence", name: list(steps)}


def charsmap(*replacements: str) -> Facts:
    data = (8).to_bytes(4, "little") + bytes(8) + b"".join(text.encode() + b"\0" for text in replacements)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def changed(folder: Path, rules: Facts) -> Path:
    """The folder of a small tokenizer with these rules in its tokenizer.json."""
    path = make_tokenizer(folder) / "tokenizer.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts |= {name: {**facts[name], **rule} if name == "model" else rule for name, rule in rules.items()}
    path.write_text(json.dumps(facts), encoding="utf-8")
    return folder


def added(content: str) -> Facts:
    return {"id": 400, "content": content, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)}


@pytest.mark.parametrize(
    "rules",
    [
        {"normalizer": NFKC},
        {"normalizer": chain("normalizers", PREPEND, SPACES), "decoder": chain("decoders", replace(" ", string="\u2581"))},
        {"normalizer": chain("normalizers", {"type": "NFKD"}, {"type": "StripAccents"}, LOWER), "pre_tokenizer": METASPACE},
        {"normalizer": chain("normalizers", *(replace(" ", regex=regex) for regex in (r"\s+", r"\n{2,}", "``", "[\u2018]")))},
        {"normalizer": chain("normalizers", replace("...", string="\u2026"), replace("'", string="\u2019"))},
        {"pre_tokenizer": chain("pretokenizers", {"type": "Digits", "individual_digits": True}, PRE_BYTES)},
    ],
)
def test_rules_of_real_tokenizers_pass(rules: Facts, tmp_path: Path) -> None:
    Tokenizer(changed(tmp_path, rules))


def test_a_charsmap_passes_by_the_longest_text_that_it_writes() -> None:
    real = {"normalizer": chain("normalizers", {"type": "NFKD"}, LOWER, charsmap("a", "\u0635" * 16)), "pre_tokenizer": METASPACE}
    assert growth_problem(real) is None
    assert growth_problem({"normalizer": charsmap("a", "b" * MAX_GROWTH)}) is None
    assert "more than 10,000 bytes" in str(growth_problem({"normalizer": charsmap("a", "b" * (MAX_GROWTH + 1))}))


MANY_IDS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"A": {"id": "A", "ids": [1] * 1001, "tokens": ["a"] * 1001}},
}


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"normalizer": replace(HUGE, regex=".")}, "normalizer holds a string of 10,000,000 characters, more than the maximum"),
        ({"normalizer": {"type": "Prepend", "prepend": HUGE}}, "normalizer holds a string"),
        ({"normalizer": chain("normalizers", *[replace("aa", string="a")] * 30)}, "encoding may make more than 10,000"),
        ({"normalizer": chain("normalizers", *[replace("a", regex="(?=.)")] * 30)}, "encoding may make more"),
        ({"normalizer": chain("normalizers", *[replace("x", regex=r"\p{L}*")] * 30)}, "encoding may make more"),
        ({"normalizer": chain("normalizers", *[BYTES] * 30)}, "encoding may make more"),
        ({"pre_tokenizer": chain("pretokenizers", *[PRE_BYTES] * 30)}, "encoding may make more"),
        ({"decoder": replace(HUGE, string="a")}, "decoder holds a string"),
        ({"decoder": chain("decoders", *[replace("aa", string="a")] * 30)}, "decoding may make more than 10,000 bytes of a byte"),
        ({"post_processor": MANY_IDS}, "1,001 tokens are added to each prompt, more than the maximum of 1,000"),
        ({"model": {"end_of_word_suffix": HUGE}}, "model holds a string"),
        ({"model": {"continuing_subword_prefix": "xxxx"}}, "cannot read it"),  # a panic of the library
        ({"model": {"vocab": {HUGE: 0}, "merges": []}}, "an entry of the vocabulary has"),
        ({"added_tokens": [added("y" * (MAX_STRING + 1))]}, "an added token has 16,385 characters, more than the maximum"),
    ],
)
def test_rules_that_let_text_explode_are_refused(rules: Facts, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        Tokenizer(changed(tmp_path, rules))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_added_token_of_another_file_counts_too(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path) / "tokenizer_config.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**facts, "additional_special_tokens": ["z" * 20_000]}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="an added token has 20,000 characters"):
        Tokenizer(tmp_path)


STRINGS = st.text("ab \u2581\u00e9", max_size=3)
BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
REGEXES = ("a", "a*", "a|", r"\b", "(?=a)", "(?<=b)", "^", "$", r"\s+", "[^a]", r"\p{L}*", "a??", "(a?){0,2}", r"\Ga*")
STEPS = st.one_of(
    st.sampled_from([LOWER, BYTES, *({"type": form} for form in ("NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Nmt"))]),
    st.just({"type": "BertNormalizer", **BERT}),
    STRINGS.map(lambda text: {"type": "Prepend", "prepend": text}),
    st.builds(lambda string, content: replace(content, string=string), STRINGS.filter(bool), STRINGS),
    st.builds(
        lambda regex, content: replace(content, regex=regex),
        st.sampled_from(REGEXES),
        STRINGS,
    ),
)


@pytest.fixture(scope="module")
def facts_of_any(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    path = make_tokenizer(tmp_path_factory.mktemp("any")) / "tokenizer.json"
    found: Facts = json.loads(path.read_text(encoding="utf-8"))
    return found


@given(
    steps=st.lists(STEPS, max_size=4),
    text=st.text("abA \u0130\u00e9\u4e00\ufdfa\u1f82\n\u0344\U0001d160", min_size=1, max_size=6),
)
def test_no_text_grows_more_than_the_bound_says(steps: list[Facts], text: str, facts_of_any: Facts) -> None:
    made = Library.from_str(json.dumps({**facts_of_any, "normalizer": chain("normalizers", *steps)}))
    assert made.normalizer is not None
    try:
        written = made.normalizer.normalize_str(text)
    except BaseException as error:
        assume(type(error).__name__ != "PanicException")  # a defect of the library: the row becomes an error row
        raise
    # Once more than the characters: a match of nothing at the end of the text.
    assert len(written.encode()) <= growth_of(steps) * (len(text.encode()) + 1)
