"""`batchspec export`: output as JSON lines, OpenAI's requests as input, whole files or none."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.commands.export import main
from batchspec.config.schema import InputConfig, OutputConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.openai_keys import TURN_KEYS
from batchspec.data.dataset.openai_requests import filled, parse_request, request_row, request_schema
from batchspec.data.dataset.openai_values import BadRequest
from batchspec.data.dataset.reader import table_source
from batchspec.data.dataset.writer import build_table
from batchspec.errors import ConfigError, InputError, OutputError
from batchspec.packing.constraints import row_constraint
from tests.helpers.io_samples import built, completion, dataset, failed, new_folder, shards_of
from tests.tool_calls.tool_templates import tool


def job(path: Path, *, shards: int = 2, **output: Any) -> Path:
    """Four rows: two good ones, one of them with two samples, one that was cut, one error."""
    parts, columns = shards_of(dataset(4), 2)
    folder = new_folder(path, 4, 2, config={"model": {"path": "tiny"}, "output": {"messages": "full", **output}})
    rows = [
        completion(0, text="naïve\n\u2028"),
        failed(1),
        completion(2, status="truncated", finish_reason="length"),
        completion(3),
        completion(3, 1, text="second"),
    ]
    for part in parts[:shards]:
        mine = [row for row in rows if row.row_index in folder.rows_of(part.index)]
        folder.commit(part.index, built(part, columns, mine, **output))
    return path


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("kept", ["full", "prompt"])
def test_chat_and_prompt_completion_hold_good_rows_and_report_how_many_were_left_out(
    tmp_path: Path, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = job(tmp_path / "out", messages=kept), tmp_path / "chat.jsonl"
    assert main([str(out), "--to", "chat", str(file)]) == 0
    assert lines(file) == [
        {"request_id": f"q-{row}", "sample_index": sample, "messages": [turn("user", f"say {row}"), turn("assistant", text)]}
        for row, sample, text in ((0, 0, "naïve\n\u2028"), (3, 0, "answer 3.0"), (3, 1, "second"))
    ]
    assert capsys.readouterr().out == f"{file}: 3 lines; rows left out: 1 error, 1 truncated\n"
    assert main([str(out), str(file), "--to", "prompt_completion", "--status", "truncated,error", "--overwrite"]) == 0
    one = {"prompt": [turn("user", "say 2")], "completion": [turn("assistant", "answer 2.0")]}
    assert lines(file) == [{"request_id": "q-2", "sample_index": 0, **one}]
    assert capsys.readouterr().out == f"{file}: 1 line; rows left out: 1 error, 3 ok\n"


def test_answers_to_prompts_of_token_ids_are_left_out_for_they_have_no_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({"id": ["a", "b"], "prompt_ids": [[5], [3, 4]]})
    (shard, *_), _ = shards_of(table, 2)
    columns = map_columns(table.schema, {"prompt_ids": "prompt_ids"})
    folder = new_folder(tmp_path / "out", 2, 2, config={"output": {"messages": "full"}})
    folder.commit(0, built(shard, columns, [completion(0), completion(1)], messages="full"))
    with pytest.raises(OutputError, match=r"\(2 without messages\); a row has messages if its prompt was a chat or text$"):
        main([str(tmp_path / "out"), "--to", "chat", str(tmp_path / "chat.jsonl")])
    assert not (tmp_path / "chat.jsonl").exists()


@pytest.mark.parametrize("kept", ["full", "prompt"])
@pytest.mark.parametrize("of_job", [True, False])
def test_an_answer_that_continues_a_turn_is_one_turn_with_it(tmp_path: Path, kept: str, of_job: bool) -> None:
    """Whether the job says so or the row, and whether the output holds the answer in `messages` or not."""
    chat = [turn("user", "say 0"), turn("assistant", "Well,")]
    table = pa.table({"id": ["q-0"], "messages": [chat], "final_assistant": [None if of_job else "continue"]})
    source, asked = table_source(table), InputConfig(final_assistant="continue" if of_job else "error")
    columns, (shard,) = map_columns(source.schema, {}), source.shards(1)
    config = {"input": {"final_assistant": asked.final_assistant}, "output": {"messages": kept}}
    folder = new_folder(tmp_path / "out", 1, 1, config=config)
    kept_as = OutputConfig(messages=kept)
    folder.commit(0, build_table(shard, [completion(0, text=" zero")], columns=columns, input=asked, output=kept_as, attempt="a"))
    assert main([str(tmp_path / "out"), "--to", "prompt_completion", str(tmp_path / "x.jsonl")]) == 0
    (one,) = lines(tmp_path / "x.jsonl")
    assert (one["prompt"], one["completion"]) == (chat[:1], [turn("assistant", "Well, zero")])


@pytest.mark.parametrize("kept", ["full", "prompt"])
def test_parquet_for_trainers_holds_one_format_of_good_rows_alone(
    tmp_path: Path, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL looks at one of the columns it knows, whichever comes first in a set: all of them must be lists of turns."""
    out = job(tmp_path / "out", messages=kept)
    for form, columns in (("chat", ["messages"]), ("prompt_completion", ["prompt", "completion"])):
        file, same = tmp_path / f"{form}.parquet", tmp_path / f"{form}.jsonl"
        assert main([str(out), "--to", form, str(file)]) == 0
        assert capsys.readouterr().out == f"{file}: 3 rows; rows left out: 1 error, 1 truncated\n"
        assert main([str(out), "--to", form, str(same)]) == 0
        capsys.readouterr()
        rows = pl.read_parquet(file)
        assert rows.columns == ["request_id", "sample_index", *columns]
        assert all(rows[name].dtype == pl.List(pl.Struct({"role": pl.String, "content": pl.String})) for name in columns)
        assert rows.to_dicts() == lines(same)


@pytest.mark.parametrize(
    ("words", "name", "wanted"),
    [
        (["--to", "chat"], "x.csv", ".jsonl or .parquet"), (["--to", "prompt_completion"], "x.json", ".jsonl or .parquet"),
        (["--to", "openai"], "x.parquet", ".jsonl"), (["--to", "chat"], "x.jsonl.gz", ".jsonl or .parquet"),
        (["--from-openai"], "x.jsonl", ".parquet"), (["--to", "chat"], "x", ".jsonl or .parquet"),
    ],
)
def test_a_file_name_of_another_format_is_refused(tmp_path: Path, words: list[str], name: str, wanted: str) -> None:
    out = job(tmp_path / "out")
    given = [*words, str(written(tmp_path / "in.jsonl", [request()]))] if words == ["--from-openai"] else [str(out), *words]
    with pytest.raises(OutputError, match=f"is written as {wanted}; give a file name with such a suffix"):
        main([*given, str(tmp_path / name)])
    assert not (tmp_path / name).exists()


def test_openai_has_a_line_a_request_with_a_choice_for_each_sample(tmp_path: Path) -> None:
    out, file = job(tmp_path / "out", messages="none"), tmp_path / "responses.jsonl"
    assert main([str(out), "--to", "openai", str(file)]) == 0
    first, bad, cut, two = lines(file)
    assert [line["custom_id"] for line in (first, bad, cut, two)] == ["q-0", "q-1", "q-2", "q-3"]
    assert bad["response"] is None
    assert bad["error"] == {"code": "overlong", "message": "too long"}
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    body = two["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "answer 3.0"), (1, "second")]
    assert {name: body["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")} == {
        "prompt": 5, "completion": 6, "total": 11
    }
    assert cut["response"]["body"]["choices"][0]["finish_reason"] == "length"


def test_an_unfinished_job_is_written_as_far_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = job(tmp_path / "out", shards=1), tmp_path / "part.jsonl"
    assert main([str(out), "--to", "openai", str(file)]) == 0
    assert len(lines(file)) == 2
    assert "1 of 2 shards are committed; the others are not in the file" in capsys.readouterr().err


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    out, file = job(tmp_path / "out", messages="none"), tmp_path / "file.jsonl"
    with pytest.raises(OutputError, match=r"run the job with output.messages=full"):
        main([str(out), "--to", "chat", str(file)])
    with pytest.raises(OutputError, match="data/ may only hold shards"):
        main([str(out), "--to", "openai", str(out / "data/file.jsonl")])
    with pytest.raises(ConfigError, match="good is not a status"):
        main([str(out), "--to", "openai", str(file), "--status", "good"])
    assert not file.exists()


def test_a_file_that_exists_or_cannot_be_created_is_refused_by_name(tmp_path: Path) -> None:
    out, file = job(tmp_path / "out"), tmp_path / "mine.jsonl"
    file.write_text("mine")
    requests = written(tmp_path / "in.jsonl", [request()])
    for words in ([str(out), "--to", "chat"], ["--from-openai", str(requests)]):
        with pytest.raises(OutputError, match=r"mine.jsonl exists; give another name, or --overwrite"):
            main([*words, str(file)])
        with pytest.raises(OutputError, match=r"nowhere, which is not a folder"):
            main([*words, str(tmp_path / "nowhere/x")])
        with pytest.raises(OutputError, match=r"out is a folder"):
            main([*words, str(out)])
        with pytest.raises(OutputError, match=r"export writes a local file"):
            main([*words, "s3://bucket/x"])
    assert file.read_text() == "mine"


def test_a_file_has_its_name_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, file = job(tmp_path / "out"), tmp_path / "file.jsonl"
    file.write_text("old\n")

    def broken(*rest: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("batchspec.commands.export.training_line", broken)
    with pytest.raises(KeyboardInterrupt):
        main([str(out), "--to", "chat", str(file), "--overwrite"])
    assert file.read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.jsonl", "out"]


def request(**body: Any) -> dict[str, Any]:
    return {
        "custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions",
        "body": {"model": "gpt", "messages": [turn("user", "hi")], **body},
    }


def written(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in requests) + "\n\n")
    return path


def test_openai_s_requests_become_an_input_that_batchspec_maps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    requests = [
        request(max_tokens=7, min_tokens=2, temperature=1, top_p=0.5, seed=3, n=2, stop="END", stream=False, frequency_penalty=0),
        request(max_completion_tokens=9, stop=["x", "y"], tools=[tool], top_p=None, user="u") | {"custom_id": "r-2"},
        request(messages=[turn("system", "be brief"), {"role": "user", "content": parts}]) | {"custom_id": "r-3"},
    ]
    file = tmp_path / "input.parquet"
    assert main(["--from-openai", str(written(tmp_path / "in.jsonl", requests)), str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: 3 rows with id, messages, max_new_tokens, min_new_tokens,")
    mapped = map_columns(pq.read_schema(file), {})
    assert set(mapped.names) == {
        "id", "messages", "max_new_tokens", "min_new_tokens", "temperature", "top_p", "seed", "n", "frequency_penalty", "stop",
        "tools",
    }
    rows = [{**row, "messages": json.loads(row["messages"])} for row in pl.read_parquet(file).to_dicts()]
    assert rows[0] == {
        "id": "r-1", "messages": [turn("user", "hi")], "max_new_tokens": 7, "min_new_tokens": 2, "temperature": 1.0,
        "top_p": 0.5, "seed": 3, "n": 2, "frequency_penalty": 0.0, "stop": ["END"], "tools": None,
    }
    assert (rows[1]["max_new_tokens"], rows[1]["stop"], json.loads(rows[1]["tools"])) == (9, ["x", "y"], [tool])
    assert rows[2]["messages"] == [turn("system", "be brief"), {"role": "user", "content": parts}], "the template may read parts"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"line 2: not a batch request \(BadJson"),
        ("[]", "line 2: not a batch request"),
        ('{"custom_id": "a", "body": {}}', r"not a batch request \(KeyError: 'messages'\)"),
        ('{"custom_id": "\\ud800", "body": {"messages": []}}', r"not a batch request \(BadText"),
        (json.dumps(request() | {"url": "/v1/embeddings"}), r"url '/v1/embeddings' is not supported, .* a job with task=embed"),
        (
            json.dumps(request(response_format={"type": "structural_tag"})),
            r"response_format.type=\"structural_tag\" is not text, json_object",
        ),
        (json.dumps(request(tool_choice=5)), "body.tool_choice=5 is neither text nor an object; correct the line"),
        (json.dumps(request(parallel_tool_calls="no")), r"body.parallel_tool_calls=\"no\" is neither true nor false"),
        (json.dumps(request(logprobs=2)), "body.logprobs=2 is neither true nor false; correct the line"),
        (json.dumps(request(ignore_eos=True)), "body.ignore_eos=true has no column"),
        (json.dumps(request(presence_penalty="much")), r"body.presence_penalty=\"much\" is not a number"),
        (json.dumps(request(logit_bias={"x": 1})), r"body.logit_bias names 'x', which is not a token id"),
        (json.dumps(request(logit_bias={"5": 101})), r"body.logit_bias adds 101 to token 5, which must be in -100 .. 100"),
        (json.dumps(request(structured_outputs={"structural_tag": "x"})), r"structured_outputs=.* is not one of json, regex"),
        (json.dumps(request(structured_outputs={"regex": "a", "json": {}})), r"structured_outputs=.* is not one of json, regex"),
        (json.dumps(request(n=1.5)), r"body.n=1.5 is not a whole number"),
        (json.dumps(request(max_tokens=True)), r"body.max_tokens=true is not a whole number"),
        (json.dumps(request(seed=1 << 63)), "does not fit in 64 bits"),
        (json.dumps(request(temperature="hot")), r"body.temperature=\"hot\" is not a number"),
        (json.dumps(request(temperature=float("nan"))), "body.temperature=NaN is not a number"),
        (
            json.dumps(request(presence_penalty=0.1)).replace("0.1", "1e400"),
            "body.presence_penalty=Infinity is not a number",
        ),
        (json.dumps(request(max_tokens=math.nan)), "body.max_tokens=NaN is not a number"),
        (json.dumps(request(logit_bias={"5": math.inf})), "body.logit_bias.5=Infinity is not a number"),
        (json.dumps(request(reasoning_effort=math.nan)), "body.reasoning_effort=NaN is not a number; correct the line"),
        (
            json.dumps(request(chat_template_kwargs={"x": 1, "a": [0, {"b": math.nan}]})),
            r"body.chat_template_kwargs.a\[1\].b=NaN is not a number; correct the line",
        ),
        (json.dumps(request(guided_json='{"minimum": NaN}')), "body.guided_json.minimum=NaN is not a number"),
        (
            json.dumps(request(structured_outputs={"json": '{"maximum": 1e400}'})),
            "body.structured_outputs.maximum=Infinity is not a number",
        ),
        (
            json.dumps(request(tools=[tool("f", x="integer") | {"y": 0.1}])).replace("0.1", "-1e400"),
            r"body.tools\[0\].y=-Infinity is not a number",
        ),
        (
            json.dumps(request(messages=[{**turn("assistant", ""), "tool_calls": [{"function": {"x": math.nan}}]}])),
            r"body.messages\[0\].tool_calls\[0\].function.x=NaN is not a number",
        ),
        (json.dumps(request(stop=[1])), r"body.stop is neither"),
        (
            json.dumps(request(max_tokens=7, max_completion_tokens=9)),
            r"body.max_tokens and body.max_completion_tokens ask for diff",
        ),
        (json.dumps(request(guided_regex="a", response_format={"type": "json_object"})), r"a row has one response_format"),
        (json.dumps(request(guided_regex="a", guided_choice=["b"])), r"--drop guided_choice"),
        (json.dumps(request() | {"custom_id": None}), r"custom_id=null is not text; give every line a unique one, as text"),
        (json.dumps(request() | {"custom_id": {"a": 1}}), r"custom_id=\{\"a\": 1\} is not text"),
        (json.dumps(request() | {"temperature": 0.5}), r"temperature is outside body, where nothing reads it; move it into"),
        (json.dumps(request(messages=[], continue_final_message=True)), "the last message is not the assistant's"),
        (json.dumps(request(temperature=10**400)), r"body.temperature=10{59} does not fit in 64 bits"),
        (json.dumps(request(n=10**400)), r"body.n=10{59} does not fit in 64 bits"),
        (json.dumps(request(seed=1e30)), r"body.seed=1e\+30 does not fit in 64 bits"),
        (json.dumps(request(messages="hi")), r"body.messages is not a list"),
        (json.dumps(request(messages=[{"role": "user", "content": [{"type": "image"}]}])), "image part without an image"),
        (json.dumps(request(messages=[{"role": "assistant", "tool_calls": [1]}])), "tool_calls that are not a list"),
        (json.dumps(request(messages=[turn("user", "x") | {"audio": 1}])), r"body.messages\[0\].audio has no place"),
        (json.dumps(request(messages=[turn("user", "x") | {"a\x1b": 1}])), r"body.messages\[0\].a\\u001b has no place"),
    ],
)
def test_a_line_that_cannot_be_honoured_is_named_and_nothing_is_written(
    tmp_path: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(request()) + "\n" + line + "\n")
    with pytest.raises(InputError, match=r"in.jsonl: 1 line of 2 is no request .*, as the lines above say") as caught:
        main(["--from-openai", str(source), str(tmp_path / "input.parquet")])
    assert re.search(said, capsys.readouterr().err)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_penalties_and_biases_are_columns(tmp_path: Path) -> None:
    more = {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": -100, "7": 2.5}}
    requests = [request(**more), request(logit_bias={}, presence_penalty=None) | {"custom_id": "r-2"}]
    file = tmp_path / "input.parquet"
    assert main(["--from-openai", str(written(tmp_path / "in.jsonl", requests)), str(file)]) == 0
    assert {*more} < map_columns(pq.read_schema(file), {}).names.keys()
    first, second = pl.read_parquet(file).to_dicts()
    assert json.loads(first["logit_bias"]) == more["logit_bias"]
    assert (first["frequency_penalty"], first["presence_penalty"], first["repetition_penalty"]) == (0.5, -1.0, 1.1)
    assert {second[name] for name in more} == {None}


PREFILLED = [turn("user", "Count"), turn("assistant", "One, ")]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": PREFILLED, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": PREFILLED, "continue_final_message": True},
        {"messages": [PREFILLED[0], {**PREFILLED[1], "prefix": True}]},
        {"messages": [PREFILLED[0], {**PREFILLED[1], "partial": True}], "add_generation_prompt": None},
    ],
)
def test_an_answer_that_continues_the_last_message_is_a_column(tmp_path: Path, body: dict[str, Any]) -> None:
    file = tmp_path / "input.parquet"
    plain = request(continue_final_message=False, add_generation_prompt=True) | {"custom_id": "r-2"}
    assert main(["--from-openai", str(written(tmp_path / "in.jsonl", [request(**body), plain])), str(file)]) == 0
    first, second = pl.read_parquet(file).to_dicts()
    assert (first["messages"], first["final_assistant"]) == (PREFILLED, "continue")
    assert second["final_assistant"] is None
    assert "final_assistant" in map_columns(pq.read_schema(file), {}).names


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"continue_final_message": True}, "the last message is not the assistant's"),
        ({"messages": PREFILLED, "continue_final_message": True, "add_generation_prompt": True}, "asks for no answer"),
        ({"add_generation_prompt": False}, "asks for no answer"),
        ({"continue_final_message": "yes"}, "neither true nor false"),
        (
            {"messages": [{**turn("user", "x"), "prefix": True}]},
            r"body.messages\[0\].prefix is for a last message of",
        ),
        ({"messages": [{**PREFILLED[1], "prefix": True}, PREFILLED[0]]}, r"messages\[0\].prefix is for a last message"),
    ],
)
def test_a_prefix_that_nothing_can_continue_is_named(
    tmp_path: Path, body: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "in.jsonl", [request(**body)])
    with pytest.raises(InputError, match="as the lines above say"):
        main(["--from-openai", str(source), str(tmp_path / "input.parquet")])
    assert re.search(said, capsys.readouterr().err)


def test_keys_that_openai_s_answers_have_and_vllm_s_budget_are_taken(tmp_path: Path) -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": "hello", "refusal": None, "annotations": []}
    lines = [request(messages=[turn("user", "hi"), answer, turn("user", "go on")], thinking_token_budget=9)]
    file = tmp_path / "input.parquet"
    assert main(["--from-openai", str(written(tmp_path / "in.jsonl", lines)), str(file)]) == 0
    (row,) = pl.read_parquet(file).to_dicts()
    assert row["messages"] == [turn("user", "hi"), turn("assistant", "hello"), turn("user", "go on")]
    assert row["thinking_token_budget"] == 9
    assert "thinking_token_budget" in map_columns(pq.read_schema(file), {}).names


def test_two_equal_keys_are_one(tmp_path: Path) -> None:
    source = written(
        tmp_path / "in.jsonl",
        [request(max_tokens=7, max_completion_tokens=7, response_format={"type": "text"}, guided_regex="a")],
    )
    assert main(["--from-openai", str(source), str(tmp_path / "x.parquet")]) == 0
    (row,) = pl.read_parquet(tmp_path / "x.parquet").to_dicts()
    assert (row["max_new_tokens"], json.loads(row["response_format"])) == (7, {"type": "regex", "regex": "a"})


def test_a_response_format_is_a_column(tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}, "strict": True}}
    formats = [form, {"type": "text"}, {"type": "json_object"}]
    requests = [request(response_format=one) | {"custom_id": f"r-{i}"} for i, one in enumerate(formats)]
    file = tmp_path / "input.parquet"
    assert main(["--from-openai", str(written(tmp_path / "in.jsonl", requests)), str(file)]) == 0
    assert "response_format" in map_columns(pq.read_schema(file), {}).names
    found = pl.read_parquet(file)["response_format"].to_list()
    assert [None if one is None else json.loads(one) for one in found] == [form, None, {"type": "json_object"}]


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json": {"type": "null"}, "regex": None}}, {"json_schema": {"schema": {"type": "null"}}}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json_schema": {"schema": {"type": "null"}}}),
        ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
        ({"guided_regex": "a+"}, {"type": "regex", "regex": "a+"}),
        ({"guided_choice": ["a"]}, {"type": "choice", "choice": ["a"]}),
        ({"guided_grammar": 'start: "a"'}, {"type": "grammar", "grammar": 'start: "a"'}),
        ({"response_format": {"type": "grammar", "grammar": "x"}}, {"type": "grammar", "grammar": "x"}),
    ],
)
def test_what_vllm_calls_structured_outputs_is_a_response_format(
    given: dict[str, Any], form: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "input.parquet"
    assert main(["--from-openai", str(written(tmp_path / "in.jsonl", [request(**given)])), str(file)]) == 0
    (found,) = pl.read_parquet(file)["response_format"].to_list()
    assert json.loads(found) == {**({} if "type" in form else {"type": "json_schema"}), **form}
    assert row_constraint({"response_format": found}) is not None


def test_a_key_that_the_user_drops_is_left_out(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [request(tool_choice="none")])
    assert main(["--from-openai", str(source), str(tmp_path / "x.parquet"), "--drop", "tool_choice"]) == 0
    assert pl.read_parquet(tmp_path / "x.parquet").columns == ["id", "messages"]


def test_a_dropped_key_is_not_read_by_another_one_either() -> None:
    """reasoning_effort and chat_template_kwargs fill one column, logprobs and top_logprobs another."""
    line = json.dumps(request(reasoning_effort="low", chat_template_kwargs={"a": 1}, logprobs=True, top_logprobs=2))
    row = parse_request(line, ["reasoning_effort", "top_logprobs"])
    assert (row["template_kwargs"], row["num_logprobs"]) == ('{"a": 1}', 0)
    assert parse_request(line, ["chat_template_kwargs"])["template_kwargs"] == '{"reasoning_effort": "low"}'


def test_the_detail_of_images_may_be_dropped_and_nothing_else_of_them() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:,", "detail": "high"}}, {"type": "text", "text": "What?"}]
    line = json.dumps(request(messages=[{"role": "user", "content": parts}]))
    with pytest.raises(BadRequest, match=r"detail='high', which would have no effect; .*input\.drop=\[detail\]"):
        parse_request(line, ["url", "type"])
    (turn,) = parse_request(line, ["detail", "url"])["messages"]
    assert turn["content"] == [{"type": "image_url", "image_url": {"url": "data:,", "detail": None}}, parts[1]]


def test_keys_to_drop_may_be_separated_by_commas(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [request(logprobs=True, top_logprobs=2, tool_choice="none")])
    drop = ["--drop", "logprobs,top_logprobs", "--drop", "tool_choice"]
    assert main(["--from-openai", str(source), str(tmp_path / "x.parquet"), *drop]) == 0
    assert pl.read_parquet(tmp_path / "x.parquet").columns == ["id", "messages"]


@pytest.mark.parametrize("text", [None, "", "\n\n"])
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(InputError, match="cannot be read" if text is None else "no request in it"):
        main(["--from-openai", str(tmp_path / "in.jsonl"), str(tmp_path / "x.parquet")])


@pytest.mark.parametrize("words", ["out", "out x", "out x --to chat --from-openai y", "--to chat x", "--from-openai y x z"])
def test_half_a_command_is_refused(words: str) -> None:
    with pytest.raises(ConfigError):
        main(words.split())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
roles, numbers = st.sampled_from(["user", "assistant", "system"]), st.integers(0, 5) | st.floats(0, 1)
chats = st.lists(st.builds(turn, roles, st.text()), min_size=1, max_size=3)
keys = st.sampled_from(["max_tokens", "temperature", "seed", "stop", "n", "tools", "stream", "other"])
bodies = st.builds(
    lambda messages, more: {**more, **messages},
    st.fixed_dictionaries({"messages": chats}) | st.fixed_dictionaries({}, optional={"messages": json_values}),
    st.dictionaries(keys, numbers | json_values, max_size=3),
)


def test_any_line_is_a_row_or_one_error() -> None:
    rows, problems = list[dict[str, Any]](), dict[str, str]()

    @given(body=bodies, custom_id=st.text() | st.integers() | json_values)
    def check(body: dict[str, Any], custom_id: Any) -> None:
        try:
            row = parse_request(json.dumps({"custom_id": custom_id, "body": body}))
        except BadRequest as bad:
            problems[str(bad)] = bad.kind
            return
        rows.append(row)
        assert row["id"] == str(custom_id)
        assert row["messages"] == body["messages"]
        assert all({"role", "content"} <= set(turn) <= set(TURN_KEYS) for turn in row["messages"])
        schema = request_schema(filled(row))
        pa.Table.from_pylist([request_row(row, schema)], schema=schema).validate(full=True)

    check()
    assert rows
    assert len(set(problems.values())) > 2
    assert all(map(str.isprintable, problems))
