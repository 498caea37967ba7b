"""Regular expressions of model folders: they match as with `re`, none takes for ever, and odd ones are refused in one line."""

from __future__ import annotations

import fnmatch
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.checkpoint.name_patterns import BadPattern, checked_pattern, joined, parse_pattern
from batchspec.errors import CheckpointError
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.modelopt import read_modelopt
from batchspec.model.quant.module_names import begins_with
from batchspec.model.quant.plain import PLAIN

ATOMS = st.sampled_from([
    "a", "b", "A", r"\.", ".", "[ab]", "[^a]", r"\d", r"\D", r"\w", r"\W", r"\s", r"\b", r"\B", "^", "$", r"\A", r"\Z", "[a-c1]",
    r"[^\d.]", "(?!)", "(?<=a)", r"(?<!b\.)", r"\n",
])
GROUPS = ("(?:", "(", "(?P<x>", "(?=", "(?!", "(?i:", "(?s:", "(?-i:", "(?a:")
COUNTS = ("", "", "", "*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "??")


def _larger(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    one = st.builds(lambda begin, inner: f"{begin}{inner})", st.sampled_from(GROUPS), part) | ATOMS
    repeated = st.builds(lambda item, count: item + (count if item not in "^$" else ""), one, st.sampled_from(COUNTS))
    return st.lists(st.lists(repeated, max_size=3).map("".join), min_size=1, max_size=3).map("|".join)


PATTERNS = st.builds(str.__add__, st.sampled_from(["", "", "(?i)", "(?m)", "(?s)"]), st.recursive(ATOMS, _larger, max_leaves=8))


@pytest.mark.second
@given(PATTERNS, st.text("aabbAB.1c\n_ ", max_size=9))
def test_an_expression_matches_the_names_that_python_matches(pattern: str, name: str) -> None:
    try:
        wanted = re.compile(pattern)
    except re.error:
        with pytest.raises(BadPattern):
            parse_pattern(pattern)
        return
    found = parse_pattern(pattern)
    slow = "(?:(?:zz?)*)*z|"  # `re` does not match it, because this branch repeats a repetition
    assert (found.begins(name), found.is_whole(name)) == (wanted.match(name) is not None, wanted.fullmatch(name) is not None)
    if not pattern.startswith("(?") and "?P" not in pattern:
        also = parse_pattern(f"{slow}(?:{pattern})")
        assert also.quick is None
        assert (also.begins(name), also.is_whole(name)) == (found.begins(name), found.is_whole(name))


PUBLISHED = (
    r".*lm_head", r".*mlp.gate$", r"^(?!.*mlp.experts).*", r"^(?!.*self_attn\.(?:q_proj|k_proj|v_proj)$).*$", r".*\.1\..*gate.*",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp).*?\.(?:q_proj|v_proj))|"
    r"(?:\bmodel\.layers\.[\d]{1,}(?!.*\.experts\.\d)\..*?(?:self_attn|mlp).*?\.(?:(?:q_proj|gate_proj)))",
    r"^(?!.*visual).*(?:o_proj|up_proj|v_proj|down_proj|k_proj|q_proj|gate_proj).*",
)
"""Forms that folders on the Hugging Face Hub have in quantization_config, and adapters in target_modules."""
NAMES = (
    *(f"model.layers.{layer}.{name}" for layer in (0, 1, 11) for name in (
        "self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.gate_proj", "mlp.experts.3.gate_proj",
    )), "lm_head", "visual.blocks.1.q_proj",
)


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_expressions_match_as_with_python(pattern: str) -> None:
    for name in NAMES:
        assert parse_pattern(pattern).begins(name) == (re.match(pattern, name) is not None), name
        assert parse_pattern(pattern).is_whole(name) == (re.fullmatch(pattern, name) is not None), name


def test_joined_expressions_match_what_one_of_them_matches() -> None:
    patterns = (*PUBLISHED, "(?i)LM_HEAD", "(?P<x>mo)del.*experts")
    assert len(joined(patterns)) > 1
    for name in NAMES:
        assert any(one.begins(name) for one in joined(patterns)) == any(re.match(own, name) for own in patterns), name


@pytest.mark.parametrize("pattern", [
    "(([a-z._0-9]+)+)+!", "(a?){50}a{50}!", "((a*)*)*b", "(a|a)" * 100 + "b", "(x+x+)+y", "(?=([a-z._0-9]+)+!)m", "(.*a.*)*b",
    "(?:(?:(?:a{0,50}){0,50}){0,50}){0,50}b", "(|)" * 60 + "!", ".*" * 30 + "!", "(?!([a-z.]+)+!)x",
    "(?:(?=([a-z._0-9]+)+!)m|m)*b",
])
def test_an_expression_that_takes_python_for_ever_takes_no_time(pattern: str) -> None:
    began = time.process_time()
    assert not parse_pattern(pattern).begins("model.layers.10.self_attn.q_proj.aaaaaaaaaaaaaaaaaaaa")
    assert not parse_pattern(pattern).begins("a" * 100)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(("pattern", "said"), [
    ("(", "is not a regular expression"), ("a{99999999999999}", "is not a regular expression"),
    ("a{" + "9" * 5000 + "}", "is not a regular expression"), ("(" * 5000 + ")" * 5000, "is not a regular expression"),
    ("(?:" * 150 + "a" + ")?" * 150, "nested more than 100 deep"), ("a" * 200_000, "has 200,000 characters, more than"),
    (r"(a)\1", "a reference to a group"), ("(?P<n>a)(?P=n)", "a reference to a group"), ("(a)?(?(1)b|c)", "a condition on"),
    ("(?>ab)", "an atomic group"), ("a++", "a possessive repetition"), ("(?i)é", "outside of ASCII with the flag i"),
    ("(?L)a", "is not a regular expression"), ("\x1b[2J\n(", "is not a regular expression"),
])
def test_an_odd_expression_is_refused_in_one_line(pattern: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)) as refused:
        checked_pattern(ConfigReader({"ignore": [pattern]}, "config.json"), "ignore", pattern)
    message = str(refused.value)
    assert len(message) <= 300
    assert message.isprintable()
    assert message.startswith("config.json: ignore=[")
    assert message.endswith("; correct it")


STARS = ("*", "model.*", "*.q_proj", "model.*.1.*.q?proj*", "*[ab]*", "*[!.]_proj*", "*[*]*", "a[*", "*.layers.*.mlp.*", "[]*]*x")


@pytest.mark.parametrize("name", STARS)
def test_names_with_stars_of_modelopt_match_as_file_names_do(name: str) -> None:
    config: dict[str, Any] = {"quant_algo": "FP8", "exclude_modules": [name]}
    formats = read_modelopt(ConfigReader(config, "config.json"))
    assert isinstance(formats, Formats)
    for module in (*NAMES, "a[b", "*x", "]x", "model.a*"):
        wanted = module.startswith(name[:-1]) if not set(name[:-1]) & set("*?[") else fnmatch.fnmatchcase(module, name)
        assert (formats.of(module) is PLAIN) == wanted, module


def test_many_modules_that_are_named_one_by_one_are_matched_at_once() -> None:
    patterns = tuple(rf"model\.layers\.{layer}\.self_attn" for layer in range(300))
    began = time.process_time()
    assert sum(begins_with(patterns, f"model.layers.{i}.self_attn.q_proj") for i in range(3000)) == 300
    assert not any(begins_with(patterns, f"model.layers.{i}.mlp.up_proj") for i in range(3000))
    assert time.process_time() - began < 2
