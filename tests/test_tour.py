"""A tour of batchspec: each test shows one promise of README.md, and needs nothing that is not on this page.

    python -m pytest -q tests/test_tour.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import batchspec
from batchspec.cli import main as command
from batchspec.run import main as run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of two small random layers in float64, whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("model"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "<eos>"])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=template).save_pretrained(folder)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, eos_token_id=256, **shape)).double().save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "in.parquet"
    pl.DataFrame({"id": [f"row{i}" for i in range(12)], "prompt": [f"Name {i} rivers." for i in range(12)]}).write_parquet(path)
    return str(path)


def job(model: str, path: str, out: Path, *keys: str) -> list[str]:
    fixed = ["decode.max_new_tokens=12", "output.shard_rows=5", "model.max_len=128"]
    return [f"model.path={model}", f"input.path={path}", f"output.dir={out}", *fixed, *keys]


def rows(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "data" / "*.parquet").sort("row_index")


def test_a_job_writes_each_row_once_with_its_columns(model: str, prompts: str, tmp_path: Path) -> None:
    assert run(job(model, prompts, tmp_path / "out")) == 0
    written = rows(tmp_path / "out")
    assert written["id"].to_list() == [f"row{i}" for i in range(12)]
    assert set(written["status"]) <= {"ok", "truncated"}
    assert written["completion"].null_count() == 0


def test_a_finished_job_computes_nothing(model: str, prompts: str, tmp_path: Path) -> None:
    run(job(model, prompts, tmp_path / "out"))
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "data").iterdir()}
    assert run(job(model, prompts, tmp_path / "out")) == 0
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "data").iterdir()} == before


def test_a_job_that_is_killed_goes_on_with_the_same_command(model: str, prompts: str, tmp_path: Path) -> None:
    command_line = [sys.executable, "-m", "batchspec.run", *job(model, prompts, tmp_path / "out", "decode.max_new_tokens=100")]
    process = subprocess.Popen(command_line, start_new_session=True, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list((tmp_path / "out").glob("data/*.parquet")):
        pass
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert run(job(model, prompts, tmp_path / "out", "decode.max_new_tokens=100")) == 0
    run(job(model, prompts, tmp_path / "whole", "decode.max_new_tokens=100"))
    assert rows(tmp_path / "out")["completion"].to_list() == rows(tmp_path / "whole")["completion"].to_list()


def test_drafts_do_not_change_the_answer(model: str, prompts: str, tmp_path: Path) -> None:
    for draft in ("none", "lookup"):
        run(job(model, prompts, tmp_path / draft, f"draft={draft}"))
    assert rows(tmp_path / "none")["completion"].to_list() == rows(tmp_path / "lookup")["completion"].to_list()


def test_the_tokens_of_a_row_depend_on_the_row_alone(model: str, tmp_path: Path) -> None:
    texts = {f"row{i}": f"Sing of {i}." for i in range(6)}
    answers = []
    for name, order in (("as_is", list(texts)), ("reversed", list(texts)[::-1])):
        path = tmp_path / f"{name}.parquet"
        pl.DataFrame({"id": order, "prompt": [texts[key] for key in order]}).write_parquet(path)
        run(job(model, str(path), tmp_path / name, "decode=sampled", f"packing.max_num_seqs={len(name)}"))
        answers.append(dict(rows(tmp_path / name).select("id", "completion").iter_rows()))
    assert answers[0] == answers[1]


def test_a_bad_row_is_an_error_row_and_stops_no_other(model: str, tmp_path: Path) -> None:
    pl.DataFrame({"prompt": ["One.", None, "Three.", "Four."]}).write_parquet(tmp_path / "in.parquet")
    assert run(job(model, str(tmp_path / "in.parquet"), tmp_path / "out")) == 0
    written = rows(tmp_path / "out")
    assert written["status"].to_list()[1] == "error"
    assert written["error"].to_list()[1]["code"] == "null_prompt"
    assert written["completion"].null_count() == 1


def test_a_job_of_which_most_rows_are_bad_ends_with_3(model: str, tmp_path: Path) -> None:
    pl.DataFrame({"prompt": ["One.", None, None, None]}).write_parquet(tmp_path / "in.parquet")
    assert run(job(model, str(tmp_path / "in.parquet"), tmp_path / "out")) == 3


def test_a_job_does_not_go_on_with_other_sampling(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(job(model, prompts, tmp_path / "out"))
    assert run(job(model, prompts, tmp_path / "out", "decode.temperature=0.7")) == 2
    assert "decode.temperature" in capsys.readouterr().err


def test_a_key_that_would_do_nothing_is_refused(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(job(model, prompts, tmp_path / "out", "draft=none", "draft.prompt_lookup_max=3")) == 2
    assert "draft.prompt_lookup_max" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_plan_says_what_a_job_would_do(model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", *job(model, prompts, tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "12 rows" in said
    assert "12 slots" in said
    assert not (tmp_path / "out").exists()


def test_stats_inspect_and_report_read_what_was_written(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    run(job(model, prompts, tmp_path / "out"))
    assert command(["stats", out]) == command(["inspect", out, "row3"]) == command(["report", out]) == 0
    assert "Name 3 rivers." in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").exists()


def test_verify_decodes_rows_again_without_drafts(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(job(model, prompts, tmp_path / "out", "draft=lookup"))
    assert command(["verify", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("12 completions decoded again")


def test_export_writes_training_files(model: str, prompts: str, tmp_path: Path) -> None:
    run(job(model, prompts, tmp_path / "out"))
    arguments = ["--to", "prompt_completion", "--status", "truncated", str(tmp_path / "train.jsonl")]
    assert command(["export", str(tmp_path / "out"), *arguments]) == 0
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["prompt"][0]["content"] for line in lines] == [f"Name {i} rivers." for i in range(12)]


def test_the_output_of_a_job_is_the_input_of_the_next(model: str, prompts: str, tmp_path: Path) -> None:
    run(job(model, prompts, tmp_path / "first"))
    judge = "input.prompt='Is {{ first_completion }} a river?'"
    keys = [key for key in job(model, "", tmp_path / "second", judge) if not key.startswith("input.path")]
    assert run([*keys, f"input.from_job={tmp_path / 'first'}"]) == 0
    assert rows(tmp_path / "second").height == 12


def test_a_warm_engine_answers_call_after_call(model: str) -> None:
    with batchspec.Engine({"model.path": model, "model.max_len": 64, "decode.max_new_tokens": 8}) as engine:
        first, second = (engine.generate({"prompt": ["One.", "Two."]}) for _ in range(2))
    assert first["completion"].to_list() == second["completion"].to_list()


def generate(model: str, columns: dict[str, Any], **keys: Any) -> pl.DataFrame:
    named = {name.replace("__", "."): value for name, value in keys.items()}
    with batchspec.Engine({"model.path": model, "decode.max_new_tokens": 40, **named}) as engine:
        return engine.generate(columns)


def test_a_row_may_have_several_samples(model: str) -> None:
    frame = generate(model, {"prompt": ["Dice:"]}, decode__n=4, decode__temperature=1.0, decode__seed=3)
    assert frame["sample_index"].to_list() == [0, 1, 2, 3]
    assert frame["completion"].n_unique() > 1


def test_every_answer_follows_its_schema(model: str) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    frame = generate(model, {"prompt": [f"Row {i}" for i in range(4)], "schema": [json.dumps(schema)] * 4})
    for row in frame.filter(pl.col("status") == "ok").iter_rows(named=True):
        assert set(json.loads(row["completion"])) == {"ok"}
    assert frame["error"].null_count() == 4


def test_every_answer_is_one_of_the_choices(model: str) -> None:
    frame = generate(model, {"prompt": ["Sunny?", "Rainy?"]}, decode__choice=["yes", "no"])
    assert set(frame["completion"]) <= {"yes", "no"}


def test_choices_are_scored(model: str) -> None:
    with batchspec.Engine({"model.path": model, "decode.choice": ["yes", "no"], "decode.score": "choices"}) as engine:
        frame = engine.generate({"prompt": ["Sunny?"]})
    assert sum(each["prob"] for each in frame["choice_probs"][0]) == pytest.approx(1)


def test_a_row_may_have_options_of_its_own(model: str) -> None:
    frame = generate(model, {"prompt": ["One.", "Two."], "max_new_tokens": [3, 5]}, decode__ignore_eos=True)
    assert frame["token_ids"].list.len().to_list() == [3, 5]


def test_log_probabilities_are_those_of_the_chosen_tokens(model: str) -> None:
    frame = generate(model, {"prompt": ["One."]}, output__logprobs=1)
    assert [best[0]["logprob"] for best in frame["top_logprobs"][0]] == frame["logprobs"][0].to_list()
