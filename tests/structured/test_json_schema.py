"""Schemas with keywords that hold at once: whatever is written is valid by the declared draft, and usual texts can be written."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator, validator_for

from batchspec.structured.char_dfa import CharDfa
from batchspec.structured.dfa import Dfa, dfa_of
from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.json_schema.schema import schema_rules
from batchspec.structured.regex import regex_node
from batchspec.structured.regex_dialects import possible, sure
from batchspec.structured.regular import Impossible, TooLarge
from tests.structured.test_structured import matches, regexes, samples, schema_dfa

DRAFTS = [None, "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"]
NAMES = st.sampled_from(["a", "b", "ab", "x-a"])
PATTERNS = st.sampled_from(
    ["^a", "b$", "^x-", "[^a]", "^[a-c]{1,3}$", "^(?!a)", r"^\w+$", r"^\S*$", "^a|^b", "", r"\d", r"[^\d\w]"]
)
VALUES = st.sampled_from([1, 1.0, 0, True, None, "a", "ab", "", [], [1], {}, {"a": 1}, 2.5])
SMALL = st.integers(0, 3)
TYPE = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"])


def keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    few, names = st.lists(inner, min_size=1, max_size=3), st.lists(NAMES, max_size=2)
    return {
        "type": st.one_of(TYPE, st.lists(TYPE, min_size=1, max_size=3, unique=True)),
        "properties": st.dictionaries(NAMES, inner, max_size=3), "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner, "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "propertyNames": st.fixed_dictionaries({}, optional={"pattern": PATTERNS, "maxLength": SMALL}),
        "minProperties": SMALL, "maxProperties": SMALL, "dependentRequired": st.dictionaries(NAMES, names, max_size=2),
        "dependencies": st.dictionaries(NAMES, st.one_of(inner, names), max_size=2),
        "items": inner, "prefixItems": few, "minItems": SMALL, "maxItems": SMALL, "contains": inner,
        "minContains": SMALL, "uniqueItems": st.booleans(),
        "pattern": PATTERNS, "minLength": SMALL, "maxLength": SMALL, "format": st.sampled_from(["date", "ipv4", "own"]),
        "minimum": st.sampled_from([-3, 0, 0.5, 2]), "maximum": st.sampled_from([0, 0.75, 1, 3.25]),
        "exclusiveMinimum": st.sampled_from([-1.5, 0, 2]), "exclusiveMaximum": st.sampled_from([0.1, 1, 3]),
        "multipleOf": st.sampled_from([2, 3, 0.5, 0.1]), "enum": st.lists(VALUES, min_size=1, max_size=4), "const": VALUES,
        "anyOf": few, "allOf": few, "oneOf": few, "not": inner, "if": inner, "then": inner, "else": inner,
        "$ref": st.sampled_from(["#", "#/$defs/d"]),
    }


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> Any:
    if draw(st.integers(0, 9)) == 0:
        return draw(st.booleans())
    known = keywords(schemas(depth=depth - 1)) if depth else keywords(st.just({}))
    if not depth:
        known = {
            key: known[key] for key in ("type", "enum", "const", "required", "pattern", "maxLength", "minimum", "multipleOf")
        }
    names = draw(st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True))
    return {name: draw(known[name]) for name in names}


@st.composite
def documents(draw: st.DrawFn) -> Any:
    found = draw(schemas())
    draft = draw(st.sampled_from(DRAFTS))
    return {**(found if isinstance(found, dict) else {"not": {}}), "$defs": {"d": draw(schemas(depth=1))}} | (
        {"$schema": draft} if draft else {}
    )


@pytest.mark.second
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(documents())
@example({"oneOf": [{"required": ["a"]}, {"required": ["b"], "properties": {"b": {}}}]})
@example({"oneOf": [{"properties": {"a": {"type": "null"}}}, {"not": {"required": ["a"]}}], "properties": {"b": {}}})
@example({"oneOf": [{"required": ["a"]}, {"type": "string"}], "anyOf": [{"type": "string"}, {"type": "object"}]})
@example({"not": {"properties": {"a": {"minimum": 1}}}, "properties": {"a": {"type": "number"}}})
@example({"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}, "properties": {"a": {"enum": [1, 2]}}})
def test_every_text_of_every_schema_is_valid(schema: Any) -> None:
    draft = validator_for(schema, default=Draft202012Validator)
    try:
        draft.check_schema(schema)
    except jsonschema.SchemaError:
        return
    try:
        node = schema_rules(schema).inlined()
        if node is None:
            return
        dfa = dfa_of(node)
    except (BadSchema, Impossible, TooLarge):
        return
    for text in samples(dfa, 8, most_bytes=30):
        try:
            draft(schema).validate(json.loads(text))
        except RecursionError:  # a schema that refers to itself at once
            return


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(documents(), st.data())
def test_a_value_of_a_wrong_type_is_refused_or_ignored(schema: Any, data: st.DataObject) -> None:
    keys = sorted(schema.keys() - {"$schema", "$defs"})
    if keys:
        schema = schema | {
            data.draw(st.sampled_from(keys)): data.draw(st.sampled_from([None, 3, -1, 1.5, "x", [], [3], {"a": 3}, 1e400]))
        }
    with suppress(BadSchema, Impossible, TooLarge):
        schema_rules(schema)


def written(schema: Any, *texts: str) -> list[bool]:
    dfa = schema_dfa(schema)
    return [matches(dfa, text.encode()) for text in texts]


def check_samples(schema: Any) -> Dfa:
    draft = validator_for(schema, default=Draft202012Validator)
    dfa = schema_dfa(schema)
    for text in samples(dfa, 30):
        draft(schema).validate(json.loads(text))
    return dfa


def test_a_pattern_and_a_length_count_characters_not_bytes_or_escapes() -> None:
    schema = {"type": "string", "pattern": '^[aé"\\n]+$', "minLength": 2, "maxLength": 3}
    assert written(schema, '"é"', '"éa"', '"\\"\\n\\""', '"éééé"', '"ab"') == [False, True, True, False, False]
    check_samples(schema)
    both = {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"format": "hostname"}, {"minLength": 3}], "type": "string"}
    assert written(both, '"ab"', '"acb"', '"a b"', '"bab"') == [False, True, False, False]


@pytest.mark.second
def test_a_long_text_with_a_pattern_is_cut_to_what_can_be_counted() -> None:
    dfa = check_samples({"type": "string", "pattern": "^\\S+$", "maxLength": 100_000})
    assert matches(dfa, b'"' + b"a" * 500 + b'"')
    with pytest.raises(TooLarge, match="5,000 characters"):
        schema_dfa({"type": "string", "pattern": "^\\S+$", "minLength": 5_000})


@pytest.mark.second
@settings(max_examples=100, deadline=None)
@given(regexes(depth=2), regexes(depth=2), st.lists(st.text("abcé\n", max_size=6), min_size=5, max_size=10))
def test_automata_over_characters_are_intersected_and_subtracted(one: str, other: str, texts: list[str]) -> None:
    ours, theirs = CharDfa.of(regex_node(one)), CharDfa.of(regex_node(other))
    made = [ours, theirs, ours.both(theirs), ours.without(theirs), ours.of_length(1, 3)]
    dfas = [None if auto.is_empty else dfa_of(auto.node(lambda chars: chars)) for auto in made]
    for text in texts:
        a, b, *rest = [dfa is not None and matches(dfa, text.encode()) for dfa in dfas]
        assert rest == [a and b, a and not b, a and 1 <= len(text) <= 3], text


def test_classes_mean_what_both_readings_of_a_pattern_mean() -> None:
    """A validator with Python's `re` takes é for a word character, one with ECMA-262 does not."""
    for pattern, surely, possibly in (
        ("\\w", "a", "aé"), ("\\W", " -", " -é\xa0"), ("[^\\w]", " -\xa0", " -é\xa0"), ("\\s", " ", " \xa0"),
        ("\\S", "a-é", "a-é\xa0"),
        ("[^\\s]", "a-é", "a-é\xa0"), ("\\D", "a -é\xa0", "a -é\xa0"),
    ):
        for dialect, chars in ((sure(), surely), (possible(), possibly)):
            dfa = dfa_of(regex_node(pattern, dialect=dialect))
            found = "".join(char for char in "a -é\xa0" if matches(dfa, char.encode()))
            assert found == chars, pattern
    assert written({"type": "string", "pattern": "^\\W$"}, '"-"', '"é"', '"…"') == [True, False, True]


def test_keys_of_a_pattern_get_its_values_and_named_ones_both() -> None:
    schema = {
        "type": "object", "properties": {"n": {"type": "integer"}, "x-n": {"minimum": 2}},
        "patternProperties": {"^x-": {"type": "integer"}, "y$": {"maximum": 5}}, "additionalProperties": False,
    }
    texts = [
        '{"x-a":1}', '{"x-a":"b"}', '{"x-y":9}', '{"x-y":5}', '{"n":1,"x-n":2,"x-b":1,"ay":3.5}',
             '{"x-n":1}', '{"m":1}', '{"n":1,"n":2}',
    ]
    assert written(schema, *texts) == [True, False, False, True, True, False, False, False]
    check_samples(schema)
    only = {"patternProperties": {"^[a-z]$": {"type": "null"}}, "additionalProperties": {"type": "boolean"}}
    assert written(only, '{"a":null}', '{"A":true}', '{"a":true}', '{"a":null,"A":true}') == [True, True, False, True]
    check_samples(only)


@pytest.mark.parametrize(
    ("schema", "texts", "expected"),
    [
        ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "maxProperties": 2},
         ['{"a":1}', '{"a":1,"c":2}', '{"b":1,"c":2}', '{"a":1,"b":1,"c":2}'], [False, True, True, False]),
        ({"additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
         ["{}", '{"q":null}', '{"q":null,"r":null}', '{"q":null,"r":null,"s":null}'], [False, True, True, False]),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}, "minProperties": 2},
         ['{"a":1}', '{"a":1,"xa":1}', '{"xa":1,"xb":2}'], [False, True, False]),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 0}, ["{}", '{"a":1}', '{"a":1,"b":1}'], [True, False, False]),
        ({"propertyNames": {"pattern": "^[a-z]+$", "maxLength": 3}, "type": "object"},
         ['{"abc":1}', '{"abcd":1}', '{"A":1}'], [True, False, False]),
        ({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
         [False, True, True]),
        ({"$schema": DRAFTS[2], "properties": {"a": {}, "b": {}}, "dependencies": {"a": {"properties": {"b": {"type": "null"}}}}},
         ['{"a":1,"b":1}', '{"b":1}', '{"a":1,"b":null}'], [False, True, True]),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}},
         ['{"a":1}', '{"b":1}', '{"a":1,"b":1}', "{}"], [True, True, False, False]),
        ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}]},
         ['"a"', '"b"', '"ab"', '"c"'], [True, True, False, False]),
        ({"oneOf": [{"type": "number", "maximum": 2}, {"type": "number", "minimum": 2}]}, ["1", "2", "3"], [True, False, True]),
        ({"oneOf": [{"type": "object", "properties": {"a": {}}, "additionalProperties": False},
                    {"type": "object", "properties": {"b": {}}, "required": ["b"]}]}, ["{}", '{"a":1}', '{"b":1}'], [True] * 3),
        ({"type": "object", "properties": {"a": {}}, "not": {"required": ["a"]}}, ["{}", '{"a":1}'], [True, False]),
        ({"type": "string", "not": {"enum": ["a", "b"]}}, ['"a"', '"c"', '"ab"', '""'], [False, True, True, True]),
        ({"type": ["string", "null", "integer"], "not": {"type": "null"}}, ['"a"', "null", "1"], [True, False, True]),
        ({"if": {"properties": {"k": {"const": 1}}}, "then": {"required": ["v"]}, "else": {"properties": {"v": {"type": "null"}}},
          "properties": {"k": {"enum": [1, 2]}, "v": {}}, "required": ["k"]},
         ['{"k":1}', '{"k":1,"v":3}', '{"k":2}', '{"k":2,"v":3}', '{"k":2,"v":null}'], [False, True, True, False, True]),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "maxItems": 3},
         ["[]", "[1]", "[1,7]", "[7,1,1]", "[7,1,1,1]"], [False, False, True, True, False]),
        ({"type": "integer", "multipleOf": 7, "minimum": -20, "exclusiveMaximum": 28}, ["0", "7", "-14", "-21", "8", "28"],
         [True, True, True, False, False, False]),
        ({"type": "number", "multipleOf": 0.01}, ["3", "0.5"], [True, False]),
        ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", 1]}}, ["[]", '["b","a"]', '["a","a"]', '[1,"a"]'],
         [True, True, False, True]),
        ({"type": "array", "uniqueItems": True, "items": {"enum": list(range(9))}, "minItems": 2}, ["[1]", "[1,5]", "[5,1]"],
         [False, True, False]),
        ({"enum": [1, "abc", "a", {"k": 1}, 8], "maxLength": 2, "maximum": 3, "required": ["j"]},
         ["1", '"abc"', '"a"', '{"k":1}', "8"],
         [True, False, True, False, False]),
        ({"type": "number", "minimum": 0.25, "exclusiveMaximum": 1.5}, ["0.25", "0.2", "0.3", "1", "1.49", "1.5", "1.50", "-1"],
         [True, False, True, True, True, False, False, False]),
        ({"type": "number", "minimum": -2.5, "maximum": -0.5}, ["-2.5", "-2.51", "-1", "-0.5", "-0.49", "0"],
         [True, False, True, True, False, False]),
        ({"$schema": DRAFTS[1], "type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["3", "4"], [False, True]),
        ({"type": "string", "pattern": "^(?!ab)[a-c]+$"}, ['"ab"', '"abc"', '"a"', '"ba"'], [False, False, True, True]),
        ({"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]}, ['{"a":1}', '{"b":1}'],
         [True, False]),
    ],
)
def test_which_texts_can_be_written(schema: Any, texts: list[str], expected: list[bool]) -> None:
    assert written(schema, *texts) == expected
    check_samples(schema)


def test_a_bound_that_is_left_out_is_not_met_by_rounding() -> None:
    schema = {"type": "number", "exclusiveMinimum": 1000, "exclusiveMaximum": 1001}
    dfa = check_samples(schema)
    assert not matches(dfa, b"1000.00000000000001")  # a double of 1000
    assert matches(dfa, b"1000.00000000001")


def test_what_a_draft_does_not_have_proves_nothing() -> None:
    """Draft-04 has no const: to its validators both parts are the same, so that none fits alone."""
    parts = {"oneOf": [{"const": "a"}, {"const": "b"}]}
    assert written(parts, '"a"', '"b"') == [True, True]
    with pytest.raises(BadSchema, match="oneOf"):
        schema_rules({"$schema": DRAFTS[1], **parts})


@pytest.mark.parametrize(
    ("schema", "texts", "expected"),
    [
        ({"type": "number", "not": {"enum": [2.5]}}, ["2.5", "25e-1", "2"], [False, False, True]),
        ({"propertyNames": {"type": "null"}}, ["{}", '{"a":1}'], [True, False]),
        ({"propertyNames": False, "type": "object"}, ["{}", '{"a":1}'], [True, False]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 0}, ["{}", '{"a":1}'], [True, False]),
        ({"$schema": DRAFTS[1], "type": "integer", "enum": [1.0, 2]}, ["1.0", "2"], [False, True]),
        ({"type": "integer", "enum": [1.0, 2]}, ["1.0", "2"], [True, True]),
        ({"$schema": DRAFTS[2], "type": "array", "contains": {"const": 1}, "minContains": 0, "items": {"enum": [1, 2]}},
         ["[]", "[2]", "[1]"], [False, False, True]),
        ({"$schema": DRAFTS[2], "contains": {"const": 1}, "minContains": 0, "enum": [[], [1]]}, ["[]", "[1]"], [False, True]),
        ({"$schema": DRAFTS[2], "prefixItems": [{"const": 1}], "maxItems": 1, "minItems": 1}, ["[1]", "[2]"], [True, False]),
    ],
)
def test_texts_that_only_another_reading_of_a_keyword_would_allow(schema: Any, texts: list[str], expected: list[bool]) -> None:
    """propertyNames of no string leaves {} alone; draft-04 takes 1.0 for no integer; draft-07 has no minContains."""
    assert written(schema, *texts) == expected
    check_samples(schema)


def test_items_after_prefix_items_are_refused_where_the_draft_has_no_prefix_items() -> None:
    """To its validators `items` is for all elements."""
    for more in ({}, {"enum": [[7, 1], [1]]}):
        schema = {"prefixItems": [{"const": 7}], "items": {"const": 1}, **more}
        assert written(schema, "[7,1]") == [True]
        with pytest.raises(BadSchema, match=r"^/prefixItems is not of the declared draft: take out \$schema"):
            schema_rules({"$schema": DRAFTS[2], **schema})


@pytest.mark.second
def test_listed_values_are_written_whatever_type_the_other_keywords_imply() -> None:
    """Not all validators check formats: the listed text may fit both parts, though other strings of the first would not."""
    schema = {"additionalProperties": False, "oneOf": [{"type": "string", "format": "ipv4"}, {"enum": ["x"]}]}
    assert written(schema, '"x"', '"1.2.3.4"') == [False, True]
    schema = {"oneOf": [{"required": ["a"]}, {"enum": [{"a": 1}, {"b": 1}], "properties": {"b": {}}}]}
    assert written(schema, '{"a":1}', '{"b":1}', '{"a":2}') == [False, True, True]
    check_samples(schema)


@pytest.mark.parametrize(
    "schema", [{"enum": [1e400]}, {"multipleOf": 1e400}, {"minLength": math.nan}, {"type": "number", "multipleOf": 1e-300}]
)
def test_numbers_out_of_the_range_of_a_double_are_refused(schema: Any) -> None:
    """JSON has no text for an infinite number, and a quotient that overflows is a multiple of nothing."""
    with pytest.raises(BadSchema):
        schema_rules(schema)


DEPENDING = (
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"$schema": DRAFTS[2], "dependencies": {"a": ["b"]}},
)


@pytest.mark.parametrize("depending", DEPENDING, ids=lambda one: list(one)[-1])
def test_dependencies_of_properties_say_nothing_of_other_types(depending: Any) -> None:
    named: dict[str, Any] = {"properties": {"a": {}, "b": {}}}
    either = written({"type": ["object", "null"], **named, **depending}, "null", "{}", '{"a":1}', '{"a":1,"b":1}')
    assert either == [True, True, False, True]
    assert written({"type": ["boolean", "null"], **depending}, "true", "null") == [True, True]
    required = {"type": ["object", "string"], **named, "required": ["a"], **depending}
    assert written(required, '"x"', '{"a":1}', '{"b":1}', '{"a":1,"b":1}') == [True, False, False, True]
    check_samples(required)


@pytest.mark.parametrize(
    ("keywords", "texts"),
    [
        ({"required": ["a"], "minItems": 1}, ['{"a":1}', "[1]"]), ({"maxLength": 2, "minimum": 3}, ['"ab"', "3"]),
        ({"items": {"type": "null"}, "pattern": "^a"}, ["[null]", '"a"']),
        ({"maxProperties": 0, "maxItems": 0, "maxLength": 0, "maximum": 0}, ["{}", "[]", '""', "0"]),
    ],
)
def test_keywords_of_one_type_do_not_exclude_the_types_of_others(keywords: Any, texts: list[str]) -> None:
    """Neither where these types are named nor where none is."""
    types = ["object", "array", "string", "number", "null"]
    assert all(written(keywords, *texts))
    assert all(written({"type": types, **keywords}, *texts, "null"))
    assert written(keywords, "null", "true") == [False, False]  # without `type` only those that keywords are about
    check_samples(keywords)


@pytest.mark.parametrize(
    ("schema", "texts", "expected"),
    [
        ({"type": "object", "oneOf": [{"properties": {one: {"type": "string"}}, "additionalProperties": False} for one in "ab"]},
         ['{"a":"x"}', '{"b":"x"}', "{}", '{"a":"x","b":"x"}'], [True, True, False, False]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "not": {"properties": {"a": {}}, "additionalProperties": False}},
         ["{}", '{"a":1}', '{"a":1,"b":1}'], [False, False, True]),
        ({"type": "object", "not": {"properties": {"a": {}}, "additionalProperties": {"type": "null"}}},
         ['{"a":1}', '{"b":null}', '{"b":1}'], [False, False, True]),
        ({"type": "object", "properties": {"xa": {}, "b": {}}, "not": {"patternProperties": {"^x": {"type": "null"}}}},
         ['{"b":1}', '{"xa":null}', '{"xa":1}'], [False, False, True]),
        ({"type": "object", "properties": {"a": {}, "bc": {}}, "not": {"propertyNames": {"maxLength": 1}}},
         ['{"a":1}', '{"bc":1}'], [False, True]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "not": {"dependentRequired": {"a": ["b"]}}},
         ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'], [True, False, False]),
        ({"type": "number", "not": {"type": "integer"}}, ["1", "1.0", "1.5", "-0.25"], [False, False, True, True]),
        ({"type": "number", "maximum": 3, "not": {"enum": [2.5, 1]}}, ["1", "2.5", "2.50", "2.51", "2"],
         [False, False, False, True, True]),
        ({"type": "array", "items": {"type": "integer"}, "not": {"contains": {"minimum": 5}}}, ["[]", "[4]", "[4,5]"],
         [True, True, False]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "not": {"enum": [{}, {"a": 1}]}},
         ["{}", '{"a":1}', '{"a":2}', '{"a":1,"b":1}'], [False, False, True, True]),
        ({"not": {"oneOf": [{"minimum": 2}, {"maximum": 4}]}, "type": "number"}, ["1", "3", "5"], [False, True, False]),
        ({"enum": [[1, 1], [1, 2], 3], "not": {"uniqueItems": True}}, ["[1,1]", "[1,2]", "3"], [True, False, False]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ["{}", '{"a":1}', '{"c":1}'], [True, True, False]),
    ],
)
def test_what_fails_a_schema_can_be_written(schema: Any, texts: list[str], expected: list[bool]) -> None:
    assert written(schema, *texts) == expected
    check_samples(schema)


@pytest.mark.parametrize(
    ("schema", "keyword", "valid"),
    [
        ({"required": ["a"], "additionalProperties": False}, "/type", 5),
        ({"type": "number", "multipleOf": 0.1, "minimum": 0.1, "maximum": 0.9}, "/multipleOf", 0.5),
        ({"type": "number", "minimum": 1e300, "maximum": 1e301}, "/minimum", 2e300),
        ({"type": "string", "format": "date", "maxLength": 9}, "/format", "x"), ({"contains": False}, "/type", 5),
        ({"type": "object", "properties": {"a": {"enum": []}}, "minProperties": 1}, "/minProperties", {"b": 1}),
        ({"type": "object", "required": ["a"], "not": {"items": {}, "uniqueItems": True, "required": ["a"]}}, "/not", None),
        ({"$schema": DRAFTS[1], "type": "string", "const": 1}, "/const", "x"),
        ({"$schema": DRAFTS[2], "$ref": "#/$defs/a", "type": "null", "$defs": {"a": {"type": "string"}}}, "/type", "x"),
        ({"type": "string", "format": "date", "enum": ["today"]}, "listed value", "today"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, False]}}}, "leads back to itself", None),
        ({"type": "array", "minItems": 1, "items": {"required": ["a"], "additionalProperties": False}}, "/items/type", [5]),
    ],
)
def test_what_is_empty_only_as_it_is_written_is_refused_by_its_keyword(schema: Any, keyword: str, valid: Any) -> None:
    """It is not impossible: a value is valid, though nothing can be written."""
    with pytest.raises(BadSchema, match=keyword):
        schema_rules(schema)
    if valid is not None:
        assert validator_for(schema, default=Draft202012Validator)(schema).is_valid(valid)


@pytest.mark.parametrize(
    "schema",
    [
        False, {"enum": []}, {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, {"type": "string", "not": {}},
        {"type": "number", "multipleOf": 0.5, "minimum": 0.1, "maximum": 0.4}, {"type": "null", "not": {"const": None}},
        {"type": "integer", "minimum": 1, "maximum": 2, "not": {"enum": [1, 2]}},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "properties": {"a": False}, "required": ["a"]}, {"type": "string", "pattern": "^ab", "maxLength": 1},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "minProperties": 2},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"type": "string", "not": {"pattern": "^a?"}},
    ],
)
def test_what_is_proved_to_have_no_value_is_impossible(schema: Any) -> None:
    with pytest.raises(Impossible):
        schema_rules(schema)


def test_references_that_lead_back_to_themselves_add_no_values() -> None:
    schema = {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"anyOf": [{"$ref": "#"}]}}}
    assert written(schema, "null", "1") == [True, False]


def test_a_listed_value_is_written_if_all_validators_accept_it() -> None:
    """Some check formats, and some know keywords of later drafts."""
    schema = {"type": "string", "format": "date", "enum": ["2024-02-29", "today"]}
    assert written(schema, '"2024-02-29"', '"today"') == [True, False]
    older = {"$schema": DRAFTS[1], "enum": [{"a": 1}, {"a": 2}], "properties": {"a": {"const": 1}}}
    assert written(older, '{"a":1}', '{"a":2}') == [True, False]
    excluded = {"$schema": DRAFTS[1], "enum": [{"a": 2}, {}], "properties": {"a": {"not": {"const": 1}}}}
    assert written(excluded, '{"a":2}', "{}") == [False, True]
