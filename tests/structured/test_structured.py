"""Schemas and regexes become automata: what is written is valid by the schema; a regex has the texts that Python's `re` has."""

from __future__ import annotations

import gc
import json
import pickle
import re
import resource
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.automata.lazy_automaton import LazyAutomaton
from batchspec.automata.token_automaton import DEAD, OTHER, TokenAutomaton, TokenSymbols
from batchspec.structured import compile_process, nfa
from batchspec.structured import compiler as compiler_module
from batchspec.structured import dfa as dfa_module
from batchspec.structured.compile_pool import Attempt
from batchspec.structured.compiler import BadConstraint, Compiler
from batchspec.structured.dfa import Dfa, dfa_of
from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.json_schema.schema import schema_rules
from batchspec.structured.nfa import utf8_ranges
from batchspec.structured.parse import rules_of
from batchspec.structured.regex import BadRegex, regex_node
from batchspec.structured.regular import Chars, Impossible, TooLarge
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.automata import EOS, PATTERNS_OF_LETTERS, TOKENS, VOCABULARY, automaton, finite, may_follow
from tests.helpers.models import make_tokenizer

LETTERS = "abc"


def matches(dfa: Dfa, data: bytes) -> bool:
    state = dfa.starts[0]
    for byte in data:
        state = int(dfa.next[state, dfa.classes[byte]])
    return bool(dfa.final[state])


def samples(dfa: Dfa, count: int, seed: int = 0, most_bytes: int = 80) -> list[bytes]:
    """Texts of random walks; after `most_bytes` they take the shortest way to the end."""
    rng, found = np.random.default_rng(seed), list[bytes]()
    bytes_of = [np.flatnonzero(dfa.classes == one) for one in range(dfa.next.shape[1])]
    left = np.where(dfa.final, 0, 1 << 20)
    while True:
        nearer = np.minimum(left, left[dfa.next].min(1) + 1)
        nearer[DEAD] = 1 << 20
        if (nearer == left).all():
            break
        left = nearer
    for _ in range(count):
        state, text = dfa.starts[0], bytearray()
        while True:
            ways = [one for one in range(dfa.next.shape[1]) if dfa.next[state, one] and len(bytes_of[one])]
            long = len(text) > most_bytes
            if dfa.final[state] and (not ways or long or rng.random() < 0.3):
                break
            taken = min(ways, key=lambda one: left[dfa.next[state, one]]) if long else ways[rng.integers(len(ways))]
            text.append(int(rng.choice(bytes_of[taken])))
            state = int(dfa.next[state, taken])
        found.append(bytes(text))
    return found


@st.composite
def regexes(draw: st.DrawFn, depth: int = 3) -> str:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(LEAVES))
    inner = regexes(depth=depth - 1)
    match draw(st.sampled_from(["seq", "alt", "repeat"])):
        case "seq":
            return draw(inner) + draw(inner)
        case "alt":
            return f"(?:{draw(inner)}|{draw(inner)})"
    least = draw(st.integers(0, 2))
    most = draw(st.sampled_from(["", *map(str, range(least, 4))]))
    count = draw(st.sampled_from(["*", "+", "?", "*?", "??", f"{{{least}}}", f"{{,{most}}}", f"{{{least},{most}}}"]))
    return f"(?:{draw(inner)}){count}"


LEAVES = (
    "a", "b", "c", "[ab]", "[^a]", ".", "é", "\\w", "", "\\x61", "\\141", "\\u00e9", "[\\x61-b]", "[]a-]", "[^]\\-c]",
    "[\\d\\sé]", "(a)", "(?#(b)a", "a(?#x)+", "\\W", "a{", "{a}", "b{1", "[a-c-]", "\\-", "(?:)", "(|a)", "[\\ud800-\\udfffa]",
    "\\N{LATIN SMALL LETTER B}",
)


@pytest.mark.second
@settings(max_examples=150, deadline=None)
@given(regexes(), st.lists(st.text("abcé", max_size=6), min_size=5, max_size=20))
def test_the_texts_of_a_regex_are_those_of_python(pattern: str, texts: list[str]) -> None:
    """Only \\w is written in ASCII alone."""
    dfa = dfa_of(regex_node(pattern))
    for text in texts:
        assert matches(dfa, text.encode()) == bool(re.fullmatch(pattern.replace("\\w", "(?a:\\w)"), text)), text
    for data in samples(dfa, 3, most_bytes=12):
        assert re.fullmatch(pattern, data.decode()), data


def test_a_group_may_have_a_name() -> None:
    dfa = dfa_of(regex_node("a(?P<n_1>b|c)(?P<m>c)?"))
    assert [matches(dfa, text) for text in (b"ab", b"acc", b"a", b"abb")] == [True, True, False, False]


@pytest.mark.second
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), regexes(depth=2), st.booleans()), min_size=1, max_size=3),
    st.sampled_from(["{}", "({})", "(?:(?:{})|b)", "c({})", "({})a", "^(?:{})", "(?:{}|$)"]),
    st.lists(st.text("abcé", max_size=5), min_size=5, max_size=12),
)
def test_the_anchors_of_a_search_are_those_of_python(parts: list[tuple[bool, str, bool]], around: str, texts: list[str]) -> None:
    """Where they may be; else the expression is refused."""
    pattern = around.format("|".join(f"{'^' * begins}{inner}{'$' * ends}" for begins, inner, ends in parts))
    try:
        dfa = dfa_of(regex_node(pattern, anywhere=True))
    except BadRegex:
        assert re.search(r"[^(|^]\^|\$[^)|$]|\(.*\^.*\)|\(.*\$.*\)", pattern), pattern
        return
    for text in texts:
        assert matches(dfa, text.encode()) == bool(re.search(pattern.replace("\\w", "(?a:\\w)"), text)), text


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
def test_ranges_of_characters_are_ranges_of_their_bytes(low: int, high: int) -> None:
    chars = Chars.of([(min(low, high), max(low, high))])
    for code in {
        low,
        high,
        max(0, min(low, high) - 1),
        min(0x10FFFF, max(low, high) + 1),
        0x7F,
        0x80,
        0x7FF,
        0x800,
        0xFFFF,
        0x10000,
    }:
        if not 0xD800 <= code <= 0xDFFF:
            data = chr(code).encode()
            found = any(
                len(one) == len(data) and all(a <= byte <= b for byte, (a, b) in zip(data, one, strict=True))
                for part in chars.ranges
                for one in utf8_ranges(*part)
            )
            assert found == any(a <= code <= b for a, b in chars.ranges)
            assert found != any(a <= code <= b for a, b in chars.inverted().ranges)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(", "not a regular expression"), ("a(?=b)", "lookahead"), (r"\bfoo", "inside"), (r"(a)\1", "a group reference"),
        ("(?m)^a", "the flag m"), ("(?x)a b", "the flag x"), ("(?a)a", "the flag a"),
        ("(?i:\U00010400)", r"a capital letter beyond U\+FFFF"), ("a++", "possessive"), ("(?>a)", "atomic"),
        ("(a)(?(1)b)", "condition"), ("(?P<n>a)(?P=n)", "a group reference"),
        ("(?<!a)b", "lookbehind"), ("(a|^b)*", "inside"), ("a$b", "inside"),
        ("a^b", "inside"), ("(?is-m:a)b", "the flag m"), ("a{200000}", "more than 100,000"),
    ],
)
def test_what_a_regex_may_not_hold_is_named(pattern: str, what: str) -> None:
    with pytest.raises(BadRegex, match=what):
        regex_node(pattern)


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {
        "name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 127},
        "tags": {"type": "array", "items": {"enum": ["a", "b\"x", 3]}, "maxItems": 5},
        "n": {"type": "number", "exclusiveMinimum": 0, "maximum": 5}}, "required": ["name", "n"]},
    {}, True, {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, {"type": "array"},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "items": {"type": "string"}, "minItems": 1,
     "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "items": False},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1}, {"type": "array", "items": {"type": "string"}, "maxItems": 0},
    {"type": "integer", "minimum": -105, "maximum": 23}, {"type": "integer", "exclusiveMinimum": 99, "maximum": 1000},
    {"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4}, {"type": "number", "minimum": -2, "maximum": 3},
    {"type": "number", "exclusiveMinimum": -2, "exclusiveMaximum": -1},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "maximum": -3}, {"type": "number", "exclusiveMinimum": 7},
    {"type": "string", "pattern": "^[a-z]{2,5}\\n?\"$"}, {"type": "string", "pattern": "ab"},
    {"type": "string", "minLength": 3, "maxLength": 4},
    *({"type": "string", "format": one} for one in ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")),
    *({"type": "string", "format": one} for one in ("uri", "ipv6", "uri-reference", "json-pointer", "own")),
    {"patternProperties": {"^a": False}, "properties": {"b": {"type": "null"}}},
    {"type": "boolean", "readonly": True, "nullable": 1},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
               {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a", "b"]}]},
    {"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "object", "additionalProperties": False},
    {"type": ["string", "integer", "null"]}, {"const": {"a": [1, 2.5, None, "x"]}}, {"enum": ["é", 1, None]},
    {"enum": ["a", 1, 2.5], "type": "number"}, {"minLength": 2}, {"properties": {"a": {"type": "null"}}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "z"],
     "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"},
     "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"$ref": "#/definitions/x~1y", "definitions": {"x/y": {"type": "boolean"}}, "description": "d", "x-own": 1},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "null"}}, "required": ["a"],
     "minProperties": 1},
]


def schema_dfa(schema: Any) -> Dfa:
    node = schema_rules(schema).inlined()
    assert node is not None
    return dfa_of(node)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_every_text_that_is_written_is_valid(schema: Any) -> None:
    draft = jsonschema.Draft202012Validator
    checker = draft(schema, format_checker=draft.FORMAT_CHECKER)
    dfa = schema_dfa(schema)
    found = samples(dfa, 40)
    for data in found:
        checker.validate(json.loads(data.decode()))
    assert len(set(found)) >= 2 or [matches(dfa, text) for text in (b"[]", b"{}")].count(True) == 1


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (SCHEMAS[0], ['{"name": "Bo", "n": 1.5}', '{"name":"Bo","age":127,"tags":["a",3],"n":5}']),
        ({}, ['{"a": [1, {"b": null}], "é": "\\u00e9\\n"}', "-1.5e-7", "[]", '"\\ud7ff"']),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 5}, ["0.001", "5", "4.99"]),
        ({"type": "integer", "minimum": -105, "maximum": 23}, ["-105", "0", "-9", "23"]),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]},
         ['{"b":1}', '{"a":1,"b":2,"c":3}', '{"b":1,"c":2}']),
    ],
)
def test_usual_texts_can_be_written(schema: Any, texts: list[str]) -> None:
    dfa = schema_dfa(schema)
    for text in texts:
        assert matches(dfa, text.encode()), text


@pytest.mark.parametrize(
    ("schema", "error", "what"),
    [
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, Impossible, "no text"),
        ({"enum": []}, Impossible, "no text"), ({"type": "integer", "minimum": 3, "maximum": 2}, Impossible, "no text"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, Impossible, "no text"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, Impossible, "no text"),
        ({"type": "strin"}, BadSchema, "/type is"),
        ({"unevaluatedProperties": False, "x": 1}, BadSchema, "/unevaluatedProperties: this keyword"),
        ({"properties": {"a": {"not": {"uniqueItems": True}}}}, BadSchema, "/properties/a/not"),
        ({"type": "string", "pattern": "("}, BadSchema, "/pattern: "), ({"$ref": "#/x"}, BadSchema, "no such part"),
        ({"$ref": "other.json"}, BadSchema, "not a pointer within"), ({"$ref": "#anchor"}, BadSchema, "not a pointer within"),
        ({"anyOf": [{"$ref": "#anchor"}]}, BadSchema, "not a pointer within"),
        ({"$defs": {"a": {"$id": "b", "$ref": "#/c"}}, "$ref": "#/$defs/a"}, BadSchema, "inner"),
        ({"const": True, "enum": [1]}, Impossible, "no text"),
        ({"allOf": [{"const": 1}, {"const": True}]}, Impossible, "no text"),
        ({"type": "integer", "oneOf": [{"type": "integer"}, {"type": "number"}]}, BadSchema, "none fits one alone"),
        ({"oneOf": [{"items": {"type": "null"}}, {"uniqueItems": True}]}, BadSchema, "could fit part 0 and part 1"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["a"]}]}, BadSchema, "none fits one alone"),
        ({"uniqueItems": True}, BadSchema, "uniqueItems"), ({"multipleOf": 1.1}, BadSchema, "multipleOf"),
        ({"multipleOf": 4097}, BadSchema, "at most 1,000"), ({"minimum": True}, BadSchema, "must be a number"),
        ({"enum": [1], "minimum": 2}, Impossible, "no text"), ([], BadSchema, "not an object"),
        ({"patternProperties": {"(": True}}, BadSchema, "patternProperties.*not a regular expression"),
        ({"pattern": "a(?!b)"}, BadSchema, "lookahead"), ({"pattern": "^(?!a)b|c"}, BadSchema, "lookahead inside"),
        ({"minProperties": 2}, BadSchema, "minProperties"),
        ({"properties": {"a": {}}, "minProperties": 2}, BadSchema, "name more"),
        ({"type": "object", "additionalProperties": False, "required": ["a"]}, Impossible, "no text"),
        ({"allOf": [{"required": ["a"]}, {"not": {"required": ["a"]}}]}, Impossible, "no text"),
        ({"type": "string", "pattern": "^a{5}$", "maxLength": 4}, Impossible, "no text"),
        ({"properties": []}, BadSchema, "/properties is"),
        ({"exclusiveMinimum": 0.1234567890123456, "type": "number"}, BadSchema, "more than 15 digits"),
        ({"contains": {}, "uniqueItems": True}, BadSchema, "contains beside"),
        ({"enum": [{}], "required": True}, BadSchema, "wrong type"),
    ],
)
def test_what_cannot_be_met_is_refused_by_its_name(schema: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        schema_dfa(schema)


@pytest.mark.parametrize(
    ("module", "bound", "pattern"), [(nfa, "MAX_NFA_STATES", "[a-z]{40}"), (dfa_module, "MAX_STATES", "(a|b)*a(a|b){6}")]
)
def test_what_is_too_large_is_refused(module: ModuleType, bound: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, bound, 30)
    with pytest.raises(TooLarge, match="more than 30 "):
        dfa_of(regex_node(pattern))


@pytest.mark.parametrize("pattern", PATTERNS_OF_LETTERS)
def test_masks_are_the_tokens_that_may_follow(pattern: str) -> None:
    """In every state that some short output leads to."""
    made = automaton(pattern)
    todo, seen = [list[int]()], set[int]()
    while todo:
        out = todo.pop()
        state = made.walk(made.answer, out)
        if state in seen or len(out) > 4:
            continue
        seen.add(state)
        allowed = made.allowed(state)
        assert allowed.tolist() == [may_follow(pattern, out, token) for token in range(len(TOKENS))], out
        assert allowed.any(), out
        todo += [[*out, token] for token in np.flatnonzero(allowed).tolist() if token != EOS]
    assert len(seen) > (pattern != "[ab]*")


def test_texts_that_the_tokenizer_cannot_write_are_not_asked_for() -> None:
    """Without a token for a byte alone a text with it might be begun and never ended."""
    few = TokenSymbols.of([OTHER, b"a", b"ab", b"c"])
    job: dict[str, Any] = {"vocabulary": few, "end_ids": (0,), "thinks": False, "may_begin": False}
    made = compile_process.compiled(rules_of("regex", "a(b|c)"), **job)
    assert made.allowed(made.answer).tolist() == [False, True, False, False]
    with pytest.raises(Impossible):
        compile_process.compiled(rules_of("regex", "ab"), **job)


@pytest.fixture
def compiler() -> Compiler:
    return Compiler(VOCABULARY, (EOS,), thinks=False, may_begin=False)


def test_an_error_that_no_check_foresaw_is_one_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: Any, **__: Any) -> Any:
        raise KeyError("lost")

    monkeypatch.setattr(compile_process, "rules_of", defect)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    job = {"vocabulary": TokenSymbols.of([]), "end_ids": (), "thinks": False, "may_begin": False}
    found = compile_process.answer(Attempt("schema", "{}", 1, 1), **job)
    assert found["code"] == "bad_schema"
    assert "an error in batchspec (KeyError: 'lost'); report it" in found["error"]


def test_each_distinct_constraint_is_compiled_once(compiler: Compiler) -> None:
    first = compiler.compile("choice", '["ab", "cd"]')
    assert compiler.compile("choice", '["ab", "cd"]') is first
    for _ in range(2):
        with pytest.raises(BadConstraint, match="not a regular expression") as refused:
            compiler.compile("regex", "(")
        assert refused.value.code == "bad_schema"
    assert finite(compiler.compile("regex", "ab|cd")).table.tolist() == finite(first).table.tolist()
    assert compiler.stats.num_compiled == 2
    assert compiler.stats.most_states == len(finite(first).table)


@pytest.mark.parametrize(
    ("kind", "source"),
    [("schema", '{"const": "\\ud800"}'), ("schema", '{"required": ["\\ud800"]}'), ("choice", '["\\udc00"]')],
)
def test_half_of_a_surrogate_pair_is_refused_and_ends_no_process(compiler: Compiler, kind: str, source: str) -> None:
    with pytest.raises(BadConstraint, match="half of a surrogate pair") as refused:
        compiler.compile(kind, source)
    assert refused.value.code == "bad_schema"


@pytest.mark.second
def test_several_are_compiled_at_a_time_and_nobody_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "num_processes", lambda: 2)
    made = Compiler(VOCABULARY, (EOS,), thinks=False, may_begin=False)
    slow = made.begin("regex", "(a|b)*a(a|b|c|d){9000}")
    assert made.begin("regex", "(a|b)*a(a|b|c|d){9000}") is slow
    quick = [made.begin("regex", f"a{{{count}}}") for count in range(1, 9)]
    assert all(isinstance(one.result(60), TokenAutomaton) for one in quick)
    assert not slow.done()
    pool = made._pool
    assert pool is not None
    assert len({process.pid for process in pool.processes}) == 2
    processes = [process._process for process in pool.processes]
    pool.close()
    with pytest.raises(RuntimeError):
        slow.result(60)
    assert all(process is not None and process.wait(20) == -signal.SIGKILL for process in processes)


@pytest.mark.second
def test_the_processes_end_with_the_compiler() -> None:
    made = Compiler(VOCABULARY, (EOS,), thinks=False, may_begin=False)
    made.compile("regex", "ab")
    assert made._pool is not None
    processes = [each._process for each in made._pool.processes if each._process is not None]
    del made
    gc.collect()
    assert [process.wait(20) for process in processes] == [-signal.SIGKILL]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    first = finite(compiler.compile("regex", "ab"))
    monkeypatch.setattr(compiler_module, "KEPT_BYTES", 2 * first.nbytes)
    for pattern in ("ba", "dc"):
        compiler.compile("regex", pattern)
        assert finite(compiler.compile("regex", pattern)).nbytes
    assert compiler.compile("regex", "ab") is not first
    assert compiler.stats.num_compiled == 4
    assert len(compiler._kept) == len(compiler._sizes) <= 2
    assert compiler._kept_bytes == sum(compiler._sizes.values())


@pytest.mark.second
def test_a_compiler_that_was_sent_to_another_process_compiles_there(compiler: Compiler) -> None:
    first = compiler.compile("regex", "a+b")
    again = pickle.loads(pickle.dumps(compiler))
    assert finite(again.compile("regex", "a+b")).table.tolist() == finite(first).table.tolist()


@pytest.mark.second
def test_a_constraint_that_takes_too_long_or_too_much_goes_the_slower_way_alone(compiler: Compiler) -> None:
    compiler.cpu_s = 1
    assert isinstance(compiler.compile("regex", "(a|b)*a(a|b|c|d){9000}"), LazyAutomaton)
    (reason,) = compiler.stats.lazy
    assert re.search(r"takes more than 1 s|more than 50,000 states", reason)
    assert finite(compiler.compile("regex", "ab")).num_states > 2


@pytest.mark.second
def test_a_process_that_was_killed_is_replaced(compiler: Compiler) -> None:
    compiler.compile("regex", "ab")
    assert compiler._pool is not None
    processes = [each._process for each in compiler._pool.processes if each._process is not None]
    assert processes
    for process in processes:
        process.kill()
        process.wait()
    for count in range(1, 9):
        assert finite(compiler.compile("regex", f"cd{{{count}}}")).num_states > 2  # in a new process, at the second attempt


def test_the_bytes_of_tokens_are_what_the_tokenizer_decodes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_tokenizer(tmp_path))
    symbols = tokenizer.symbols(400, {1: 257})
    pieces = [symbols.symbols[a:b].tolist() for a, b in zip(symbols.starts[:-1], symbols.starts[1:], strict=True)]
    assert pieces[0] == pieces[2] == pieces[399] == [OTHER]
    assert pieces[1] == [257]
    text = 'Héllo {"a": [1, 2]}\n\n 日本 😀'
    assert bytes(byte for token in tokenizer.encode(text) for byte in pieces[token]).decode() == text
