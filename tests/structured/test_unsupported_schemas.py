"""decode.schema_unsupported: schemas with keywords that no automaton obeys, from the weaker schema to the marked row."""

from __future__ import annotations

import json
import pickle
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator, validator_for

import batchspec
from batchspec import run
from batchspec.commands import plan, stats
from batchspec.data.dataset.openai_responses import response_line
from batchspec.data.runstate.journal_rows import from_json, to_json
from batchspec.process.refusals import is_panic
from batchspec.records import Completion
from batchspec.structured.answer_checker import AnswerChecker
from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.json_schema.schema import schema_rules
from batchspec.structured.json_schema.weaker import places, weaker
from batchspec.structured.parse import rules_of
from batchspec.structured.rules import Rules
from batchspec.structured.unsupported import UnsupportedSchema, obeyed
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.job.test_job import arguments
from tests.structured.random_schemas import RandomSchemas
from tests.structured.test_constrained_text import ended
from tests.warm.test_loops import load

SET = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[ab]$"}, "maxItems": 3, "uniqueItems": True}
    },
    "required": ["tags"],
    "additionalProperties": False,
}
"""As pydantic writes a model with a field of type `set[str]`."""


def obeyed_schema(schema: Any) -> Any:
    """The schema whose automaton is followed with `check`."""
    tried = list[Any]()

    def build(one: Any) -> Rules:
        tried.append(one)
        return schema_rules(one)

    obeyed(schema, build, checks=True)
    return tried[-1]


def valid_values(seed: int) -> tuple[Any, list[Any]]:
    """A random schema, and values that are valid by it; none if it is no schema of its draft, or refers to itself without an end:
    then jsonschema raises RecursionError, or what its maps in Rust raise if the stack ends in one of them."""
    made = RandomSchemas(seed)
    schema = made.document()
    draft = validator_for(schema, default=Draft202012Validator)
    try:
        draft.check_schema(schema)
        true = draft(schema, format_checker=draft.FORMAT_CHECKER)
        return schema, [value for value in made.values(schema, 30) if true.is_valid(value)]
    except BaseException as error:
        if not isinstance(error, jsonschema.SchemaError | RecursionError) and not is_panic(error):
            raise
        return schema, []


@pytest.mark.second
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 100_000), st.integers(1, 3))
def test_whatever_is_left_out_a_valid_value_stays_valid(seed: int, count: int) -> None:
    schema, values = valid_values(seed)
    known = sorted(places(schema))
    if not values or not known or '"#"' in json.dumps(schema):
        return
    dropped = random.Random(seed).sample(known, min(len(known), count))
    found = weaker(schema, set(dropped))
    draft = validator_for(schema, default=Draft202012Validator)
    valid = draft(found, format_checker=draft.FORMAT_CHECKER)
    for value in values:
        assert valid.is_valid(value), f"{value} is valid by {schema}, and not by {found}, without {dropped}"


UNIQUE = {"type": "array", "uniqueItems": True}
ANY = {"type": "array"}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (UNIQUE, ANY),
        ({"uniqueItems": True}, {"minItems": 0}),
        ({"properties": {"a": UNIQUE, "b": {"minimum": 3}}}, {"properties": {"a": ANY, "b": {"minimum": 3}}}),
        ({"oneOf": [UNIQUE, {"type": "null"}]}, {"anyOf": [ANY, {"type": "null"}]}),
        ({"anyOf": [UNIQUE, {"type": "null"}]}, {"anyOf": [ANY, {"type": "null"}]}),
        (
            {"if": UNIQUE, "then": {"minItems": 3}, "else": {"type": "null"}},
            {"anyOf": [{"allOf": [ANY, {"minItems": 3}]}, {"type": "null"}]},
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/s"}}, "$defs": {"s": {**UNIQUE, "items": {"$ref": "#/$defs/s"}}}},
            {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {"0": {**ANY, "items": {"$ref": "#/$defs/0"}}}},
        ),
        ({"type": "object", "unevaluatedProperties": False}, {"type": "object"}),
        ({"type": "array", "contains": {"type": "null"}, "maxContains": 1}, {"type": "array"}),
        (
            {"type": "object", "patternProperties": {"(?<=a)b": {"type": "null"}}, "additionalProperties": False},
            {"type": "object"},
        ),
        ({"type": "number", "multipleOf": 1.1}, {"type": "number"}),
    ],
)
def test_only_what_is_refused_is_left_out(schema: Any, wanted: Any) -> None:
    assert obeyed_schema(schema) == wanted


DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.parametrize(
    ("schema", "dropped", "wanted"),
    [
        ({"not": {"allOf": [UNIQUE, {"minItems": 1}]}}, "not/allOf/0/uniqueItems", {"not": {"allOf": [False, {"minItems": 1}]}}),
        ({"not": {"anyOf": [UNIQUE, {"minItems": 1}]}}, "not/anyOf/0/uniqueItems", {"not": {"anyOf": [False, {"minItems": 1}]}}),
        ({"not": {"not": UNIQUE}}, "not/not/uniqueItems", {"not": {"not": ANY}}),
        ({"not": {"oneOf": [UNIQUE, {"minItems": 1}]}}, "not/oneOf/0/uniqueItems", {"not": False}),
        ({"not": {"if": UNIQUE, "then": False}}, "not/if/uniqueItems", {"not": False}),
        ({"not": {"contains": UNIQUE}}, "not/contains/uniqueItems", {"not": {"contains": False}}),
        ({"not": {"contains": UNIQUE, "maxContains": 2}}, "not/contains/uniqueItems", {"not": False}),
        ({"contains": UNIQUE, "minContains": 2, "maxContains": 3}, "contains/uniqueItems", {"contains": ANY, "minContains": 2}),
        ({"contains": UNIQUE, "minContains": 0}, "minContains", {"minItems": 0}),
        ({"prefixItems": [UNIQUE], "items": False}, "prefixItems", {"minItems": 0}),
        ({"properties": {"a": ANY}, "additionalProperties": False}, "properties", {"minProperties": 0}),
        ({"if": ANY, "then": UNIQUE, "else": UNIQUE}, "then/uniqueItems", {"if": ANY, "then": ANY, "else": UNIQUE}),
        ({"oneOf": [UNIQUE, ANY], "anyOf": [ANY]}, "oneOf", {"anyOf": [UNIQUE, ANY], "allOf": [{"anyOf": [ANY]}]}),
        ({"if": ANY, "then": False}, "if", {"anyOf": [{"allOf": [ANY, False]}, True]}),
        ({"dependentSchemas": {"a": UNIQUE}}, "dependentSchemas/a/uniqueItems", {"dependentSchemas": {"a": ANY}}),
        ({"propertyNames": {"format": "own"}}, "propertyNames/format", {"propertyNames": {}}),
        ({"const": ["a", "a"], "uniqueItems": True}, "uniqueItems", {"const": ["a", "a"], "minItems": 0}),
        (
            {"items": {"$ref": "#/$defs/s"}, "not": {"$ref": "#/$defs/s"}, "$defs": {"s": UNIQUE}}, "$defs/s/uniqueItems",
            {"items": {"$ref": "#/$defs/0"}, "not": {"$ref": "#/$defs/1"}, "$defs": {"0": ANY, "1": False}},
        ),
        ({"$dynamicRef": "#a", "type": "array"}, "type", {}),
        (
            {**DRAFT_7, "$ref": "#/$defs/s", "maxItems": 0, "$defs": {"s": UNIQUE}}, "$defs/s/uniqueItems",
            {**DRAFT_7, "$ref": "#/$defs/0", "$defs": {"0": ANY}},
        ),
        ({**DRAFT_7, "$ref": "other.json", "maxItems": 0}, "maxItems", DRAFT_7),
        ({**DRAFT_7, "properties": {"a": {"$id": "b", "$ref": "#/c"}}}, "type", {**DRAFT_7, "properties": {"a": {}}}),
    ],
)
def test_each_part_becomes_weaker_or_stricter_by_its_place(schema: Any, dropped: str, wanted: Any) -> None:
    assert weaker(schema, {tuple(dropped.split("/"))}) == wanted


def test_a_schema_that_is_obeyed_as_a_whole_stays_as_it_is() -> None:
    assert not rules_of("schema", json.dumps({**UNIQUE, "items": {"enum": ["a", "b"]}}), checks=True).is_weaker
    assert rules_of("schema", json.dumps(SET), checks=True).is_weaker


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": "yes"}, {"$ref": "#/$defs/none"}, {"$ref": "https://example.com/schema"}, {"pattern": "\\p{L}+"},
        {"uniqueItems": True, "properties": {"a": {"$ref": "#/$defs/none"}}},
    ],
)
def test_a_schema_by_which_nothing_can_be_checked_is_refused_all_the_same(schema: Any) -> None:
    for checks in (False, True):
        with pytest.raises(BadSchema) as refused:
            rules_of("schema", json.dumps(schema), checks=checks)
        assert not isinstance(refused.value, UnsupportedSchema)


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"]}}


@pytest.mark.parametrize("form", ["hermes", "glm", "gemma4", "pythonic"])
def test_the_parameters_of_a_forced_call_go_the_same_way(form: str) -> None:
    source = json.dumps({"form": form, "tools": [TOOL], "several": False})
    assert rules_of("tool_choice", source, checks=True).is_weaker
    with pytest.raises(UnsupportedSchema, match=r"tool 'f': .*uniqueItems.* or set decode.schema_unsupported=check"):
        rules_of("tool_choice", source)


@pytest.fixture(scope="module")
def checker() -> AnswerChecker:
    return AnswerChecker()


def checked(checker: AnswerChecker, schema: Any, text: str, **changes: Any) -> tuple[str, str | None]:
    """Status and message of an answer."""
    made = ended(text).replace(unchecked=("schema", json.dumps(schema)), **changes)
    done = checker.checked(made)
    assert (done.text, done.finish_reason, done.unchecked) == (made.text, made.finish_reason, None)
    assert done.error is None or (done.error.stage, done.error.retryable) == ("check", False)
    return done.status, None if done.error is None else f"{done.error.code}, {done.error.message}"


@pytest.mark.parametrize(
    ("schema", "text", "said"),
    [
        (UNIQUE, "[1, true, 2]", None),
        (UNIQUE, "[1, 1.0]", "schema_violated, schema: $ violates uniqueItems: [1, 1.0] has non-unique elements"),
        ({"properties": {"a": {"items": UNIQUE}}}, '{"a": [[], [3, 3]]}', "$.a[1] violates uniqueItems"),
        ({"multipleOf": 0.1}, "0.3", None), ({"multipleOf": 0.01, "type": "number"}, "1e99", None),
        ({"type": "integer", "multipleOf": 1.5}, "3.0", None), ({"multipleOf": 1.1}, "3.4", "$ violates multipleOf: 3.4 is not"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"}, "3.0", "$ violates type"),
        ({"format": "date"}, '"2024-13-01"', "$ violates format"),
        ({"unevaluatedProperties": False}, '{"a": 1}', "$ violates unevaluatedProperties"),
        ({"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "null"}}}, "1", "$ violates type"),
        ({"$ref": "#"}, "1", "schema_unchecked, schema: the answer could not be checked by its schema: it is nested too deeply"),
        ({"pattern": "^(a+)+$"}, f'"{"a" * 40}b"', "schema_unchecked, schema: .* its check takes more than 2 s"),
        (UNIQUE, "[1, 1]", "schema_violated"),
    ],
)
def test_an_answer_is_checked_by_its_whole_schema(checker: AnswerChecker, schema: Any, text: str, said: str | None) -> None:
    status, message = checked(checker, schema, text)
    assert status == ("ok" if said is None else "invalid")
    assert message == said if said is None else re.search(said.replace("$", r"\$").replace("[", r"\["), str(message))


def test_a_cut_answer_is_not_checked(checker: AnswerChecker) -> None:
    assert checked(checker, UNIQUE, "[1, 1]", stop_reason="]") == ("ok", None)
    assert checked(checker, UNIQUE, "[1, 1]", status="truncated", finish_reason="length") == ("truncated", None)
    assert checked(checker, UNIQUE, "[1, 1]", stop_reason="2")[0] == "invalid"  # a stop id ends a whole answer


def test_a_copied_checker_starts_a_process_of_its_own(checker: AnswerChecker) -> None:
    assert checked(pickle.loads(pickle.dumps(checker)), UNIQUE, "[1, 1]")[0] == "invalid"


def test_a_forced_call_is_checked_by_the_schema_of_its_tool(checker: AnswerChecker) -> None:
    source = json.dumps({"form": "hermes", "tools": [TOOL, {"name": "g", "parameters": None}], "several": True})
    for arguments_, status in (("[1, 2]", "ok"), ("[1, 1]", "invalid")):
        named = (("g", "{}"), ("f", f'{{"a": {arguments_}}}'))
        calls = [{"function": {"name": name, "arguments": text}} for name, text in named]
        made = ended("").replace(unchecked=("tool_choice", source), tool_calls=json.dumps(calls))
        assert checker.checked(made).status == status


def test_what_is_left_to_check_is_kept_in_the_journal() -> None:
    made = ended("[]").replace(unchecked=("schema", "{}"))
    kept = from_json(json.loads(json.dumps(to_json(made))))
    assert isinstance(kept, Completion)
    assert kept.unchecked == made.unchecked


def test_an_invalid_answer_says_so_in_openai_s_responses() -> None:
    row = {
        "row_index": 0, "sample_index": 0, "request_id": "r", "status": "invalid", "completion": "[1,1]", "reasoning": None,
        "finish_reason": "stop", "error": {"code": "schema_violated", "message": "why"}, "perf": None,
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "reasoning_tokens": None, "cached_tokens": 0},
    }
    (choice,) = response_line([row], "model")["response"]["body"]["choices"]
    assert choice["message"]["content"] == "[1,1]"
    assert choice["error"] == {"code": "schema_violated", "message": "why"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    return make_tokenizer(folder)


PAIR = {**UNIQUE, "minItems": 2, "maxItems": 2}
LETTERS = {**PAIR, "items": {"type": "string", "pattern": "^[ab]$"}}
NESTED = {"$ref": "#/$defs/n", "$defs": {"n": {**PAIR, "items": {"anyOf": [{"enum": [1, 2]}, {"$ref": "#/$defs/n"}]}}}}
"""Recursive, so that its automaton is lazy."""


@pytest.mark.second
def test_streams_and_turns_have_marked_answers_and_lazy_automata_are_checked_too(model: Path) -> None:
    rows = [{"prompt": f"row {i}", "schema": json.dumps(NESTED if i % 2 else LETTERS)} for i in range(12)]
    options = {
        "model.path": str(model), "model.dtype": "float64", "model.max_len": 64, "decode.max_new_tokens": 40,
        "decode.temperature": 1, "decode.schema_unsupported": "check", "input.columns": {"schema": "schema"}, "input.chat": True,
    }
    with batchspec.Engine(options) as engine:
        found = engine.generate(rows)
        streamed = {done.row_index: done.status for done in engine.stream(rows)}
        turns = dict[int, str]()
        engine.converse(rows, lambda turn: turns.update({turn.completion.row_index: turn.completion.status}))
    statuses = found["status"].to_list()
    assert [streamed[index] for index in range(12)] == [turns[index] for index in range(12)] == statuses
    for row, status, text in zip(rows, statuses, found["completion"].to_list(), strict=True):
        if status != "truncated":
            assert (status == "ok") == Draft202012Validator(json.loads(row["schema"])).is_valid(json.loads(text))
    for of_kind in (statuses[::2], statuses[1::2]):
        assert "invalid" in of_kind


@pytest.mark.second
def test_a_job_keeps_an_answer_that_violates_its_schema_and_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "in.parquet", tmp_path / "out"
    pl.DataFrame({"prompt": [f"row {i}" for i in range(12)]}).write_parquet(data)
    keys = [f"decode.schema={json.dumps(SET)}", "decode.temperature=1", "decode.max_new_tokens=40"]
    assert run.main([*arguments(model, data, out, "draft=lookup"), *keys]) == 2
    assert "/properties/tags/uniqueItems" in (said := capsys.readouterr().err)
    assert "decode.schema_unsupported=check" in said
    keys += ["decode.schema_unsupported=check", "input.num_workers=1"]
    assert plan.main([*arguments(model, data, tmp_path / "plan", "draft=lookup"), *keys]) == 0
    assert "checked      1 distinct schema obeyed in part" in capsys.readouterr().out
    assert run.main([*arguments(model, data, out, "draft=lookup"), *keys]) == 0
    rows = pl.read_parquet(out / "data")
    whole = rows.filter(pl.col("status") != "truncated")
    for row in whole.iter_rows(named=True):
        tags = json.loads(row["completion"])["tags"]
        assert row["status"] == ("ok" if len(set(tags)) == len(tags) else "invalid")
        assert row["finish_reason"] == "stop"
        if row["status"] == "invalid":
            assert row["error"]["code"] == "schema_violated"
            assert row["error"]["message"].startswith("schema: $.tags violates uniqueItems: ")
    counts = dict(whole["status"].value_counts().iter_rows())
    assert counts["ok"] > 0
    assert f"{counts['invalid']} invalid completion" in capsys.readouterr().err
    assert stats.main([str(out)]) == 0
    assert f"{counts['invalid']} invalid" in capsys.readouterr().out
    seen, _ = load("check_schemas").check(out, "none", json.dumps(SET))
    assert (seen["valid"], seen["invalid schema_violated"], seen["invalid"]) == (counts["ok"], counts["invalid"], 0)
