"""Tool calls in the text of an answer: each form round trip through a template, typed arguments, what stays text, whole jobs."""

from __future__ import annotations

import json
import pickle
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import batchspec
from batchspec import run
from batchspec.commands import export, plan
from batchspec.config.overrides import overrides_of
from batchspec.config.schema import KEYS
from batchspec.errors import ConfigError
from batchspec.records import Completion, Thinking
from batchspec.text.thinking import find_think_tokens
from batchspec.text.tokenizer import Tokenizer
from batchspec.tool_calls.form import Tools, typed_value
from batchspec.tool_calls.probe import ARGUMENTS, FUNCTION, AnswerSamples
from batchspec.tool_calls.registry import FORMS, choose_form, form_asked_for
from batchspec.tool_calls.split import CallParser, call_id
from batchspec.warm.conversations import Turn
from tests.helpers.engines import request
from tests.helpers.models import make_checkpoint, make_thinking_tokenizer, make_tokenizer
from tests.helpers.one_row import OneRow
from tests.tool_calls.tool_templates import TEMPLATES, chat_template, tool, tools_text, written

TOOLS = (
    tool("f", x="integer", s="string", o="object", a="array", b="boolean", n="number"),
    tool("g.h-2"),
    tool("say", text="string"),
)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {"x": 5, "s": 'a "b"\n\\ é 🎈 </tool_call> </function> [TOOL_CALLS] }', "o": {"k": [1, {}]}, "a": [], "b": True}),
    ("say", {"text": "5"}),
]


def parsed(name: str, text: str, *tools: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls, (name, arguments), of an answer."""
    done = completion_of(name, text, *tools)
    assert done.text is not None
    calls = [] if done.tool_calls is None else json.loads(done.tool_calls)
    return done.text, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def completion_of(name: str, text: str, *tools: dict[str, Any]) -> Completion:
    form = FORMS[name.partition(",")[0]]
    done = Completion(request_id="a", row_index=3, sample_index=0, shard=0, status="ok", finish_reason="stop", text=text)
    row = replace(request(3, [1], cap=9), tools=tools_text(*(tools or TOOLS)))
    return CallParser(form, decode).parsed(done, row, list(map(ord, text)))


def decode(ids: Any, skip_special: bool) -> str:
    """Tokens are characters; a heart is a special token."""
    return "".join(chr(token) for token in ids if not (skip_special and chr(token) == "♥"))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("calls", [CALLS, CALLS[1:], [("f", {})]], ids=["two", "one", "no arguments"])
def test_calls_that_a_template_writes_are_read_back(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    if name == "glm4":
        calls = calls[:1]  # it has a turn for each call
    assert parsed(name, written(name, calls)) == ("", calls)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_that_which_reads_the_call_that_the_template_writes(name: str, tmp_path: Path) -> None:
    form = choose_form("auto", samples_of(tmp_path, TEMPLATES[name]), channels=False)
    assert form is not None
    assert form.name == name.partition(",")[0]
    assert pickle.loads(pickle.dumps(form)) == form, "admission in other processes has it too"


def samples_of(folder: Path, template: str) -> AnswerSamples:
    return Tokenizer(make_tokenizer(folder, chat_template=template)).chats.answer_samples


@pytest.mark.parametrize(
    ("asks", "name"),
    [
        ('respond only with <|tool_call|> followed by a JSON list of tools', "granite"),
        ("<|tool|>{{ tools | tojson }}<|/tool|>", "phi4"),
        ("answer <tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>", "hermes"),
        ("write [func_name1(params_name1=params_value1)]", "pythonic"),
        ("<|tool_list_start|>", "pythonic"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ('like <TOOLCALL>[{"name": "tool_name1", "arguments": "tool_args1"}]</TOOLCALL>', "nemotron_json"),
        ("<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>", "seed_oss"),
        ("call them", None),
    ],
)
def test_of_a_template_that_writes_no_calls_the_prompt_with_tools_says_the_form(
    asks: str, name: str | None, tmp_path: Path
) -> None:
    """Not the template's own text: a word in a branch that no prompt reaches says nothing."""
    never = "{{ '<tool_call>[TOOL_CALLS]<arg_key><minimax:tool_call>' if false }}"
    template = never + "{{ tools | tojson if tools }}{% if tools %}" + asks + "{% endif %}"
    template += "{% for m in messages %}{{ m.content }}{% endfor %}"
    form = choose_form("auto", samples_of(tmp_path, template), channels=False)
    assert (None if form is None else form.name) == name


def test_a_template_that_writes_calls_in_an_unknown_form_has_none(tmp_path: Path) -> None:
    """Calls would be searched for in a form that the model does not write."""
    template = "{{ '<tool_call>' if tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}call {{ c.function.name }}"
    template += " with {{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
    assert choose_form("auto", samples_of(tmp_path, template), channels=False) is None


def test_the_response_template_comes_before_the_chat_template_and_a_key_before_both() -> None:
    """Qwen 3.5's tokenizer has transformers' response template, which says what its answers are."""
    tags = {"tag_pattern": "<parameter=(?P<key>[^>]+)>(?P<value>.*?)</parameter>"}
    calls = {"open_pattern": "<tool_call>\\s*<function=(?P<name>[^>]+)>", "content": "xml-inline", "content_args": tags}
    described = json.dumps({"fields": {"tool_calls": calls}})
    hermes = written("hermes", [(FUNCTION, ARGUMENTS)])

    def chosen(setting: str, text: str = "", channels: bool = False) -> str | None:
        form = choose_form(setting, AnswerSamples(text, hermes), channels=channels)
        return None if form is None else form.name

    assert chosen("auto") == "hermes"
    assert chosen("auto", described) == "qwen3_coder"
    assert chosen("glm", described) == "glm"
    assert chosen("none", described) is None
    assert chosen("auto", channels=True) is None
    with pytest.raises(ConfigError, match=r"model.tool_calls=none has no effect: .* \(harmony\)"):
        chosen("none", channels=True)
    assert form_asked_for("{{ messages }}") is None


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"llama3_json", "pythonic", "glm4"}))
def test_text_around_calls_is_the_content(name: str) -> None:
    text = written(name, CALLS[1:], content="Let me see.\n")
    assert parsed(name, text) == ("Let me see.", CALLS[1:])
    assert parsed(name, text + "\nDone.♥") == ("Let me see.\nDone.", CALLS[1:]), "without special tokens"


@pytest.mark.parametrize(
    ("name", "text", "content", "found"),
    [
        ("llama3_json", 'Sure.<|python_tag|>{"name": "zzz", "parameters": {}}', "Sure.", [("zzz", {})]),
        ("llama3_json", '{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", {"x": 1})]),  # arguments as a string
        ("llama3_json", '{"type": "function", "function": {"name": "f"}}', "", [("f", {})]),
        ("pythonic", "Sure.<|tool_call_start|>[zzz.a(x=-1)]<|tool_call_end|>", "Sure.", [("zzz.a", {"x": -1})]),
        ("pythonic", "<|python_start|>[f(s='<|python_end|>')]<|python_end|>", "", [("f", {"s": "<|python_end|>"})]),
        ("pythonic", "[f(x=1, b=true, o={'a': (1, null)}, s='\\ud800')]", "",
         [("f", {"x": 1, "b": True, "o": {"a": [1, None]}, "s": "\ud800"})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}', "", [("f", {"x": 1})]),  # the last mark is missing
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "say"}]</tool_call>', "", [("f", {}), ("say", {})]),
        ("hermes", '<tool_call>{"name": "no_tool"}</tool_call>', "", [("no_tool", {})]),  # as vLLM: the user's loop answers it
        ("hermes", '<tool_call>{"name": }</tool_call><tool_call>{"name": "f"}</tool_call>',
         '<tool_call>{"name": }</tool_call>', [("f", {})]),  # the malformed one is text
        ("mistral", '[TOOL_CALLS]f{"x": 1}', "", [("f", {"x": 1})]),
        ("qwen3_coder", "<function=f>\n<parameter=x>\n5\n</parameter>\n</function>", "", [("f", {"x": 5})]),
        ("qwen3_coder", "<function=say><parameter=text>\n\n</parameter> \n</parameter></function>", "",
         [("say", {"text": "\n</parameter> "})]),
        ("glm", "<tool_call>say<arg_key>text</arg_key><arg_value>5</arg_value></tool_call>", "", [("say", {"text": "5"})]),
        ("gemma4", 'Sure.<|tool_call>call:f{x: -1.5, o:{<|"|>a b<|"|>:[]}}', "Sure.", [("f", {"x": -1.5, "o": {"a b": []}})]),
        ("granite", '<|tool_call|> [{"name": "f"}, {"name": "say"}]', "", [("f", {}), ("say", {})]),
        ("phi4", '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]', "", [("f", {"x": 1})]),
        ("nemotron_json", 'So: f\n</think>\n\n<TOOLCALL>[{"name": "f", "arguments": "{\\"x\\": 1}"}]</TOOLCALL>\n',
         "So: f\n</think>", [("f", {"x": 1})]),
        ("nemotron_json", '<TOOLCALL>[{"name": "f"}, {"name": "say"}]', "", [("f", {}), ("say", {})]),
        ("glm4", 'f\n{"x": 1}\n', "", [("f", {"x": 1})]),
        ("pythonic", "<function_calls>[f(x=1)]</function_calls>Done.", "Done.", [("f", {"x": 1})]),
        ("seed_oss", "Sure.<seed:tool_call>\n<function=f></function>\n</seed:tool_call>", "Sure.", [("f", {})]),
    ],
)
def test_other_ways_to_write_a_call_are_read(name: str, text: str, content: str, found: Any) -> None:
    assert parsed(name, text) == (content, found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"} and </tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "cut off'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 200 + "1" + "}" * 200 + "}</tool_call>"),
        ("llama3_json", '{"name": "Ann", "parameters": {"x": 1}}'),  # an answer in JSON that names no tool
        ("llama3_json", 'The answer: {"name": "f", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", '[TOOL_CALLS][{"name": "f"}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": '),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n5\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\nx\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=f>\n<parameter=x>\n5\n</parameter>\n<parameter=s>\nabc"),
        ("glm", "<tool_call>get_wea"),  # cut off in the name
        ("glm", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>5</arg_value>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">5</parameter>'),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"),
        ("gemma4", "<|tool_call>call:f{x:1,}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{x:1<tool_call|>"),
        ("gemma4", '<|tool_call>call:f{x:<|"|>a}<tool_call|>'),
        ("gemma4", "<|tool_call>call:f{1}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{x:NaN}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{x:" + "[" * 100_000),
        ("gemma4", "<|tool_call>call:f{x:1}and"),
        ("glm4", 'f\n{"x": 1} and'),
        ("glm4", 'Ann\n{"x": 1}'),
        ("glm4", 'f {"x": 1}'),
        ("granite", '<|tool_call|>[{"name": "f"}'),
        ("phi4", '<|tool_call|>[{"name": "f"}] and <|/tool_call|>'),
        ("nemotron_json", '<TOOLCALL>[{"name": "f", "arguments": {}]</TOOLCALL>'),
        ("pythonic", "<function_calls>f(x=1); y = 2</function_calls>"),
        ("pythonic", "f(x=1)"),
        ("pythonic", "[Ann(x=1)]"),
        ("pythonic", "[]"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(**{'x': 1})]"),
        ("pythonic", "[f(x=1, x=2)]"),
        ("pythonic", "[f(x=open('a'))]"),
        ("pythonic", "[f(x=1e999)]"),
        ("pythonic", "[f(x={1: 2})]"),
        ("pythonic", "<|python_start|>" + "[" * 100_000 + "<|python_end|>"),
        ("pythonic", "[f(x=" + "-" * 100_000 + "1)]"),
        ("pythonic", "[f(x=b'a')]"),
    ],
)
def test_what_is_no_complete_call_stays_text(name: str, text: str) -> None:
    assert parsed(name, text) == (text, [])


_MARKS = ["<function=f>", "<parameter=x>", "</parameter>", "f", '"name": "f"', "[f(x=", ")]", "<arg_value>", "</arg_value>", ": ",
          "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|python_start|>"]
_KEYS = st.text(string.ascii_letters + "_", min_size=1, max_size=6)
_PIECES = [
    "</tool_call>", "<tool_call>", '"', "'", "\n", "\\", "{", "}", "]", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "é", "🎈",
    "word", "</function>", "<arg_key>", "```", "<｜tool▁call▁end｜>", "\u2028", "5", "null", " ", "\x00",
]
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=8).map("".join) | st.text(st.characters(codec="utf-8"), max_size=9)
_NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)
_JSON_CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "say"]), st.dictionaries(_KEYS, _VALUES, max_size=3)), min_size=1, max_size=3
)
_OTHERS = ("qwen3_coder", "seed_oss", "glm", "glm4", "minimax_m2", "pythonic", "gemma4")
OF_JSON = [name for name in TEMPLATES if name.partition(",")[0] not in _OTHERS]


@settings(max_examples=40, deadline=None)
@given(calls=_JSON_CALLS)
@pytest.mark.parametrize("name", OF_JSON)
def test_any_json_comes_back_as_it_was(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert parsed(name, written(name, calls)) == ("", calls)


@settings(max_examples=60, deadline=None)
@given(calls=_JSON_CALLS)
def test_any_python_literal_comes_back_as_it_was(calls: list[tuple[str, dict[str, Any]]]) -> None:
    keywords = [(name, {f"k_{key}": value for key, value in arguments.items()}) for name, arguments in calls]
    assert parsed("pythonic", written("pythonic", keywords)) == ("", keywords)


@settings(max_examples=40, deadline=None)
@given(call=_JSON_CALLS.map(lambda calls: calls[:1]))
def test_any_json_after_a_name_comes_back_as_it_was(call: list[tuple[str, dict[str, Any]]]) -> None:
    assert parsed("glm4", written("glm4", call)) == ("", call)


_OF_GEMMA = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.second
@settings(max_examples=80, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(["f", "say"]), st.dictionaries(_KEYS, _OF_GEMMA, max_size=3)), min_size=1))
def test_gemma_s_values_come_back_as_they_were(calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert parsed("gemma4", written("gemma4", calls)) == ("", calls)


_KINDS: dict[str, Any] = {
    "integer": st.integers(-(2**53), 2**53), "number": st.floats(allow_nan=False, allow_infinity=False), "boolean": st.booleans(),
    "string": _TEXTS, "object": st.dictionaries(_TEXTS, _VALUES, max_size=3), "array": st.lists(_VALUES, max_size=3),
}
_TYPED = st.dictionaries(
    _KEYS, st.sampled_from(sorted(_KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), _KINDS[kind])), max_size=4
)


@pytest.mark.second
@settings(max_examples=80, deadline=None)
@given(arguments=_TYPED)
@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "glm", "minimax_m2"])
def test_arguments_between_tags_get_the_types_of_the_tool(name: str, arguments: dict[str, tuple[str, Any]]) -> None:
    own = tool("f", **{key: kind for key, (kind, _) in arguments.items()})
    values = {key: value for key, (_, value) in arguments.items()}
    assert parsed(name, written(name, [("f", values)]), own) == ("", [("f", values)])


@st.composite
def damaged(draw: st.DrawFn, name: str) -> str:
    """What a template writes, with up to two pieces of it left out, written twice or replaced by others."""
    calls = draw(st.lists(st.sampled_from([*CALLS, ("f", {}), ("say", {"text": "[5"})]), min_size=1, max_size=3))
    if name in ("llama3_json", "pythonic", "glm4"):
        text = written(name, calls[:1] if name == "glm4" else calls)
    else:
        text = written(name, calls, content=draw(st.sampled_from(["", "Let me see.\n"])))
    for _ in range(draw(st.integers(0, 2))):
        begin, length = draw(st.integers(0, len(text))), draw(st.integers(0, 12))
        piece = text[begin : begin + length]
        other = draw(st.sampled_from(["", piece + piece]) | st.sampled_from([*_PIECES, *_MARKS]))
        text = text[:begin] + other + text[begin + length :]
    return text


def test_every_form_is_a_choice_of_the_key() -> None:
    assert KEYS["model.tool_calls"].choices == ("auto", "none", *FORMS)


@pytest.mark.second
@pytest.mark.parametrize("name", FORMS)
def test_no_text_breaks_a_form(name: str) -> None:
    counts = Counter[bool]()

    @settings(max_examples=150, deadline=None)
    @given(text=damaged(name) | st.lists(st.sampled_from([*_PIECES, *_MARKS]), max_size=25).map("".join))
    def check(text: str) -> None:
        done = completion_of(name, text)
        counts[done.tool_calls is not None] += 1
        if done.tool_calls is None:
            assert done.text == text
            return
        calls = json.loads(done.tool_calls)
        assert calls
        for call in calls:
            function = call["function"]
            assert isinstance(function["name"], str)
            assert function["name"]
            assert isinstance(json.loads(function["arguments"], parse_constant=pytest.fail), dict)

    check()
    assert min(counts[True], counts[False]) > 5


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", ["integer"], 5), ("5.0", ["integer"], 5), ("5.5", ["integer"], "5.5"), ("x", ["integer"], "x"),
        ("5", ["string"], "5"), ("1e3", ["number"], 1000.0), ("True", ["boolean"], True), ("None", ["string", "null"], None),
        ("5", ["string", "integer"], 5), ("[1]", ["array"], [1]), ("[1]", ["object"], "[1]"),
        ('{"a": 1}', ["object"], {"a": 1}), ("{", ["object"], "{"), ("5", [], "5"),
        (" 5 ", ["string"], " 5 "), ("1" * 400, ["integer"], int("1" * 400)), ("NaN", ["number"], "NaN"),
    ],
)
def test_a_value_between_tags_has_the_type_of_its_parameter(text: str, types: list[str], value: Any) -> None:
    assert json.loads(typed_value(text, set(types))) == value


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": ["integer", "null"]}, 5), ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, 5), ({"enum": [4, 5]}, 5),
        ({"const": "5"}, "5"), ({"$ref": "#/$defs/whole"}, 5), ({"$ref": "#/$defs/none"}, "5"), ({"$ref": "#/$defs/loop"}, "5"),
        ({}, "5"), (True, "5"), ({"type": "integer", "nullable": True}, 5),
    ],
)
def test_the_type_is_found_where_json_schema_has_it(schema: Any, value: Any) -> None:
    own = tool("f", x=schema)
    own["function"]["parameters"]["$defs"] = {"whole": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    assert json.loads(Tools(tools_text(own)).typed("f", {"x": "5"})) == {"x": value}
    assert json.loads(Tools(tools_text(own["function"])).typed("f", {"x": "5"})) == {"x": value}, "a function alone"


def test_a_value_of_unknown_type_is_json_in_glm_s_form_and_text_in_qwen_s() -> None:
    """As vLLM's parsers: GLM's template writes JSON for all values but strings."""
    calls = [("zzz", {"x": 5, "y": [1], "s": "a"})]
    assert parsed("glm", written("glm", calls)) == ("", calls)
    assert parsed("qwen3_coder", written("qwen3_coder", calls)) == ("", [("zzz", {"x": "5", "y": "[1]", "s": "a"})])


def test_arguments_keep_the_model_s_own_digits() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": 1.10, "y": 12345678901234567890123}}</tool_call>'
    done = completion_of("hermes", text)
    assert json.loads(done.tool_calls or "")[0]["function"]["arguments"] == '{"x": 1.10, "y": 12345678901234567890123}'


PIECES = ("<tool_call>", "</tool_call>", "<|x|>", '{"name": "f", "arguments": {"s": "', '"}}', "END", "E", "ND EN", "D", " so ")
"""Token id -> text. The first three are special tokens."""


def pieces_text(tokens: Sequence[int], skip_special: bool = True) -> str:
    return "".join(PIECES[token] for token in tokens if token > 2 or not skip_special)


def first_stop(tokens: list[int], stops: list[str], least: int) -> tuple[int, int, str] | None:
    """The definition: the number of tokens up to the one, after the first `least`, that completes a stop string; the place of the
    earliest such stop string in their text without special tokens; and which it is."""
    early = len(pieces_text(tokens[:least]))
    for end in range(least + 1, len(tokens) + 1):
        text = pieces_text(tokens[:end])
        found = [(text.find(stop, max(0, early - len(stop) + 1)), stop) for stop in stops]
        if any(at >= 0 for at, _ in found):
            return end, *min(one for one in found if one[0] >= 0)
    return None


def marked_until(tokens: list[int], length: int) -> str:
    """The definition: so many characters of text, with the special tokens that come before the next character."""
    found = ""
    for token in tokens:
        if token > 2:
            found, length = found + PIECES[token][:length], length - len(PIECES[token])
            if length < 0:
                break
        else:
            found += PIECES[token]
    return found


@pytest.mark.second
@settings(max_examples=300)
@given(
    before=st.lists(st.integers(0, 9), max_size=6), after=st.lists(st.integers(0, 9), max_size=8),
    stops=st.lists(st.sampled_from(["END", "ND", '"}}E', "EE", "so", "f", '"'] + ["x"] * 3), min_size=1, max_size=2),
    least=st.sampled_from([0, 0, 2, 7]), ends=st.booleans(), thinks=st.booleans(), data=st.data(),
)
def test_content_calls_and_finish_agree_on_the_first_stop_string(
    before: list[int], after: list[int], stops: list[str], least: int, ends: bool, thinks: bool, data: st.DataObject
) -> None:
    """The stop string may come before or after a call, inside its JSON, several times, or around special tokens; it is searched
    for in the answer's text without them. Whatever rounds the tokens come in, all columns are those of the answer before it."""
    tokens, eos, close = [*before, 0, 3, 5, 4, 1, *after], data.draw(st.sampled_from([2, 9])), 10
    thinking = Thinking(begin_id=None, end_id=close, opened=True, budget=None, closing=(close,))
    asked = replace(
        request(3, [1], cap=60), tools=tools_text(tool("f", s="string")), stop=tuple(stops), stop_ids=(eos,) if ends else (),
        min_new_tokens=least, thinking=thinking if thinks else None,
    )
    said = [5, 0, 3, close] if thinks else []
    row = OneRow(asked, decode=pieces_text, call_parser=CallParser(FORMS["hermes"], pieces_text))
    answer = [token for token in tokens if not (ends and token == eos)]
    rest = [*said, *answer, *([eos] if ends else [])]
    while rest and row.state.finish_reason is None:
        count = data.draw(st.integers(1, 4))
        row.add_round(count - 1, 3, rest[:count])
        rest = rest[count:]
    if row.state.finish_reason is None:
        row.state.finish_reason = "length"
    done = row.completion()
    stop = first_stop(answer, stops, max(0, least - len(said)))
    text, marked = pieces_text(answer), pieces_text(answer, False)
    if stop is not None:
        text, marked = text[: stop[1]], marked_until(answer, stop[1])
        assert row.state.tokens == [*said, *answer[: stop[0]]]
    assert done.stop_reason == (stop[2] if stop is not None else str(eos) if ends else None)
    calls = FORMS["hermes"].find(marked, Tools(asked.tools or ""))
    assert len(calls_of(done.tool_calls)) == len(calls)
    outside = "".join(re.split("|".join(re.escape(marked[call.begin : call.end]) for call in calls) or "$^", marked))
    for mark in PIECES[:3]:
        outside = outside.replace(mark, "")
    assert done.text is not None
    assert "".join(done.text.split()) == "".join((outside if calls else text).split())


def test_ids_are_nine_letters_and_digits_and_differ_by_call_row_sample_and_turn() -> None:
    """Mistral's templates refuse other ids."""
    row = request(3, [1], cap=9)
    rows = [row, replace(row, sample_index=1), replace(row, row_index=4), replace(row, seed=row.seed + 1)]
    ids = [call_id(each, place) for each in rows for place in range(2)]
    assert len(set(ids)) == len(ids)
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids)
    assert call_id(row, 0) == call_id(replace(row, prompt_ids=row.prompt_ids[:0]), 0)


def test_a_row_without_tools_is_not_read() -> None:
    done = Completion(
        request_id="a", row_index=0, sample_index=0, shard=0, status="ok", finish_reason="stop",
        text='<tool_call>{"name": "f"}</tool_call>',
    )
    assert CallParser(FORMS["hermes"], decode).parsed(done, request(3, [1], cap=9), list(map(ord, done.text or ""))) is done


CALL = '<tool_call> {"name": "f", "arguments": {"x": 5, "s": "</tool_call>"}} </tool_call>'
SAID = f"Let me see. {CALL} {CALL}"
OURS = [("f", {"x": 5, "s": "</tool_call>"})] * 2


def test_marks_that_are_special_tokens_are_read_and_are_not_part_of_the_content(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, chat_template=TEMPLATES["mistral"])
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"additional_special_tokens": ["[TOOL_CALLS]", "<|x|>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(folder)
    tokens = tokenizer.encode_part('Let<|x|> me see.[TOOL_CALLS] [{"name": "f", "arguments": {"x": 5}}]<|x|>')
    text = tokenizer.decode(tokens)
    assert "[TOOL_CALLS]" not in text
    done = Completion(request_id="a", row_index=3, sample_index=0, shard=0, status="ok", finish_reason="stop", text=text)
    found = CallParser(FORMS["mistral"], tokenizer.decode).parsed(
        done, replace(request(3, [1], cap=9), tools=tools_text(*TOOLS)), tokens
    )
    assert found.text == "Let me see."
    assert json.loads(found.tool_calls or "")[0]["function"] == {"name": "f", "arguments": '{"x": 5}'}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calls") / "model"
    return make_tokenizer(
        make_checkpoint(folder, "llama", dtype=torch.float64, max_position_embeddings=4096), chat_template=TEMPLATES["hermes"]
    )


def options(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model.path": str(model), "model.dtype": "float64", "model.max_len": 900, "decode.max_new_tokens": 300,
        "decode.regex": re.escape(SAID), "output.passthrough": "none", "packing.max_num_seqs": 3, **more,
    }


def words(given: dict[str, Any], folder: Path, *more: str) -> list[str]:
    return [*overrides_of(given), f"input.path={folder}/in.parquet", f"output.dir={folder}/out", *more]


ROWS: list[dict[str, Any]] = [
    {"id": "with", "messages": [{"role": "user", "content": "Hi"}], "tools": tools_text(*TOOLS)},
    {"id": "without", "messages": [{"role": "user", "content": "Hi"}], "tools": None},
    {"id": "cut", "messages": [{"role": "user", "content": "Ho"}], "tools": tools_text(*TOOLS), "max_new_tokens": 60},
]


@pytest.fixture(scope="module")
def out(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job whose every answer is SAID."""
    folder = tmp_path_factory.mktemp("job")
    pl.DataFrame(ROWS).write_parquet(folder / "in.parquet")
    assert run.main(words(options(model), folder)) == 0
    return folder / "out"


def calls_of(cell: str | None) -> list[tuple[str, Any]]:
    calls = json.loads(cell or "[]")
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.second
def test_a_job_writes_calls_of_rows_with_tools(out: Path) -> None:
    rows = {row["request_id"]: row for row in pl.read_parquet(out / "data").to_dicts()}
    assert (rows["with"]["completion"], calls_of(rows["with"]["tool_calls"])) == ("Let me see.", OURS)
    assert (rows["without"]["completion"], rows["without"]["tool_calls"]) == (SAID, None)
    cut = rows["cut"]
    assert (cut["status"], cut["tool_calls"]) == ("truncated", None), "a call that was cut off stays text"
    assert SAID.startswith(cut["completion"].rstrip("\ufffd"))
    assert rows["with"]["finish_reason"] == "stop", "the column says how decoding ended"
    assert rows["with"]["messages"][-1] == {
        "role": "assistant", "content": "Let me see.", "name": None, "tool_call_id": None,
        "tool_calls": rows["with"]["tool_calls"],
    }


def test_exports_have_the_calls(out: Path, tmp_path: Path) -> None:
    written_calls = json.loads(pl.read_parquet(out / "data").filter(request_id="with")["tool_calls"][0])
    assert export.main([str(out), "--to", "openai", str(tmp_path / "o.jsonl")]) == 0
    answers = {line["custom_id"]: line for line in map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())}
    (choice,) = answers["with"]["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Let me see.", "tool_calls": written_calls}
    assert choice["finish_reason"] == "tool_calls"
    (plain,) = answers["without"]["response"]["body"]["choices"]
    assert (plain["message"], plain["finish_reason"]) == ({"role": "assistant", "content": SAID}, "stop")
    assert export.main([str(out), "--to", "chat", str(tmp_path / "c.jsonl")]) == 0
    chat = json.loads((tmp_path / "c.jsonl").read_text().splitlines()[0])["messages"]
    assert chat[-1] == {"role": "assistant", "content": "Let me see.", "tool_calls": written_calls}


@pytest.mark.second
def test_the_key_is_part_of_the_job_and_none_leaves_calls_in_the_text(
    out: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*words(options(model), out.parent), "model.tool_calls=hermes"]) == 0, (
        "the form that auto found is the same job"
    )
    assert run.main([*words(options(model), out.parent), "model.tool_calls=none"]) == 2
    assert "model.tool_calls" in capsys.readouterr().err
    pl.DataFrame(ROWS).write_parquet(tmp_path / "in.parquet")
    assert run.main([*words(options(model), tmp_path), "model.tool_calls=none"]) == 0
    frame = pl.read_parquet(tmp_path / "out/data")
    assert frame["tool_calls"].null_count() == frame.height
    assert frame["completion"].to_list()[:2] == [SAID, SAID]
    pl.DataFrame(ROWS).drop("tools").write_parquet(tmp_path / "in.parquet")
    assert run.main([*words(options(model), tmp_path), "model.tool_calls=glm", "output.overwrite=true"]) == 2
    assert "model.tool_calls=glm has no effect without the column `tools`" in capsys.readouterr().err
    assert run.main([*words(options(model), tmp_path), "model.tool_calls=off", "output.overwrite=true"]) == 2
    assert "model.tool_calls" in capsys.readouterr().err


@pytest.mark.second
def test_plan_and_run_say_that_the_form_is_unknown(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pl.DataFrame(ROWS).write_parquet(tmp_path / "in.parquet")
    (tmp_path / "plain.jinja").write_text(chat_template("{{ message.tool_calls }}"))
    given = words(options(model), tmp_path, f"model.chat_template={tmp_path}/plain.jinja")
    said = "column 'tools': calls of these tools stay in the text of `completion`, because the chat template writes none of"
    assert plan.main(given) == 0
    assert said in capsys.readouterr().out
    assert run.main(given) == 0
    assert said in capsys.readouterr().err
    frame = pl.read_parquet(tmp_path / "out/data")
    assert frame["tool_calls"].null_count() == frame.height, "every job with tools has the column"
    assert plan.main([*given, "model.tool_calls=hermes", f"output.dir={tmp_path}/other"]) == 0
    assert said not in capsys.readouterr().out


@pytest.mark.second
def test_a_warm_engine_streams_calls_and_converse_takes_their_results(model: Path) -> None:
    """A turn's own tools count too: the second conversation has them from its second turn on."""
    rows: list[dict[str, Any]] = [{"id": row["id"], "messages": row["messages"]} for row in ROWS[:2]]
    seen: list[Turn] = []

    def next_turn(turn: Turn) -> Any:
        seen.append(turn)
        if turn.number == 2:
            return None
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in turn.messages[-1].get("tool_calls", [])
        ]
        return {"messages": [*turn.messages, *(answers or [{"role": "user", "content": "Go on"}])], "tools": list(TOOLS)}

    with batchspec.Engine(options(model, **{"model.max_len": 3000})) as engine:
        streamed = {done.request_id: done for done in engine.stream([{**row, "tools": ROWS[0]["tools"]} for row in rows])}
        frame = engine.converse(rows, next_turn)
    assert {name: calls_of(done.tool_calls) for name, done in streamed.items()} == {"with": OURS, "without": OURS}
    found = frame.filter(row_index=0).sort("turn")
    assert [calls_of(cell) for cell in found["tool_calls"]] == [[], OURS, OURS], "the first turn has no tools"
    assert found["completion"].to_list() == [SAID, "Let me see.", "Let me see."]
    ids = [call["id"] for cell in found["tool_calls"][1:] for call in json.loads(cell)]
    assert len(set(ids)) == 4, "each turn has ids of its own"
    last = next(turn for turn in seen if turn.number == 2 and turn.completion.row_index == 0).messages
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "tool", "tool", "assistant"]


def test_the_answer_after_a_thought_is_read_and_the_thought_is_not(tmp_path: Path) -> None:
    """A call that the model only thinks of is none."""
    folder = make_checkpoint(tmp_path / "model", "llama", dtype=torch.float64, max_position_embeddings=1024)
    make_thinking_tokenizer(folder, chat_template=TEMPLATES["hermes"])
    tokenizer = Tokenizer(folder)
    think = find_think_tokens("auto", tokenizer, 320)
    assert think is not None
    asked = replace(
        request(3, [1], cap=900), tools=tools_text(*TOOLS), thinking=think.of_row(np.array([5], np.int32), None, ())
    )
    row = OneRow(asked, decode=tokenizer.decode, call_parser=CallParser(FORMS["hermes"], tokenizer.decode))
    row.state.tokens = tokenizer.encode_part(f"<think>{CALL}</think>\n\n{SAID}")
    row.state.finish_reason = "length"
    done = row.completion()
    assert (done.reasoning, done.text, calls_of(done.tool_calls)) == (CALL, "Let me see.", OURS)


def test_a_tokenizer_s_response_template_decides(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, chat_template=TEMPLATES["hermes"])
    file = folder / "tokenizer_config.json"
    tags = {"open_pattern": "<tool_call>\\s*<function=(?P<name>[^>]+)>", "content_args": {"tag_pattern": "<parameter=(?P<k>.)>"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"response_template": {"fields": {"tool_calls": tags}}}))
    form = choose_form("auto", Tokenizer(folder).chats.answer_samples, channels=False)
    assert form is FORMS["qwen3_coder"]
