"""OpenAI's batches as jobs: request lines in, response lines out, and what cannot be followed."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec import cli, run
from batchspec.commands import export, plan
from batchspec.config.schema import InputConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import open_source, place_in_file
from batchspec.data.dataset.row_ids import check_ids, request_ids
from batchspec.text.token_texts import TokenTexts
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.tool_calls.tool_templates import TEMPLATES, tool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openai") / "model"
    return make_tokenizer(
        make_checkpoint(folder, "llama", dtype=torch.float64, max_position_embeddings=2048), chat_template=TEMPLATES["hermes"]
    )


def request(name: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say {name}"}]
    return {
        "custom_id": name,
        "method": "POST",
        "url": url,
        "body": {"model": "x", "messages": messages, "max_tokens": 6, **body},
    }


SAID = '<tool_call> {"name": "f", "arguments": {"x": 5}} </tool_call>'
CHOICE: dict[str, Any] = {"structured_outputs": {"choice": [SAID]}, "max_tokens": 90}
LINES: list[Any] = [
    request("plain"),
    request("two", n=2, temperature=1.0, seed=3, stop=["zzz"]),
    request("vector", "/v1/embeddings"),
    "{this is no JSON",
    request("tools", tools=[tool("f", x="integer")], **CHOICE),
    request("asks", logprobs=True, top_logprobs=2),
    request("null", max_tokens=None, top_p=None),
    request("equal", n=2),
    request("effort", reasoning_effort="low"),
]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8")
    return path


def options(model: Path, folder: Path, *more: str) -> list[str]:
    fixed = ["model.dtype=float64", "model.max_len=900", "decode.max_new_tokens=9", "packing.max_num_seqs=3"]
    return [f"model.path={model}", f"input.path={folder}/in.jsonl", f"output.dir={folder}/out", *fixed, *more]


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job over LINES that writes response lines."""
    found = tmp_path_factory.mktemp("job")
    written(found / "in.jsonl", LINES)
    assert run.main(options(model, found, "output=openai")) == 0
    return found


@pytest.mark.second
def test_request_lines_run_and_each_gets_one_response_line(folder: Path) -> None:
    found = answers(folder / "out/answers.jsonl")
    names = ["plain", "two", "vector", "in.jsonl:4", "tools", "asks", "null", "equal", "effort"]
    assert list(found) == names, "in the order of the requests"
    body = found["plain"]["response"]["body"]
    assert (body["object"], body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == (
        "chat.completion",
        "length",
        6,
    )
    assert [choice["index"] for choice in found["two"]["response"]["body"]["choices"]] == [0, 1]
    both = found["equal"]["response"]["body"]["choices"]
    assert both[0]["message"] == both[1]["message"], "its temperature is the job's, 0; a note counts such rows"
    (choice,) = found["tools"]["response"]["body"]["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 5}'}
    assert found["null"]["response"]["body"]["usage"]["completion_tokens"] <= 9, "the job's own limit"


def test_bad_lines_are_errors_in_the_answers_and_rows_of_the_job(folder: Path) -> None:
    found = answers(folder / "out/answers.jsonl")
    for name, code, said in (
        ("vector", "bad_request", "url '/v1/embeddings' is not supported"),
        ("in.jsonl:4", "bad_json", "in.jsonl line 4 (id 'in.jsonl:4'): it is not JSON"),
        ("effort", "template_error", "reads no variable 'reasoning_effort', which template_kwargs sets); leave it out, or, of "
         "OpenAI's requests, ignore it: input.drop=[reasoning_effort]"),
    ):
        assert found[name]["response"] is None
        assert found[name]["error"]["code"] == code
        assert said in found[name]["error"]["message"]
    rows = pl.read_parquet(folder / "out/data")
    assert rows.filter(status="error")["request_id"].to_list() == ["vector", "in.jsonl:4", "effort"]


def test_logprobs_have_openai_s_form(folder: Path, model: Path) -> None:
    rows = pl.read_parquet(folder / "out/data").filter(request_id="asks").to_dicts()
    (choice,) = answers(folder / "out/answers.jsonl")["asks"]["response"]["body"]["choices"]
    content, tokenizer = choice["logprobs"]["content"], Tokenizer(model)
    assert [entry["logprob"] for entry in content] == rows[0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 6
    assert [entry["top_logprobs"][0]["logprob"] for entry in content] == rows[0]["logprobs"], "greedy: the likeliest token"
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode("utf-8", "replace")
    assert text.rstrip("\ufffd") == tokenizer.decode(rows[0]["token_ids"], False).rstrip("\ufffd")
    assert all(entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace") for entry in content)
    assert all(math.exp(entry["logprob"]) <= 1 for entry in content)


def test_the_texts_of_tokens_are_their_bytes(model: Path) -> None:
    tokenizer = Tokenizer(model)
    texts = TokenTexts(tokenizer)
    assert texts(2) == ("<|im_end|>", list(b"<|im_end|>"))
    ids = tokenizer.encode_part("naïve 🎈")
    assert b"".join(bytes(texts(token)[1]) for token in ids).decode() == "naïve 🎈"
    assert texts(99_999) == ("", [])


def test_export_writes_the_same_lines(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(folder / "out"), "--to", "openai", str(tmp_path / "a.jsonl")]) == 0
    assert answers(tmp_path / "a.jsonl") == answers(folder / "out/answers.jsonl")
    assert "left out" not in capsys.readouterr().err


def test_a_finished_job_writes_the_file_only_if_it_is_missing(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "out/answers.jsonl"
    before, text = file.stat().st_mtime_ns, file.read_text()
    words = options(model, folder, "output=openai")
    assert run.main(words) == 0
    assert file.stat().st_mtime_ns == before
    file.unlink()
    assert run.main(words) == 0
    assert file.read_text() == text
    assert f"{folder}/out/answers.jsonl: 9 answers as OpenAI's response lines" in capsys.readouterr().err
    assert run.main([*words, "output.openai=null"]) == 0, "it does not change the job"


def test_rows_have_the_logprobs_that_they_ask_for(folder: Path, model: Path, tmp_path: Path) -> None:
    """Without output.logprobs those alone that ask; with it rows that do not ask have the job's, and none may ask for more."""
    rows = {row["request_id"]: row for row in pl.read_parquet(folder / "out/data").to_dicts()}
    assert [name for name, row in rows.items() if row["logprobs"] is not None] == ["asks"]
    assert rows["plain"]["top_logprobs"] is None
    lines = [
        request("none"), request("own", logprobs=True), request("one", logprobs=True, top_logprobs=1),
        request("no", logprobs=False), request("more", logprobs=True, top_logprobs=3),
        request("alone", top_logprobs=2), request("many", logprobs=True, top_logprobs=101),
    ]
    written(tmp_path / "in.jsonl", lines)
    assert run.main(options(model, tmp_path, "output.logprobs=2", "input.max_error_fraction=0.5")) == 0
    found = {row["request_id"]: row for row in pl.read_parquet(tmp_path / "out/data").to_dicts()}
    tops = {name: row["top_logprobs"] and len(row["top_logprobs"][0]) for name, row in found.items() if row["logprobs"]}
    assert tops == {"none": 2, "own": None, "one": 1, "no": 2}
    for name, said in (
        ("more", "num_logprobs=3 exceeds output.logprobs=2; set output.logprobs=3"),
        ("alone", "body.top_logprobs=2 needs body.logprobs=true; correct the line"),
        ("many", "num_logprobs=101 must be in 0 .. 100"),
    ):
        assert said in found[name]["error"]["message"]


def test_logprobs_without_token_ids_are_left_out_with_a_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "in.jsonl", [request("a")])
    assert (
        run.main(options(model, tmp_path, "output.logprobs=0", "output.token_ids=false", f"output.openai={tmp_path}/new/a.jsonl"))
        == 0
    )
    said = "logprobs are left out: the job has no column token_ids; output.token_ids=true writes it"
    assert said in capsys.readouterr().err
    assert export.main([str(tmp_path / "out"), "--to", "openai", str(tmp_path / "b.jsonl")]) == 0
    assert said in capsys.readouterr().err
    for file in ("new/a.jsonl", "b.jsonl"):
        assert answers(tmp_path / file)["a"]["response"]["body"]["choices"][0]["logprobs"] is None


def test_logprobs_need_the_job_s_own_tokenizer(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another one would give the tokens other texts."""
    own = make_tokenizer(make_checkpoint(tmp_path / "model", "llama", dtype=torch.float64, max_position_embeddings=2048))
    written(tmp_path / "in.jsonl", [request("a")])
    assert run.main(options(own, tmp_path, "output=openai", "output.logprobs=0")) == 0
    make_tokenizer(own, vocab=300)
    capsys.readouterr()
    assert export.main([str(tmp_path / "out"), "--to", "openai", str(tmp_path / "b.jsonl")]) == 0
    assert "logprobs are left out:" in (said := capsys.readouterr().err)
    assert "its tokenizer is not the job's any more" in said
    assert answers(tmp_path / "b.jsonl")["a"]["response"]["body"]["choices"][0]["logprobs"] is None


def test_plan_and_run_say_what_openai_would_do_otherwise(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "in.jsonl", [request("a", max_tokens=None), request("b", temperature=0.5)])
    words = [word for word in options(model, tmp_path) if "max_new_tokens" not in word] + ["model.max_len=1500"]
    greedy = "requests without temperature are decoded greedily (OpenAI's default is 1: decode.temperature=1)"
    cap = "those without max_tokens get at most 1,024 tokens (OpenAI has no limit: decode.max_new_tokens=N)"
    assert plan.main(words) == 0
    assert f"{greedy}; {cap}" in capsys.readouterr().out
    assert plan.main([*words, "decode.temperature=1"]) == 0
    assert greedy not in (said := capsys.readouterr().out)
    assert cap in said
    written(tmp_path / "in.jsonl", [request("a", temperature=1)])
    assert plan.main(words) == 0
    assert "OpenAI" not in capsys.readouterr().out
    assert export.main(["--from-openai", str(tmp_path / "in.jsonl"), str(tmp_path / "in.parquet")]) == 0
    assert "OpenAI" not in capsys.readouterr().out
    written(tmp_path / "in.jsonl", [request("a", max_tokens=None)])
    assert export.main(["--from-openai", str(tmp_path / "in.jsonl"), str(tmp_path / "in.parquet"), "--overwrite"]) == 0
    assert f"{greedy}; {cap}" in capsys.readouterr().out


MORE_BAD = [request("more", "/v1/embeddings"), request("old", "/v1/completions"), request("ends", stop_token_ids=[2])]


def test_the_converter_counts_bad_lines_by_kind_and_leaves_them_out_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "in.jsonl", [*LINES, *MORE_BAD])
    convert = ["export", "--from-openai", str(source), str(tmp_path / "in.parquet")]
    assert cli.main(convert) == 2
    said = capsys.readouterr().err
    assert all(len(line) <= 300 for line in said.splitlines())
    for part in (
        "line 3: url '/v1/embeddings' is not supported", "(1 more like it)\nline 4: not a batch request",
        "\nline 12: body.stop_token_ids=[2] has no column in a batchspec input; set decode.stop_ids for the whole job, and "
        "ignore it: input.drop=[stop_token_ids] of a job, --drop stop_token_ids of export",
        "line 11: url '/v1/completions' is not supported, /v1/chat/completions alone is; write its prompt as the column `prompt`",
        "in.jsonl: 5 lines of 12 are no requests that batchspec can follow, as the lines above say; --skip-bad leaves them out\n",
    ):
        assert part in said
    assert not (tmp_path / "in.parquet").exists()
    assert cli.main([*convert, "--skip-bad"]) == 0
    assert "5 lines left out: line 3: url '/v1/embeddings'" in capsys.readouterr().out
    good = ["plain", "two", "tools", "asks", "null", "equal", "effort"]
    assert pl.read_parquet(tmp_path / "in.parquet")["id"].to_list() == good
    assert cli.main(["export", "out", "--to", "chat", "x.jsonl", "--skip-bad"]) == 2
    assert "--skip-bad is read only with --from-openai" in capsys.readouterr().err


@pytest.mark.second
def test_a_converted_file_and_the_lines_give_the_same_answers(folder: Path, model: Path, tmp_path: Path) -> None:
    convert = [
        "--from-openai",
        str(folder / "in.jsonl"),
        str(tmp_path / "in.parquet"),
        "--skip-bad",
    ]
    assert export.main(convert) == 0
    words = [word for word in options(model, tmp_path) if "input.path" not in word] + [f"input.path={tmp_path}/in.parquet"]
    assert run.main([*words, "output.token_ids=true"]) == 0
    old, new = (
        pl.read_parquet(path / "out/data").filter(status="ok").select("request_id", "token_ids") for path in (folder, tmp_path)
    )
    assert new.rows() == old.rows()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["output.openai={tmp}/there.jsonl"], "output.openai={tmp}/there.jsonl exists; give another name, or delete it"),
        (["output.openai={tmp}/a.txt"], "must be a local file with the suffix .jsonl"),
        (["output.openai=s3://b/a.jsonl"], "must be a local file with the suffix .jsonl"),
        (["output.openai={tmp}/in.jsonl", "output.overwrite=true"], "/in.jsonl lies in input.path=/"),
        (["output.openai={tmp}/out/data/a.jsonl"], "data/ may only hold shards"),
        (["output.openai={tmp}/there.jsonl/a.jsonl"], "is a folder, or lies in a file"),
        (
            ["output.openai=a.jsonl", "decode.score=prompts", "decode.max_new_tokens=1024"],
            "output.openai=a.jsonl with decode.score=prompts has no",
        ),
    ],
)
def test_a_file_of_answers_that_cannot_be_is_refused_before_the_work(
    model: Path, tmp_path: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "in.jsonl", [request("a")])
    (tmp_path / "there.jsonl").write_text("mine")
    assert run.main(options(model, tmp_path, *(word.format(tmp=tmp_path) for word in more))) == 2
    assert said.format(tmp=tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "there.jsonl").read_text() == "mine"


def test_keys_that_are_dropped_belong_to_the_job_and_need_requests(
    folder: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(options(model, folder, "output=openai", "input.drop=[logprobs,top_logprobs]")) == 2
    assert "input.drop" in capsys.readouterr().err
    written(tmp_path / "in.jsonl", [{"prompt": "hi"}])
    assert run.main(options(model, tmp_path, "input.drop=[logprobs]")) == 2
    assert "is for OpenAI's batch requests, JSON lines with custom_id and body, and the input has none" in capsys.readouterr().err


def test_a_file_without_one_good_request_and_rows_with_such_columns_are_no_batch(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "in.jsonl", [request("a", "/v1/embeddings")] * 2)
    assert run.main(options(model, tmp_path)) == 2
    assert "no line is a request that batchspec can follow (the first: url '/v1/embeddings'" in capsys.readouterr().err
    written(tmp_path / "in.jsonl", [{"custom_id": "a", "body": "Say a"}])
    assert run.main(options(model, tmp_path, "input.columns={id: custom_id, prompt: body}")) == 0
    assert pl.read_parquet(tmp_path / "out/data")["request_id"].to_list() == ["a"]


LINE_KINDS: dict[str, Callable[[int], Any]] = {
    "good": lambda k: request(f"q{k}"),
    "bad value": lambda k: request(f"q{k}", temperature=f"x{k}"),
    "unknown key": lambda k: request(f"q{k}", **dict[str, Any]({f"x{k}": 1})),
    "other endpoint": lambda k: request(f"q{k}", f"/v1/x{k}"),
    "key outside": lambda k: request(f"q{k}") | {f"x{k}": 1},
    "no body": lambda k: {"custom_id": f"q{k}"},
    "no id": lambda k: {"body": request("")["body"]},
    "id of another type": lambda k: request("") | {"custom_id": [f"x{k}"]},
    "torn": lambda k: json.dumps(request(f"q{k}"))[:30],
    "too long": lambda k: json.dumps(request(f"q{k}", x="y" * 400)),
    "empty": lambda k: {},
    "blank": lambda k: "",
    "spaces": lambda k: " \t ",
}
WITHOUT_ID = ("no id", "id of another type", "torn", "too long", "empty")
SAYS_ITS_NUMBER = ("bad value", "unknown key", "other endpoint", "key outside", "id of another type")


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["good", "no id", "no body", "bad value"]), st.lists(st.sampled_from([*LINE_KINDS]), max_size=12),
    st.booleans(), st.sampled_from(["\n", "\r\n"]), st.sampled_from([1, 300, 1 << 20]), st.integers(1, 5),
)
def test_id_line_and_message_of_a_row_are_those_of_one_line(
    first: str, kinds: list[str], bom: bool, end: str, batch_bytes: int, shard_rows: int
) -> None:
    """Whatever lines are around it: line k has the id qk, and its message says xk."""
    kinds = [first, *kinds, "good"]
    lines = [LINE_KINDS[kind](k) for k, kind in enumerate(kinds, 1)]
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + end for line in lines)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchspec.data.dataset.files.BATCH_BYTES", batch_bytes)
        patch.setattr("batchspec.data.dataset.lines.MAX_LINE_BYTES", 400)
        (Path(folder) / "in.jsonl").write_bytes(b"\xef\xbb\xbf" * bom + text.encode())
        source = open_source(InputConfig(path=folder))
        columns = map_columns(source.schema, {})
        check_ids(source, columns)
        shards = list(source.shards(shard_rows))
    ids = [name for shard in shards for name in request_ids(source, columns, shard)]
    bad = {row: why.message for shard in shards for row, why in shard.bad.items()}
    wanted = [(number, kind) for number, kind in enumerate(kinds, 1) if kind not in ("blank", "spaces")]
    for row, (number, kind) in enumerate(wanted):
        assert place_in_file(source, row) == f"in.jsonl line {number}"
        assert ids[row] == (f"in.jsonl:{number}" if kind in WITHOUT_ID else f"q{number}")
        assert (row in bad) == (kind != "good")
        assert kind not in SAYS_ITS_NUMBER or f"x{number}" in bad[row]
    assert len(ids) == len(wanted)
