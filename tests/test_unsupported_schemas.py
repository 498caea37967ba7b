"""decode.schema_unsupported: schemas with keywords that no automaton obeys, from the weaker schema to the marked row."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator, validator_for

from batchspec import run
from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.json_schema.schema import schema_rules
from batchspec.structured.json_schema.weaker import places, weaker
from batchspec.structured.parse import rules_of
from batchspec.structured.rules import Rules
from batchspec.structured.unsupported import UnsupportedSchema, obeyed
from tests.models import make_checkpoint, make_tokenizer
from tests.random_schemas import RandomSchemas
from tests.test_job import arguments

LETTERS = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}
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
    """A random schema, and values that are valid by it; none where it is no schema of its draft or refers to itself at once."""
    made = RandomSchemas(seed)
    schema = made.document()
    draft = validator_for(schema, default=Draft202012Validator)
    try:
        draft.check_schema(schema)
        true = draft(schema, format_checker=draft.FORMAT_CHECKER)
        return schema, [value for value in made.values(schema, 30) if true.is_valid(value)]
    except (jsonschema.SchemaError, RecursionError):
        return schema, []


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
        ({"oneOf": [UNIQUE, {"type": "null"}]}, {"allOf": [{"anyOf": [ANY, {"type": "null"}]}]}),
        ({"anyOf": [UNIQUE, {"type": "null"}]}, {"anyOf": [ANY, {"type": "null"}]}),
        (
            {"if": UNIQUE, "then": {"minItems": 3}, "else": {"type": "null"}},
            {"allOf": [{"anyOf": [{"allOf": [ANY, {"minItems": 3}]}, {"type": "null"}]}]},
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
        ({"if": ANY, "then": False}, "if", {"allOf": [{"anyOf": [{"allOf": [ANY, False]}, True]}]}),
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
    assert not rules_of("schema", json.dumps(LETTERS | {"uniqueItems": True}), checks=True).is_weaker
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


@pytest.mark.second
def test_a_job_keeps_an_answer_that_violates_its_schema_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tokenizer(make_checkpoint(tmp_path / "model", "llama", dtype=torch.float64, num_hidden_layers=1))
    data, out = tmp_path / "in.parquet", tmp_path / "out"
    pl.DataFrame({"prompt": [f"row {i}" for i in range(12)]}).write_parquet(data)
    keys = [f"decode.schema={json.dumps(SET)}", "decode.temperature=1", "decode.max_new_tokens=40"]
    assert run.main([*arguments(model, data, out, "draft=lookup"), *keys]) == 2
    assert "/properties/tags/uniqueItems" in (said := capsys.readouterr().err)
    assert "decode.schema_unsupported=check" in said
    assert run.main([*arguments(model, data, out, "draft=lookup"), *keys, "decode.schema_unsupported=check"]) == 0
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
