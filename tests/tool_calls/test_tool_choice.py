"""Forced tool calls: what the columns tool_choice and parallel_tool_calls make of a row, whole jobs over OpenAI's requests."""

from __future__ import annotations

import json
import random
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

import batchspec
from batchspec import run
from batchspec.automata.lazy_automaton import LazyAutomaton, Recheck
from batchspec.automata.token_automaton import MARKS
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import table_source
from batchspec.packing.admit import Admission
from batchspec.packing.constraints import Constraints, first_state
from batchspec.records import Completion, Request
from batchspec.structured.compile_process import compiled
from batchspec.structured.dfa import Dfa, dfa_of
from batchspec.structured.expand_process import Work
from batchspec.structured.forced_calls import call_rules
from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.parse import rules_of
from batchspec.text.thinking import find_think_tokens
from batchspec.text.tokenizer import Tokenizer
from batchspec.tool_calls.form import Tools
from batchspec.tool_calls.marks import CALL_MARKS
from batchspec.tool_calls.registry import FORMS
from batchspec.warm.conversations import Turn
from tests.data.test_openai_jobs import answers, options, request, written
from tests.engine.test_admit import job
from tests.helpers.harmony import make_harmony_model
from tests.helpers.models import make_checkpoint, make_thinking_tokenizer
from tests.helpers.runs import run_apart
from tests.helpers.stand_ins import small_spec
from tests.job.test_job import signalled_in_round
from tests.structured.test_structured import matches
from tests.tool_calls.tool_templates import TEMPLATES, chat_template, tool, tools_text
from tests.tool_calls.tool_templates import written as of_template

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x": {"type": "integer"}, "s": {"type": "string"}, "e": {"enum": ["a", "b c", 3]}, "n": {"$ref": "#/$defs/name"},
        "u": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10}, {"type": "null"}]},
        "o": {"type": "object", "properties": {"k": {"type": "array", "items": {"type": "number"}}}},
    },
    "required": ["e", "u"],
    "$defs": {"name": {"type": "string", "pattern": "^[a-z]{2,3}$"}},
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "f", "parameters": SCHEMA}, {"name": "g", "parameters": None},
    {"name": "say", "parameters": {"properties": {"text": {"type": "string", "maxLength": 3}}}},
]


def asked(form: str, functions: list[dict[str, Any]] = FUNCTIONS, several: bool = True) -> str:
    return json.dumps({"form": form, "tools": functions, "several": several})


def drawn(dfa: Dfa, rng: random.Random) -> bytes | None:
    """A text of the automaton, most often a short one; None if it gets long."""
    state, out = dfa.starts[0], bytearray()
    while len(out) < 300:
        allowed = np.flatnonzero(dfa.next[state, dfa.classes]).tolist()
        if dfa.final[state] and (not allowed or rng.random() < 0.3):
            return bytes(out)
        ends = [byte for byte in allowed if byte in b'"}])<\n/' or byte in MARKS]
        ascii = [byte for byte in allowed if byte < 127] if rng.random() < 0.9 else []
        out.append(rng.choice(ends if ends and rng.random() < 0.4 else ascii or allowed))
        state = int(dfa.next[state, dfa.classes[out[-1]]])
    return None


@pytest.mark.parametrize(
    ("form", "marks"),
    [(form, marks) for form in sorted(FORMS) for marks in sorted({(), CALL_MARKS.get(form, ())})],
)
def test_whatever_is_written_is_read_back_as_calls_that_follow_the_schemas(form: str, marks: tuple[str, ...]) -> None:
    node = call_rules(asked(form), marks).inlined()
    assert node is not None
    dfa, rng, num_found = dfa_of(node), random.Random(1), 0
    for _ in range(60):
        data = drawn(dfa, rng)
        for byte, mark in zip(MARKS, marks, strict=False):
            data = data and data.replace(bytes([byte]), mark.encode())
        if data is None:
            continue
        found = FORMS[form].find(data.decode(), Tools(tools_text(*FUNCTIONS)))
        ends, begins = [0, *(call.end for call in found)], [*(call.begin for call in found), len(data.decode())]
        assert not "".join(data.decode()[end:begin] for end, begin in zip(ends, begins, strict=True)).strip()
        for call in found:
            schema = {"f": SCHEMA, "g": {"maxProperties": 0}, "say": FUNCTIONS[2]["parameters"]}[call.name]
            jsonschema.validate(json.loads(call.arguments), schema | {"additionalProperties": False})
        num_found += len(found)
    assert num_found > 20


@pytest.mark.parametrize("form", sorted({*FORMS} - {"pythonic"}))
def test_what_templates_write_is_among_it(form: str) -> None:
    """But for Python's quotes and constants: the arguments are JSON there too."""
    calls = [("f", {"e": "a", "u": "x y"}), ("g", {})]
    node = call_rules(asked(form), ()).inlined()
    assert node is not None
    dfa = dfa_of(node)
    for name in (name for name in TEMPLATES if name.partition(",")[0] == form and name not in NOT_OF_TEXT):
        state = dfa.starts[0]
        for byte in of_template(name, calls).strip().encode():
            state = int(dfa.next[state, dfa.classes[byte]])
        assert dfa.final[state], name


NOT_OF_TEXT = ("mistral, newer", "mistral, with ids")
"""Forms of tokenizers that have the token [ARGS]."""


SET = {"type": "array", "uniqueItems": True}
OVERLAPPING = {"oneOf": [{"type": "string"}, {"maxLength": 2}]}
NESTED_IN_ITSELF = {
    "properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"type": "array", "items": {"$ref": "#/$defs/d"}}},
}
NARROWED = {"properties": {"a": {"$ref": "#/$defs/d", "minLength": 1}}, "$defs": {"d": {"type": "string", "minLength": 2}}}


@pytest.mark.parametrize(
    ("form", "function", "said"),
    [
        ("pythonic", {"name": "g-2", "parameters": None}, "tool 'g-2': this model's form of calls cannot write the name"),
        ("pythonic", {"name": "g", "parameters": {"properties": {"a b": {}}}}, "tool 'g': parameter 'a b' is no name in Python"),
        ("glm", {"name": "g", "parameters": {"anyOf": [{}]}}, "tool 'g': anyOf of all arguments together is not supported"),
        ("glm", {"name": "g", "parameters": {"properties": {"a": {"not": {}}}}}, "tool 'g': not of a string is not supported"),
        ("hermes", {"name": "g", "parameters": {"properties": {"a": {"unevaluatedItems": 0}}}}, "tool 'g': .*unevaluatedItems"),
        ("gemma4", {"name": "g", "parameters": {"properties": {"a b": {}}}}, "tool 'g': property 'a b' is no plain word"),
        ("gemma4", {"name": "g", "parameters": {"properties": {"a": SET}}}, "tool 'g': uniqueItems of a list is not supported"),
        ("gemma4", {"name": "g", "parameters": NESTED_IN_ITSELF}, "tool 'g': schemas nested more than 16 levels deep"),
        ("glm", {"name": "g", "parameters": {"properties": {"a": OVERLAPPING}}}, "tool 'g': oneOf .* the same value"),
        ("seed_oss", {"name": "g", "parameters": NARROWED}, "tool 'g': minLength of two schemas that hold at once"),
    ],
)
def test_what_cannot_be_forced_is_told_with_the_tool_s_name(form: str, function: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSchema, match=said):
        call_rules(asked(form, [function]), ())


ENUM = {"enum": ["a", "bb", 1, 9, True, None]}
DATE = {"properties": {"k": {"const": "date"}, "d": {"type": "string"}}, "required": ["k"], "type": "object"}
TIME = {"properties": {"k": {"const": "time"}, "d": {"type": "integer"}}, "required": ["k"], "type": "object"}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", **ENUM}, [1, 9], ["a", True, None]),
        ({"type": "integer", "minimum": 5, **ENUM}, [9], [1]),
        ({"type": "string", "maxLength": 1, **ENUM}, ["a"], ["bb", 1, None]),
        ({"const": "a", "enum": ["a", "bb"]}, ["a"], ["bb"]),
        ({"type": ["boolean", "null"], **ENUM}, [True, None], ["a", 1]),
        ({"type": "string", "nullable": True}, ["a"], [None]),
        ({"type": "integer", "anyOf": [{"type": "number", "maximum": 3}, {"type": "string"}]}, [3, -3], ["a", 4, 1.5]),
        ({"anyOf": [False, {"type": "integer"}]}, [5], ["a"]),
        ({"oneOf": [{"type": "string", "pattern": "^a"}, {"const": "b"}, {"type": "null"}]}, ["ab", "b", None], ["bb", 1]),
        ({"oneOf": [DATE, TIME]}, [{"k": "date", "d": "5"}, {"k": "time"}], [{"k": "time", "d": "5"}, {"d": "5"}]),
        ({"$ref": "#/$defs/name", "type": "string", "maxLength": 2}, ["ab"], ["abc", "a", "AB"]),
        ({"type": "array", "items": {"$ref": "#/$defs/name"}, "minItems": 1, "maxItems": 2}, [["ab"], ["ab", "cd"]], [[], ["a"]]),
        ({"type": "array", "items": False}, [[]], [["ab"]]),
        ({"type": "object", "properties": {}, "required": []}, [{}, {"a": {"b": 1}}], ["ab", []]),
    ],
)
@pytest.mark.parametrize("form", ["qwen3_coder", "seed_oss", "minimax_m2", "gemma4"])
def test_a_parameter_follows_all_keywords_of_its_schema(form: str, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    """In the forms that divide a schema into alternatives of one type."""
    parameters = {"properties": {"p": schema}, "required": ["p"], "$defs": SCHEMA["$defs"]}
    node = call_rules(asked(form, [{"name": "f", "parameters": parameters}], several=False), ()).inlined()
    assert node is not None
    dfa, checker = dfa_of(node), jsonschema.Draft202012Validator(parameters)
    for value, is_right in [(one, True) for one in right] + [(one, False) for one in wrong]:
        assert checker.is_valid({"p": value}) == is_right
        assert matches(dfa, of_template(form, [("f", {"p": value})]).strip().encode()) == is_right, value


def test_a_call_of_gemma4_nests_values_of_any_type_in_its_own_notation() -> None:
    """Its strings are between marks, so that they need no escapes, and its keys are plain words."""
    numbers = {"type": "object", "additionalProperties": {"type": "integer"}}
    parameters = {"properties": {"x": {}, "m": numbers}, "required": ["x"]}
    node = call_rules(asked("gemma4", [{"name": "f", "parameters": parameters}], several=False), ()).inlined()
    assert node is not None
    dfa = dfa_of(node)
    right: list[Any] = ['a "b"\\ {}\n', {"k": [1.5, None, {"l": "é"}]}, [], {}, True, -1]
    wrong: list[Any] = ['<|"|>', {"no word": 1}]
    for value in right:
        assert matches(dfa, of_template("gemma4", [("f", {"x": value, "m": {"a": 1, "b": 2}})]).encode()), value
    for value in wrong:
        assert not matches(dfa, of_template("gemma4", [("f", {"x": value})]).encode()), value
    assert not matches(dfa, of_template("gemma4", [("f", {"x": 1, "m": {"a": "1"}})]).encode())


# --- rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calls") / "model"
    make_checkpoint(folder, "llama", dtype=torch.float64, max_position_embeddings=2048)
    return make_thinking_tokenizer(folder, chat_template=TEMPLATES["hermes"], more=CALL_MARKS["hermes"])


FUNCTION = tool("f", x={"enum": [1, 22]}, b="boolean")
TWO = [FUNCTION, tool("g")]
FORCE_G = {"type": "function", "function": {"name": "g"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def admitted(folder: Path, *, vocab: int = 320, **cells: Any) -> Request | Completion:
    row = {"messages": json.dumps([{"role": "user", "content": "Hi"}]), "tools": tools_text(*TWO)} | cells
    source = table_source(pa.table({name: [value] for name, value in row.items()}))
    columns, spec = map_columns(source.schema, {}), small_spec(vocab_size=vocab)
    config = job(model__max_len=500)
    admission = Admission(config, source=source, columns=columns, spec=spec, tokenizer=Tokenizer(folder))
    (made,) = admission.admit(next(source.shards(1)))
    return made


@pytest.mark.parametrize(
    ("choice", "readable", "forced", "several", "one_call"),
    [
        (None, "fg", None, None, False),
        ("auto", "fg", None, None, False),
        ("none", "", None, None, False),
        ("required", "fg", "fg", True, False),
        (json.dumps(FORCE_G), "fg", "g", False, True),
        (json.dumps(allowed("auto", "g")), "g", None, None, False),
        (json.dumps(allowed("required", "g")), "g", "g", True, False),
    ],
)
def test_a_choice_says_which_tools_are_offered_read_and_forced(
    model: Path, choice: str | None, readable: str, forced: str | None, several: bool | None, one_call: bool
) -> None:
    made = admitted(model, tool_choice=choice)
    assert isinstance(made, Request)
    assert "".join(one["function"]["name"] for one in json.loads(made.tools or "[]")) == readable
    prompt = Tokenizer(model).decode(made.prompt_ids.tolist())
    assert ('"f"' in prompt, '"g"' in prompt) == (readable != "g", True), "tool_choice=none leaves them in the prompt"
    assert made.one_call == one_call
    if forced is None:
        assert made.constraint is None
    else:
        assert made.constraint is not None
        read = json.loads(made.constraint[1])
        assert ("".join(one["name"] for one in read["tools"]), read["several"]) == (forced, several)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice=required needs tools, and the row has none; add them, or"),
        ({"tool_choice": "maybe"}, 'tool_choice="maybe" must be auto, none, required,'),
        ({"tool_choice": '{"type": "function"}'}, "must be auto, none, required"),
        ({"tool_choice": json.dumps(allowed("often", "g"))}, "must be auto, none, required"),
        ({"tool_choice": json.dumps(allowed("auto", "h"))}, "tool_choice names 'h', and the row's tools are: f, g; correct it"),
        (
            {"tool_choice": "required", "response_format": '{"type": "json_object"}'},
            "response_format and a tool_choice that forces a call are both given; leave one null",
        ),
    ],
)
def test_a_choice_that_cannot_be_followed_costs_its_row(model: Path, cells: dict[str, Any], said: str) -> None:
    made = admitted(model, **cells)
    assert isinstance(made, Completion)
    assert made.error is not None
    assert (made.error.code, said in made.error.message) == ("bad_parameter", True), made.error.message


@pytest.mark.parametrize("choice", ["required", json.dumps(FORCE_G), json.dumps(allowed("required", "g"))])
def test_a_forced_call_by_a_template_without_tools_names_the_template_as_the_way_out(tmp_path: Path, choice: str) -> None:
    made = admitted(make_thinking_tokenizer(tmp_path), tool_choice=choice)
    assert isinstance(made, Completion)
    assert made.error is not None
    assert made.error.message == (
        "table row 0 (id 'table:0'): a forced tool_choice needs a known form of tool calls, and this model's is unknown; set "
        "model.chat_template to one that writes tools (and model.tool_calls if it writes no calls), or leave tool_choice null "
        "(of OpenAI's requests: input.drop=[tool_choice])"
    )


FORCED_LINES = [
    request("must", tools=TWO, tool_choice="required", max_tokens=200),
    request("one", tools=TWO, tool_choice="required", parallel_tool_calls=False, max_tokens=200),
    request("named", tools=TWO, tool_choice=FORCE_G, max_tokens=200, n=2, temperature=1.0),
    request("none", tools=TWO, tool_choice="none"),
    request("auto", tools=TWO, tool_choice="auto"),
    request("no tool", tool_choice="required"),
    request("short", tools=TWO, tool_choice="required", max_tokens=4),
    request("stopped", tools=TWO, tool_choice=FORCE_G, max_tokens=200, stop=["arguments"]),
]


@pytest.mark.second
@pytest.mark.parametrize("more", [["draft=lookup", "decode.min_new_tokens=9"], ["draft=none"]])
def test_a_job_over_requests_with_forced_calls(model: Path, tmp_path: Path, more: list[str]) -> None:
    written(tmp_path / "in.jsonl", FORCED_LINES)
    words = [*options(model, tmp_path, "output=openai", "output.token_ids=true", "decode.thinking_token_budget=5", *more)]
    assert run.main(words) == 0
    found = answers(tmp_path / "out/answers.jsonl")
    assert "tool_choice=required needs tools" in found.pop("no tool")["error"]["message"]
    mark = Tokenizer(model).added_ids["<tool_call>"]
    rows = {row["request_id"]: row for row in pl.read_parquet(tmp_path / "out/data").to_dicts()}
    for name, line in found.items():
        for choice in line["response"]["body"]["choices"]:
            calls = choice["message"].get("tool_calls")
            if name in ("none", "auto", "short", "stopped"):
                assert calls is None
                continue
            if name == "must" and choice["finish_reason"] == "length":  # this model may write call after call
                assert len(calls) > 1
            else:
                assert (choice["finish_reason"], choice["message"]["content"], len(calls)) == ("tool_calls", None, 1)
            for call in calls:
                assert call["function"]["name"] in (("g",) if name == "named" else ("f", "g"))
                schema = next(one for one in TWO if one["function"]["name"] == call["function"]["name"])["function"]["parameters"]
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema | {"additionalProperties": False})
            assert rows[name]["token_ids"].count(mark) >= 1, "the mark is its token"
    assert found["stopped"]["response"]["body"]["choices"][0]["message"]["content"].endswith('"')
    before = (tmp_path / "out/answers.jsonl").read_text()
    (tmp_path / "out/answers.jsonl").unlink()
    assert run.main(words) == 0
    assert (tmp_path / "out/answers.jsonl").read_text() == before


# --- together with what else a row may have


@pytest.mark.second
def test_rows_that_stop_in_the_middle_of_a_forced_call_resume_there(model: Path, tmp_path: Path) -> None:
    """Two signals, each in the middle of the calls; one shard holds all rows. They have one automaton, so they begin together."""
    lines = [request(f"q{i}", tools=TWO, tool_choice="required", max_tokens=60 + 30 * i, seed=i) for i in range(4)]
    folders = tmp_path / "whole", tmp_path / "stopped"
    for folder in folders:
        folder.mkdir()
        written(folder / "in.jsonl", lines)
    whole, stopped = (
        options(model, folder, "output=openai", "output.token_ids=true", "decode.thinking_token_budget=2", "draft=lookup")
        for folder in folders
    )
    assert run.main(whole) == 0
    for rounds in (9, 15):
        code, said = run_apart(stopped, tmp_path / "log", partial(signalled_in_round, rounds, signal.SIGTERM))
        assert code == 75, said
        assert re.search(r"[1-4] of them unfinished, with [1-9]\d* tokens", said)
    assert run.main(stopped) == 0
    mine, theirs = (pl.read_parquet(folder / "out/data").sort("request_id") for folder in folders)
    assert mine["token_ids"].to_list() == theirs["token_ids"].to_list()
    assert mine["tool_calls"].to_list() == theirs["tool_calls"].to_list()
    assert mine["tool_calls"].null_count() == 0
    assert max(theirs["spec_decode"].struct.field("num_prefills").to_list()) > 1, "rows went on from their tokens"


def engine_of(model: Path, **more: Any) -> batchspec.Engine:
    return batchspec.Engine({
        "model.path": str(model), "model.dtype": "float64", "model.max_len": 900, "decode.max_new_tokens": 150,
        "decode.thinking_token_budget": 2, "packing.max_num_seqs": 3, **more,
    })


def chat_with_tools(name: str, **cells: Any) -> dict[str, Any]:
    return {"id": name, "messages": [{"role": "user", "content": "Hi"}], "tools": tools_text(*TWO), **cells}


def names_of(cell: str | None) -> list[str]:
    return [call["function"]["name"] for call in json.loads(cell or "[]")]


@pytest.mark.second
def test_a_choice_of_texts_goes_with_chats_and_tools_but_not_with_a_forced_call(model: Path) -> None:
    call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    rows = [
        chat_with_tools("text", choice=["yes", "no"], tool_choice=None),
        chat_with_tools("no call", choice=[call], tool_choice="none"),
        chat_with_tools("call", choice=[call], tool_choice="auto"),
        chat_with_tools("both", choice=["yes"], tool_choice="required"),
        chat_with_tools("forced", choice=None, tool_choice=json.dumps(FORCE_G)),
    ]
    with engine_of(model, **{"input.columns": {"choice": "choice"}}) as engine:
        found = {row["request_id"]: row for row in engine.generate(rows).to_dicts()}
    assert found["text"]["completion"] in ("yes", "no")
    assert (found["no call"]["completion"], found["no call"]["tool_calls"]) == (call, None)
    assert (found["call"]["completion"], names_of(found["call"]["tool_calls"])) == ("", ["g"])
    assert (found["forced"]["completion"], names_of(found["forced"]["tool_calls"])) == ("", ["g"])
    assert "choice and a tool_choice that forces a call are both given; leave one null" in found["both"]["error"]["message"]


@pytest.mark.second
def test_a_turn_of_a_conversation_may_force_one_call_though_the_job_has_a_choice(model: Path) -> None:
    """The other turns follow the job's choice, and the last one sees the call's result."""
    forced = {"tool_choice": "required", "parallel_tool_calls": False}

    def next_turn(turn: Turn) -> Any:
        calls = turn.messages[-1].get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls]
        answers = results or [{"role": "user", "content": "Go on"}]
        return {"messages": [*turn.messages, *answers], **(forced if turn.number == 0 else {})} if turn.number < 2 else None

    with engine_of(model, **{"decode.choice": ["yes", "no"]}) as engine:
        turns = engine.converse([chat_with_tools("a")], next_turn).sort("turn").to_dicts()
    assert [(turn["status"], len(names_of(turn["tool_calls"]))) for turn in turns] == [("ok", 0), ("ok", 1), ("ok", 0)]
    assert turns[0]["completion"] in ("yes", "no")
    assert turns[2]["completion"] in ("yes", "no")
    roles = [message["role"] for message in turns[2]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]


@pytest.mark.second
def test_a_turn_after_calls_that_the_template_does_not_write_is_an_error_row_that_says_what_to_do(tmp_path: Path) -> None:
    """Templates of SmolLM3 and Granite 3 write tools and no calls, and the model would see results of nothing."""
    folder = make_checkpoint(tmp_path / "model", "llama", dtype=torch.float64, max_position_embeddings=2048)
    make_thinking_tokenizer(folder, chat_template=chat_template("", says="<tool_call>"), more=CALL_MARKS["hermes"])

    def next_turn(turn: Turn) -> Any:
        calls = turn.messages[-1]["tool_calls"]
        return [*turn.messages, *({"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls)]

    with engine_of(folder) as engine:
        row = chat_with_tools("a", tool_choice=json.dumps(FORCE_G))
        first, second = engine.converse([row], next_turn).sort("turn").to_dicts()
    assert (first["status"], names_of(first["tool_calls"])) == ("ok", ["g"])
    assert second["error"]["code"] == "template_error"
    assert second["error"]["message"] == (
        "table row 0 (id 'a'): the chat template refuses the prompt (it leaves out the tool calls of message 1 (role assistant); "
        "take them out of the row, or set model.chat_template to a template that writes them); correct it"
    )


@pytest.mark.second
@pytest.mark.parametrize("form", ["gemma4", "glm4", "phi4", "granite", "nemotron_json", "seed_oss"])
def test_forms_of_other_families_are_forced_with_their_marks_as_tokens(form: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", dtype=torch.float64, max_position_embeddings=2048)
    make_thinking_tokenizer(folder, chat_template=TEMPLATES[form], more=CALL_MARKS.get(form, ()))
    say = tool("say", s={"type": "string", "enum": ["a b", 'c"d']}, x="integer")
    say["function"]["parameters"]["required"] = ["s"]
    rows = [
        chat_with_tools("say", tools=tools_text(say), tool_choice="required", parallel_tool_calls=False),
        chat_with_tools("named", tool_choice=json.dumps(FORCE_G)),
    ]
    with engine_of(folder, **{"output.token_ids": True}) as engine:
        found = engine.generate(rows).to_dicts()
    assert [(row["status"], row["completion"], names_of(row["tool_calls"])) for row in found] == [
        ("ok", "", ["say"]), ("ok", "", ["g"]),
    ]
    arguments = json.loads(json.loads(found[0]["tool_calls"])[0]["function"]["arguments"])
    jsonschema.validate(arguments, say["function"]["parameters"])
    added = Tokenizer(folder).added_ids
    assert {added[mark] for mark in CALL_MARKS.get(form, ())} <= {*found[0]["token_ids"]}


# --- harmony


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_harmony_model(tmp_path_factory.mktemp("harmony") / "model", likely=4.0)


ADD = tool("add", x={"enum": [7, 77]})
CALL = '{"x": 7}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>Hm<|end|>"


@pytest.mark.parametrize(
    ("text", "can_be"),
    [
        (f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{CALL}", True),
        (f"<|channel|>commentary to=functions.add<|constrain|>json<|message|>{CALL}", True),
        (f"<|channel|>commentary to=functions.add json<|message|>{CALL}", True),
        (f"<|channel|>commentary to=functions.add<|message|>{CALL}", True),
        (f"{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.add<|message|>{CALL}", True),
        ("<|channel|>commentary to=functions.add<|message|>{}<|return|>", True),
        ("<|channel|>commentary to=functions.add<|message|>{}<|end|>", False),
        (f"<|channel|>commentary to=functions.ad<|message|>{CALL}", False),
        ('<|channel|>commentary to=functions.add<|message|>{"x": 8}<|call|>', False),
        (f"<|channel|>commentary<|message|>{CALL}", False),
        ("<|channel|>final<|message|>7<|return|>", False),
        (f"<|message|>{CALL}", False),
        ("<|channel|>analysis to=functions.add<|message|>{}<|call|>", False),
    ],
)
@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_forced_call_of_harmony_is_a_message_with_a_recipient(harmony: Path, text: str, can_be: bool, is_lazy: bool) -> None:
    tokenizer = Tokenizer(harmony)
    made = admitted(harmony, vocab=352, tool_choice="required", tools=tools_text(ADD))
    assert isinstance(made, Request)
    assert made.constraint is not None
    think = find_think_tokens("auto", tokenizer, 352)
    assert think is not None
    compiler = Constraints(job().decode, tokenizer, vocab_size=352, think=think, end_ids=set(think.stop_ids)).compiler
    tokens = tokenizer.encode_part(text)
    if is_lazy:
        work = Work(**compiler.job)
        found = LazyAutomaton(*made.constraint)
        state = first_state(found, made.thinking, compiler.vocabulary)
        count = work.recheck(Recheck(found, state, tuple(tokens)))
    else:
        rules = rules_of(*made.constraint)
        whole = compiled(rules, **compiler.job)
        count = whole.num_allowed(first_state(whole, made.thinking, compiler.vocabulary), tokens)
    assert (count == len(tokens)) == can_be


def test_no_call_in_harmony_leaves_the_row_its_own_constraint(harmony: Path) -> None:
    own = '{"type": "json_object"}'
    for form, kind in ((None, "regex"), (own, "schema")):
        made = admitted(harmony, vocab=352, tool_choice="none", tools=tools_text(ADD), response_format=form)
        assert isinstance(made, Request)
        assert made.constraint is not None
        assert made.constraint[0] == kind


@pytest.mark.second
@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_a_job_of_harmony_with_forced_calls_and_with_none(harmony: Path, tmp_path: Path, drafter: str) -> None:
    lines = [request(f"q{i}", tools=[ADD], tool_choice="required", max_tokens=150, seed=i, temperature=1.0) for i in range(6)]
    lines += [request(f"n{i}", tools=[ADD], tool_choice="none", max_tokens=60, seed=i, temperature=1.0) for i in range(6)]
    written(tmp_path / "in.jsonl", lines)
    keys = ["output=openai", "decode.thinking_token_budget=4", f"draft={drafter}", "model.max_len=500", "model.dtype=float32"]
    words = [word for word in options(harmony, tmp_path) if word.partition("=")[0] not in ("model.max_len", "model.dtype")]
    assert run.main([*words, *keys]) == 0
    num_calls = 0
    for name, line in answers(tmp_path / "out/answers.jsonl").items():
        (choice,) = line["response"]["body"]["choices"]
        calls = choice["message"].get("tool_calls")
        if name.startswith("n"):
            assert calls is None
        elif choice["finish_reason"] != "length":
            assert (choice["finish_reason"], choice["message"]["content"], len(calls)) == ("tool_calls", None, 1)
            jsonschema.validate(json.loads(calls[0]["function"]["arguments"]), ADD["function"]["parameters"])
            num_calls += 1
    assert num_calls >= 5
