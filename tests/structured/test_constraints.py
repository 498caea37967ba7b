"""decode.schema, regex and choice, the columns of these names and response_format: the rows they make, and whole jobs."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import polars as pl
import pyarrow as pa
import pytest
import torch

import batchspec
from batchspec import run
from batchspec.commands import plan
from batchspec.config.checks import check
from batchspec.config.schema import RunConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import table_source
from batchspec.errors import ConfigError
from batchspec.packing.admit import Admission
from batchspec.records import Completion, Request
from batchspec.text.tokenizer import Tokenizer
from batchspec.warm.conversations import Turn
from tests.engine.test_admit import job, prompts
from tests.helpers.automata import finite
from tests.helpers.models import make_checkpoint, make_thinking_tokenizer, make_tokenizer
from tests.helpers.stand_ins import small_spec
from tests.job.test_job import arguments
from tests.warm.test_loops import load

NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "age": NUMBER, "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["age", "kind"],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_tokenizer(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_thinking_tokenizer(tmp_path_factory.mktemp("thinking")))


def admit(
    tokenizer: Tokenizer | None, table: pa.Table, config: RunConfig | None = None, **changes: Any
) -> list[Request | Completion]:
    config = config or job(**changes)
    source = table_source(table)
    columns = map_columns(source.schema, config.input.columns)
    spec = replace(small_spec(), vocab_size=400)
    admission = Admission(config, source=source, columns=columns, spec=spec, tokenizer=tokenizer)
    return [made for shard in source.shards(20) for made in admission.admit_compiled(shard)]


def writes(request: Request | Completion, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text is a whole answer of the request."""
    assert isinstance(request, Request), request
    automaton = finite(request.automaton)
    state = automaton.walk(request.automaton_state, tokenizer.encode(text))
    return state > 0 and bool(automaton.allowed(state)[list(request.stop_ids)].all())


@pytest.mark.parametrize(
    ("key", "value", "yes", "no"),
    [
        ("schema", NUMBER, "7", "10"), ("schema", json.dumps(NUMBER), "7", "10"), ("regex", "[ab]{2}", "ba", "b"),
        ("choice", ["yes", "no"], "no", "yesno"),
    ],
)
def test_a_job_s_constraint_holds_for_every_row(tokenizer: Tokenizer, key: str, value: Any, yes: str, no: str) -> None:
    first, second = admit(tokenizer, prompts("x", "y"), **{f"decode__{key}": value})
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    assert first.automaton is second.automaton
    assert writes(first, tokenizer, yes)
    assert not writes(first, tokenizer, no)


def test_a_schema_may_be_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "number.json").write_text(json.dumps(NUMBER))
    (one,) = admit(tokenizer, prompts("x"), decode__schema=str(tmp_path / "number.json"))
    assert writes(one, tokenizer, "3")


def test_a_row_s_own_constraint_replaces_the_job_s(tokenizer: Tokenizer) -> None:
    form = [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}]
    table = prompts(
        *"abcdefg",
        schema=pa.array([json.dumps(NUMBER), *[None] * 6]), regex=pa.array([None, "a+", *[None] * 5]),
        choice=pa.array([None, None, ["p", "q"], *[None] * 4]),
        response_format=pa.array([*[None] * 4, *map(json.dumps, form)]),
    )
    names: dict[str, str | None] = {"schema": "schema", "regex": "regex", "choice": "choice"}
    rows = admit(tokenizer, table, decode__schema={"type": "boolean"}, input__columns=names)
    for row, text in zip(rows, ["5", "aa", "q", "true", None, '{"a": [1]}', "null"], strict=True):
        if text is None:
            assert isinstance(row, Request)
            assert row.automaton is None
        else:
            assert writes(row, tokenizer, text)
            assert writes(row, tokenizer, "true") == (text == "true")


def test_choices_may_be_json_text_and_every_item_is_read_as_text(tokenizer: Tokenizer) -> None:
    cells = ['["yes", "no"]', '["1", "true"]', '["{}"]', "yes, no", '{"a": 1}']
    *good, bare, other = admit(tokenizer, prompts(*"abcde", choice=pa.array(cells)), input__columns={"choice": "choice"})
    for row, text in zip(good, ("no", "true", "{}"), strict=True):
        assert writes(row, tokenizer, text)
        assert not writes(row, tokenizer, "maybe")
    for row, said in ((bare, "choice is text, and it is not JSON"), (other, "must be a list of strings")):
        assert isinstance(row, Completion)
        assert row.error is not None
        assert said in row.error.message


def test_columns_of_such_names_mean_nothing_unless_they_are_named(tokenizer: Tokenizer) -> None:
    table = prompts("a", schema=pa.array(["CREATE TABLE t"]), choice=pa.array([["x"]]), regex=pa.array([3]))
    (row,) = admit(tokenizer, table)
    assert isinstance(row, Request)
    assert row.automaton is None


@pytest.mark.parametrize(
    ("column", "cell", "code", "said"),
    [
        ("schema", '{"enum": []}', "impossible", "no text matches"),
        ("schema", '{"unevaluatedItems": false}', "unsupported_schema", "or set decode.schema_unsupported=check"),
        ("schema", "[1]", "bad_parameter", "must be an object"), ("schema", "{", "bad_parameter", "schema is text"),
        ("grammar", "start: x", "bad_schema", "not a Lark grammar"), ("grammar", 'root ::= "a" root', "impossible", "no text"),
        ("grammar", 'root ::= a\na ::= b "x" | "y"\nb ::= a', "bad_schema", "begins with itself"),
        ("response_format", '{"type": "grammar"}', "bad_parameter", "response_format.grammar must be text"),
        ("regex", "(", "bad_schema", "not a regular"),
        ("choice", "[]", "bad_parameter", "list of strings"),
        ("response_format", '{"type": "xml"}', "bad_parameter", "must be text"),
        ("response_format", '{"type": "json_schema"}', "bad_parameter", "json_schema.schema"),
    ],
)
def test_a_constraint_that_cannot_be_met_is_an_error_row(
    tokenizer: Tokenizer, column: str, cell: str, code: str, said: str
) -> None:
    table = prompts("a", "b", **{column: pa.array([cell, None])})
    bad, good = admit(tokenizer, table, input__columns={column: column})
    assert isinstance(bad, Completion)
    assert bad.error is not None
    assert bad.error.code == code
    assert said in bad.error.message
    assert "\n" not in bad.error.message
    assert isinstance(good, Request)


def test_two_constraints_of_one_row_are_refused(tokenizer: Tokenizer) -> None:
    names: dict[str, str | None] = {"schema": "schema", "regex": "regex"}
    table = prompts("a", schema=pa.array(["{}"]), regex=pa.array(["a"]))
    (bad,) = admit(tokenizer, table, input__columns=names)
    assert isinstance(bad, Completion)
    assert bad.error is not None
    assert "schema and regex are both given" in bad.error.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decode__schema": {"enum": []}}, "decode.schema: no text matches"), ({"decode__regex": "("}, "decode.regex: '\\('"),
        ({"decode__schema": "none.json"}, "cannot be read"), ({"decode__schema": "{"}, "is not valid JSON"),
        ({"decode__schema": [1]}, "must be a JSON Schema"),
        ({"decode__regex": "a", "decode__ignore_eos": True}, "needs a token that ends"),
        ({"decode__regex": "a", "draft__synthetic": [0.5]}, "draft.synthetic"),
        ({"decode__regex": "a", "decode__stop_ids": [0, 68]}, r"decode.stop_ids=\[0, 68\]: token 68 is the text .*decode.stop"),
    ],
)
def test_a_job_that_cannot_be_met_is_refused(tokenizer: Tokenizer, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        admit(tokenizer, prompts("a"), **changes)


def test_a_stop_id_without_a_text_ends_an_answer_too(tokenizer: Tokenizer) -> None:
    (row,) = admit(tokenizer, prompts("a"), decode__regex="a", decode__stop_ids=[0], decode__ignore_eos=True)
    assert isinstance(row, Request)
    assert row.stop_ids == (0,)
    assert writes(row, tokenizer, "a")


def test_a_job_has_one_constraint() -> None:
    with pytest.raises(ConfigError, match=r"decode.schema and decode.choice are both given"):
        check(job(decode__schema={"type": "null"}, decode__choice=["a"]))


@pytest.mark.second
def test_reasoning_is_free(thinking: Tokenizer) -> None:
    begin, end = (thinking.added_ids[text] for text in ("<think>", "</think>"))
    table = pa.table({"prompt_ids": pa.array([[9], [9, begin], [9, begin, end]], pa.list_(pa.int32()))})
    rows = admit(thinking, table, decode__schema=NUMBER)
    free = [end, *thinking.encode("7"), 2]
    for row, first in zip(rows, ([begin, 7, *thinking.encode("so"), *free], [7, *free], thinking.encode("7")), strict=True):
        assert isinstance(row, Request)
        automaton = finite(row.automaton)
        state, answer = row.automaton_state, [token for token in first if token != 2]
        for token in answer:
            assert automaton.allowed(state)[token]
            assert automaton.allowed(state)[2] == False  # noqa: E712
            state = automaton.walk(state, [token])
        assert automaton.allowed(state)[2]
        assert not automaton.allowed(state)[begin]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    return make_tokenizer(folder)


@pytest.mark.second
@pytest.mark.smoke("a structured row with drafts")
def test_every_completed_row_of_a_job_is_valid_whatever_drafts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
    own: list[dict[str, Any] | None] = [None, other, None, {"enum": []}, other, None, None, None]
    data = tmp_path / "in.parquet"
    cells = [None if one is None else json.dumps(one) for one in own]
    pl.DataFrame({"prompt": [f"row {i}" for i in range(8)], "wanted": cells}).write_parquet(data)
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    keys = [
        f"decode.schema={tmp_path}/person.json", "input.columns.schema=wanted", "decode.temperature=1",
        "decode.max_new_tokens=60", "input.max_error_fraction=1",
    ]
    found = []
    for drafter, num_workers in (("none", 0), ("lookup", 1)):
        assert (
            run.main([*arguments(model, data, tmp_path / drafter, f"draft={drafter}"), *keys, f"input.num_workers={num_workers}"])
            == 0
        )
        found.append(pl.read_parquet(tmp_path / drafter / "data").sort("row_index"))
    assert found[0]["completion"].to_list() == found[1]["completion"].to_list()
    statuses = found[0]["status"].to_list()
    assert statuses[3] == "error"
    assert statuses.count("ok") >= 4
    for row in found[0].iter_rows(named=True):
        if row["status"] == "ok":
            jsonschema.validate(json.loads(row["completion"]), own[row["row_index"]] or PERSON)
    checks, words = load("check_schemas"), [str(tmp_path / "none"), "--column", "wanted", "--schema", f"{tmp_path}/person.json"]
    assert checks.main(words) == 0
    counts, _ = checks.check(tmp_path / "none", "wanted", json.dumps(PERSON))
    assert counts["valid"] == statuses.count("ok")
    assert counts["error impossible"] == 1
    other_schema = json.dumps({"type": "null"})
    counts, shown = checks.check(tmp_path / "none", "nothing", other_schema)
    assert counts["invalid"] == statuses.count("ok")
    assert other_schema in shown[0]
    (tmp_path / "null.json").write_text(other_schema)
    assert checks.main([str(tmp_path / "none"), "--column", "nothing", "--schema", f"{tmp_path}/null.json"]) == 1
    capsys.readouterr()
    assert plan.main([*arguments(model, data, tmp_path / "plan", "draft=none"), *keys]) == 0
    said = capsys.readouterr().out
    assert "structured   2 distinct constraints; compiling one took " in said
    assert " tables of structured output = " in said or " tables of structured output + " in said


@pytest.mark.second
def test_a_row_s_own_response_format_is_what_its_answer_is_checked_by(model: Path, tmp_path: Path) -> None:
    """With other answers the same rows are invalid, so that each of them is checked."""
    forms = [
        {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}},
        {"type": "json_object"},
        {"type": "choice", "choice": ["yes", "no"]},
        {"type": "text"},
        {"type": "regex", "regex": "[ab]{3}"},
        None,
        {"type": "json_schema"},
    ]
    rows = [{"prompt": f"row {i}", "response_format": form and json.dumps(form)} for i, form in enumerate(forms)]
    pl.DataFrame(rows).write_parquet(tmp_path / "in.parquet")
    keys = ['decode.schema={"type":"null"}', "decode.temperature=1", "decode.max_new_tokens=200", "input.max_error_fraction=1"]
    assert run.main([*arguments(model, tmp_path / "in.parquet", tmp_path / "out", "draft=none"), *keys]) == 0
    checks, usual = load("check_schemas"), '{"type": "null"}'
    frame = pl.read_parquet(tmp_path / "out" / "data").sort("row_index")
    done = frame.filter(pl.col("row_index") != 3, status="ok").height
    assert done >= 4
    counts, shown = checks.check(tmp_path / "out", "schema", usual)
    assert (counts["valid"], counts["not checked: a regex of its own"], counts["invalid"], shown) == (done - 1, 1, 0, [])
    assert counts["error bad_parameter"] == 1, "what is wrong with it is its response_format"
    assert counts["free"] + counts["truncated"] >= 1
    (tmp_path / "other" / "data").mkdir(parents=True)
    others = pl.Series(["1", "[]", "maybe", "", "", "false"])
    frame.head(6).with_columns(completion=others, status=pl.lit("ok")).write_parquet(tmp_path / "other" / "data" / "part.parquet")
    counts, shown = checks.check(tmp_path / "other", "schema", usual)
    assert (counts["valid"], counts["free"], counts["not checked: a regex of its own"], counts["invalid"]) == (0, 1, 1, 4)
    assert [line.rpartition(" by ")[2] for line in shown] == [
        '{"type": "boolean"}', '{"type": "object"}', "['yes', 'no']", '{"type": "null"}'
    ]


@pytest.mark.second
def test_a_stop_string_ends_an_answer_with_finish_reason_stop_and_a_minimum_holds(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"row {i}", "stop": ["b"] if i % 2 else None} for i in range(8)]
    pl.DataFrame(rows).write_parquet(tmp_path / "in.parquet")
    keys = ["decode.regex=a{2}[ab]{0,30}", "decode.temperature=1", "decode.max_new_tokens=40", "decode.min_new_tokens=5"]
    assert run.main([*arguments(model, tmp_path / "in.parquet", tmp_path / "out", "draft=lookup"), *keys]) == 0
    found = pl.read_parquet(tmp_path / "out" / "data").sort("row_index")
    stopped, tokenizer = 0, Tokenizer(model)
    for row in found.iter_rows(named=True):
        assert row["status"] == "ok"
        assert re.fullmatch("a{2}[ab]{0,30}", row["completion"])
        assert len(row["token_ids"]) > 5
        if row["stop_reason"] == "b":
            early = tokenizer.decode(row["token_ids"][:5])  # the minimum, in which a stop string ends nothing
            assert row["completion"].startswith(early)
            assert "b" not in row["completion"].removeprefix(early)
            stopped += 1
    assert stopped >= 2


@pytest.mark.second
def test_a_warm_engine_takes_constraints_of_each_call_and_compiles_them_once(model: Path, tmp_path: Path) -> None:
    own = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
    rows = [
        {"id": f"q{i}", "prompt": f"row {i}", "schema": cell}
        for i, cell in enumerate([None, json.dumps(own), json.dumps(NUMBER), '{"enum": []}', json.dumps(own)])
    ]
    keys = ["decode.temperature=1", "decode.max_new_tokens=24", "decode.ignore_eos=false"]
    with batchspec.Engine(
        [f"model.path={model}", "model.dtype=float64", "model.max_len=64", "input.columns.schema=schema", *keys]
    ) as engine:
        found = engine.generate(rows)
        assert found["status"].to_list()[3] == "error"
        assert found["error"].to_list()[3]["code"] == "impossible"
        for index, schema in ((1, own), (2, NUMBER), (4, own)):
            assert found["status"][index] == "ok"
            jsonschema.validate(json.loads(found["completion"][index]), schema)
        assert engine.generate(rows)["completion"].to_list() == found["completion"].to_list()
        streamed = {done.row_index: done.text for done in engine.stream(rows)}
        assert [streamed[index] for index in (0, 1, 2, 4)] == [found["completion"][index] for index in (0, 1, 2, 4)]
        assert engine._opened.admission.constraints is not None
        assert engine._opened.admission.constraints.compiler.stats.num_compiled == 2
        free = engine.generate(rows[:1])
        assert free["completion"].to_list() == found["completion"].to_list()[:1]
    pl.DataFrame(rows).write_parquet(tmp_path / "rows.parquet")
    out = tmp_path / "out"
    assert run.main([*arguments(model, tmp_path / "rows.parquet", out, "draft=none"), "input.columns.schema=schema", *keys]) == 0
    assert pl.read_parquet(out / "data").sort("row_index")["completion"].to_list() == found["completion"].to_list()


@pytest.mark.second
def test_the_turns_of_a_conversation_follow_the_row_s_schema_or_their_own(model: Path) -> None:
    def next_turn(turn: Turn) -> Any:
        if turn.number == 2:
            return None
        own = {"regex": "[a-f]{3}", "schema": None} if turn.number else {}
        return own | {"messages": [*turn.messages, {"role": "user", "content": "more"}]}

    options = {
        "model.path": str(model), "model.dtype": "float64", "model.max_len": 200, "decode.max_new_tokens": 12,
        "input.columns": {"schema": "schema", "regex": "regex"},
    }
    rows = [
        {"messages": [{"role": "user", "content": f"row {i}"}], "schema": json.dumps(NUMBER), "regex": None} for i in range(3)
    ]
    with batchspec.Engine(options) as engine:
        found = engine.converse(pa.Table.from_pylist(rows), next_turn)
    assert found["turn"].to_list() == [0, 1, 2] * 3
    for turn, text in zip(found["turn"].to_list(), found["completion"].to_list(), strict=True):
        assert re.fullmatch("[a-f]{3}" if turn == 2 else "[0-9]", text)


@pytest.mark.second
def test_rows_do_not_wait_for_the_automata_of_other_rows(model: Path) -> None:
    """The compiler is kept from finishing one schema until all other rows are done."""
    rows = [{"prompt": f"row {i}", "schema": json.dumps({"enum": [i % 4]})} for i in range(12)]
    with batchspec.Engine(
        {"model.path": str(model), "model.dtype": "float64", "model.max_len": 64, "decode.max_new_tokens": 8,
         "input.columns": {"schema": "schema"}}
    ) as engine:
        assert engine._opened.admission.constraints is not None
        compiler = engine._opened.admission.constraints.compiler
        begin, held = compiler.begin, Future[Any]()

        def slow(kind: str, source: str) -> Future[Any]:
            return held if json.loads(source) == {"enum": [0]} else begin(kind, source)

        compiler.begin = slow  # type: ignore[method-assign]
        order = []
        for done in engine.stream(rows):
            order.append(done.row_index)
            if len(order) == 9:
                held.set_result(begin("schema", json.dumps({"enum": [0]})).result())
    assert sorted(order[:9]) == [index for index in range(12) if index % 4]
    assert sorted(order[9:]) == [0, 4, 8]


@pytest.mark.parametrize(("kind", "own"), [("regex", "[A-E]"), ("choice", ["A", "B"]), ("grammar", 'root ::= "A"')])
def test_rows_with_a_constraint_of_another_kind_are_no_invalid_ones(tmp_path: Path, kind: str, own: Any) -> None:
    checks = load("check_schemas")
    (tmp_path / "data").mkdir()
    rows = {"request_id": ["a", "b"], "status": "ok", "error": None, "finish_reason": "stop", "stop_reason": None}
    pl.DataFrame({**rows, "completion": ["A", "null"], kind: [own, None]}).write_parquet(tmp_path / "data/part-00000.parquet")
    counts, _ = checks.check(tmp_path, "schema", json.dumps({"type": "null"}))
    assert dict(counts) == {f"not checked: a {kind} of its own": 1, "valid": 1}
