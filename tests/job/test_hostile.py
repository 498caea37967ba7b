"""What strangers bring: rows of every bad kind, model folders with code in them, names that lead elsewhere, secrets."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from batchspec import cli, run
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_tokenizer
from tests.helpers.runs import run_apart


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64)
    return make_tokenizer(folder)


def arguments(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={data}", f"output.dir={out}", "output.shard_rows=5",
        "decode.max_new_tokens=6", "output.token_ids=true", "packing.max_num_seqs=3", "draft=lookup", *more,
    ]


LOOP = "{% for i in range(10**9) %}{% endfor %}"
TRAP = "{% if trap == 'boom' %}{{ raise_exception('boom') }}{% elif trap == 'loop' %}" + LOOP + "{% endif %}"


@pytest.mark.second
def test_every_kind_of_bad_row_is_one_error_row_and_its_neighbours_are_unchanged(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.jinja").write_text(TRAP + CHAT_TEMPLATE)
    good = [json.dumps({"id": f"good{i}", "prompt": f"Say word{i} again"}).encode() for i in range(8)]
    bad = {
        "null_prompt": json.dumps({"id": "null_prompt", "prompt": None}).encode(),
        "empty_prompt": json.dumps({"id": "empty_prompt", "prompt": ""}).encode(),
        "too_long": json.dumps({"id": "too_long", "prompt": "word " * 300}).encode(),
        "bad_text": b'{"id": "bad_text", "prompt": "\xff\xfe"}',
        "bad_type": json.dumps({"id": "bad_type", "prompt": {"text": "Say"}}).encode(),
        "bad_json": b'{"id": "bad_json", "prompt": "Sa',
        "bad_parameter": json.dumps({"id": "bad_parameter", "prompt": "Say", "temperature": -1}).encode(),
        "template_error": json.dumps({"id": "template_error", "prompt": "Say", "template_kwargs": {"trap": "boom"}}).encode(),
        "loop": json.dumps({"id": "loop", "prompt": "Say", "template_kwargs": {"trap": "loop"}}).encode(),
    }
    lines = [line for pair in zip([*good, b""], bad.values(), strict=True) for line in pair]
    (tmp_path / "mixed.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(good))
    more = ["input.chat=true", f"model.chat_template={tmp_path / 'chat.jinja'}"]
    mixed, clean = tmp_path / "mixed", tmp_path / "clean"
    assert run.main(arguments(model, tmp_path / "mixed.jsonl", mixed, *more, "input.max_error_fraction=0.6")) == 0
    assert run.main(arguments(model, tmp_path / "good.jsonl", clean, *more)) == 0
    frame = pl.read_parquet(mixed / "data")
    assert frame.height == len(good) + len(bad)
    errors = frame.filter(pl.col("status") == "error")
    codes = dict(zip(errors["request_id"], errors["error"].struct.field("code"), strict=True))
    # Line 12 of the file is torn: its id cannot be read. Blank lines are no rows.
    expected = {name: name for name in bad} | {"loop": "template_error", "mixed.jsonl:12": "bad_json"}
    del expected["bad_json"]
    assert codes == expected
    assert all("mixed.jsonl line" in message for message in errors["error"].struct.field("message"))
    rest = frame.filter(pl.col("status") != "error").select("request_id", "token_ids").rows()
    assert rest == pl.read_parquet(clean / "data").select("request_id", "token_ids").rows()
    assert run.main(arguments(model, tmp_path / "mixed.jsonl", tmp_path / "few", *more)) == 3  # 9 of 17, by default
    assert "input.max_error_fraction=0.5 allows" in capsys.readouterr().err


TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.second
def test_a_newcomers_chats_go_through_whole_jobs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tool calls, compressed; a deep line, half a surrogate pair, an answer to continue; OpenAI's requests."""
    (tmp_path / "tools.jinja").write_text(TOOLS)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat.append({"role": "tool", "tool_call_id": "c", "content": "it"})
    tool = {"type": "function", "function": {"name": "f"}}
    begun = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "Once "}]
    rows = [
        json.dumps({"id": "tools", "messages": chat, "tools": [tool]}), json.dumps({"id": "begun", "messages": begun}),
        '{"id": "deep", "messages": [{"role": "user", "content": "x"}], "note": ' + "[" * 10_000 + "]" * 10_000 + "}",
        '{"id": "half", "messages": [{"role": "user", "content": "\\ud83d"}]}',
    ]
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    more = [f"model.chat_template={tmp_path / 'tools.jinja'}", "input.final_assistant=continue", "decode.stop=</s>"]
    assert run.main(arguments(model, tmp_path / "in.jsonl.gz", tmp_path / "out", *more, "output.prompt_ids=true")) == 0
    first, second, *bad = pl.read_parquet(tmp_path / "out/data").to_dicts()
    assert [(row["request_id"], row["error"]["code"]) for row in bad] == [("in.jsonl.gz:3", "bad_json"), ("half", "bad_text")]
    assert json.loads(first["messages"][1]["tool_calls"]) == [call]
    assert [turn["content"] for turn in second["messages"]] == ["Say", "Once " + second["completion"]]
    request = {"custom_id": "tools", "body": {"messages": chat, "tools": [tool], "max_tokens": 6}}
    (tmp_path / "openai.jsonl").write_text(json.dumps(request))
    assert cli.main(["export", "--from-openai", str(tmp_path / "openai.jsonl"), str(tmp_path / "in.parquet")]) == 0
    assert run.main(arguments(model, tmp_path / "in.parquet", tmp_path / "again", *more, "output.prompt_ids=true")) == 0
    [again] = pl.read_parquet(tmp_path / "again/data").to_dicts()
    assert [again[name] for name in ("prompt_ids", "messages")] == [first[name] for name in ("prompt_ids", "messages")]
    export = ["export", str(tmp_path / "out"), "--to", "chat", "--status", "ok,truncated", str(tmp_path / "chat.jsonl")]
    assert cli.main(export) == 0
    exported = [json.loads(line) for line in (tmp_path / "chat.jsonl").read_text().splitlines()]
    assert exported[1]["messages"][-1]["content"] == "Once " + second["completion"]
    assert cli.main(["inspect", str(tmp_path / "out"), "tools"]) == 0
    assert run.main(arguments(model, tmp_path / "openai.jsonl", tmp_path / "lines", *more, "output.prompt_ids=true")) == 0
    [of_line] = pl.read_parquet(tmp_path / "lines/data").to_dicts()
    assert [of_line[name] for name in ("prompt_ids", "messages")] == [first[name] for name in ("prompt_ids", "messages")]


class Canary:
    """Unpickled it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_model_folders_never_runs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sung = tmp_path / "sung"
    folder = shutil.copytree(model, tmp_path / "model")
    pickled = pickle.dumps(Canary(sung))
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.ckpt", "tokenizer.pkl"):
        (folder / name).write_bytes(pickled)
    for name in ("modeling_canary.py", "tokenization_canary.py", "__init__.py", "conftest.py", "sitecustomize.py"):
        (folder / name).write_text(f"import pathlib; pathlib.Path({str(sung)!r}).touch()\n")
    auto = {"AutoConfig": "modeling_canary.Canary", "AutoModelForCausalLM": "modeling_canary.LlamaForCausalLM"}
    for name, more in (("config.json", auto), ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_canary.Canary", None]})):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"auto_map": more, "trust_remote_code": True}))
    pl.DataFrame({"prompt": ["Say word"]}).write_parquet(tmp_path / "in.parquet")
    command = arguments(folder, tmp_path / "in.parquet", tmp_path / "out", "input.chat=true")
    assert run.main(command) == 0
    (folder / "model.safetensors").unlink()
    assert run.main(arguments(folder, tmp_path / "in.parquet", tmp_path / "other")) == 2
    head = [item for item in command if not item.startswith(("draft", "model", "output.dir"))]
    head += [f"model.path={model}", f"output.dir={tmp_path / 'third'}", "draft=eagle3", f"draft.path={folder}"]
    assert run.main(head) == 2
    assert "safetensors" in capsys.readouterr().err
    assert not sung.exists()
    pickle.loads(pickled)
    assert sung.exists()  # the canary can sing


NAMES = ["../../evil", "/etc/evil", "..", "a/b\\c", "C:\\evil", "x" * 5000, "new\nline", "%2e%2e%2f", "$(touch evil)", "-rf"]


def test_ids_are_data_wherever_they_go(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a/b/c"
    folder.mkdir(parents=True)
    rows = [{"id": name, "prompt": "Say word" if i % 3 else ""} for i, name in enumerate(NAMES)]
    pl.DataFrame(rows).write_parquet(folder / "in.parquet")
    before = sorted(tmp_path.rglob("*"))
    assert run.main(arguments(model, folder / "in.parquet", folder / "out")) == 0
    made = {path for path in tmp_path.rglob("*") if path not in before}
    assert all(path.is_relative_to(folder / "out") for path in made)
    assert not [path for path in made if "evil" in path.name or len(path.name) > 100]
    assert pl.read_parquet(folder / "out/data")["request_id"].to_list() == NAMES
    capsys.readouterr()
    assert cli.main(["inspect", str(folder / "out"), "../../evil"]) == 0
    assert "empty_prompt" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["data", "_batchspec/claims"])
def test_a_link_in_the_output_folder_is_not_followed(
    model: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pl.DataFrame({"prompt": ["Say word", "Say it"]}).write_parquet(tmp_path / "in.parquet")
    command = arguments(model, tmp_path / "in.parquet", tmp_path / "out", "output.shard_rows=1")
    assert run.main(command) == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("years of work")
    (tmp_path / "out/data/part-00001.parquet").unlink()
    shutil.rmtree(tmp_path / "out" / place, ignore_errors=True)
    (tmp_path / "out" / place).symlink_to(elsewhere)
    capsys.readouterr()
    assert run.main(command) == 2
    assert f"out/{place}" in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["thesis.txt"]


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "canary-one", "AWS_SESSION_TOKEN": "canary-two", "HF_TOKEN": "canary-three",
    "OPENAI_API_KEY": "canary-four", "SLURM_JWT": "canary-five",
}


def everything(out: Path) -> bytes:
    """Every byte of a folder, and the uncompressed contents of Parquet."""
    found = b""
    for path in out.rglob("*"):
        if path.is_file():
            found += path.read_bytes()
        if path.suffix == ".parquet":
            found += pl.read_parquet(path).write_json().encode() + str(pl.read_parquet_metadata(path)).encode()
    return found


@pytest.mark.second
def test_secrets_reach_no_output_and_no_message(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    pl.DataFrame({"prompt": ["Say word", "", "Say it"]}).write_parquet(tmp_path / "in.parquet")
    command = arguments(model, tmp_path / "in.parquet", tmp_path / "out", "output.shard_rows=1", "input.chat=true")
    code, said = run_apart(command, tmp_path / "log", crash)
    assert code == 1
    assert "Traceback" in said
    assert run.main(command) == 0
    for command in (["stats"], ["inspect"], ["status"], ["verify"]):
        cli.main([*command, str(tmp_path / "out"), *(["in.parquet:1"] if command == ["inspect"] else [])])
    for key in ("model.path", "input.path", "output.dir", "output.openai", "draft.path", "model.chat_template"):
        for url in ("https://user:canary-url@host/x", "s3://bucket/x?token=canary-url"):
            assert run.main([*arguments(model, tmp_path / "in.parquet", tmp_path / "no"), f"{key}='{url}'"]) == 2
    captured = capsys.readouterr()
    assert "0 differ" in captured.out
    assert "canary" not in said + captured.out + captured.err
    assert b"canary" not in everything(tmp_path / "out")
    assert b"Say it" in everything(tmp_path / "out")
    assert not (tmp_path / "no").exists()


def crash() -> None:
    from batchspec.engine.loop.executor import Executor

    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    Executor._launch_round = broken  # type: ignore[assignment]
