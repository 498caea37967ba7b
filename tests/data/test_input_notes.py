"""What `plan`, a run and a warm engine say about an input: columns with the name of an option that no row reads, and texts for a
chat model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import batchspec
from batchspec import cli
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_tokenizer

SCHEMA = '{"type": "object", "properties": {"sea": {"const": "Aral"}}, "required": ["sea"]}'
CHAT = "prompts are taken as text; this model has a chat template: input.chat=true makes each of them a user turn"
IF_FOLLOWED = "if answers are to follow it, map it, input.columns"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    return make_tokenizer(folder, chat_template=CHAT_TEMPLATE)


def words_of(model: Path, tmp_path: Path, *more: str, prompt: str = "Name a sea.", **columns: Any) -> list[str]:
    rows = pl.DataFrame({"prompt": [prompt], **{name: [value] for name, value in columns.items()}})
    rows.write_parquet(tmp_path / "in.parquet")
    return [f"model.path={model}", f"input.path={tmp_path}/in.parquet", "decode.max_new_tokens=4", "draft=none", *more]


def planned(capsys: pytest.CaptureFixture[str], words: list[str]) -> dict[str, str]:
    """The lines of `plan` by their labels."""
    assert cli.main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:12].strip(): line[13:] for line in lines if line[:1].strip()}


@pytest.mark.second
def test_a_column_that_no_row_follows_is_named_by_plan_and_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(model, tmp_path, schema=SCHEMA)
    said = f"column 'schema' has no effect: {IF_FOLLOWED}.schema=schema; if it is data, input.columns.schema=null"
    assert planned(capsys, words)["columns"] == said
    assert cli.main(["run", *words, f"output.dir={tmp_path}/out"]) == 0
    assert said in capsys.readouterr().err.splitlines()
    for decided in ("schema", "null"):
        assert "columns" not in planned(capsys, [*words, f"input.columns.schema={decided}"])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("regex", "[a-b]", f"{IF_FOLLOWED}.regex=regex"),
        ("choice", ["a", "b"], f"{IF_FOLLOWED}.choice=choice"),
        ("grammar", 'start: "a"', f"{IF_FOLLOWED}.grammar=grammar"),
        ("Schema", SCHEMA, f"{IF_FOLLOWED}.schema=Schema"),
        ("Temperature", 0.5, "batchspec's name is 'temperature'; map it, input.columns.temperature=Temperature"),
        ("guided_json", SCHEMA, "batchspec's name is 'schema'; map it, input.columns.schema=guided_json"),
        ("chat_template_kwargs", "{}", "batchspec's name is 'template_kwargs'; map it"),
        ("lora_path", "x", "batchspec's name is 'adapter'; map it, input.columns.adapter=lora_path"),
        ("image", b"x", f"{IF_FOLLOWED}.images=image; if it is data, input.columns.images=null"),
        ("Image", {"bytes": b"x", "path": None}, f"{IF_FOLLOWED}.images=Image; if it is data, input.columns.images=null"),
        ("stop_ids", [3], "batchspec's name is the key decode.stop_ids, for all rows"),
        ("ignore_eos", True, "batchspec's name is the key decode.ignore_eos, for all rows"),
        ("top_logprobs", 3, "batchspec's name is the key output.logprobs, for all rows"),
        ("structured_outputs", "{}", "choose decode.schema, decode.regex, decode.choice or decode.grammar"),
    ],
)
def test_each_name_of_an_option_says_what_takes_its_place(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any, said: str
) -> None:
    lines = planned(capsys, words_of(model, tmp_path, **{name: value}))
    assert lines["columns"].startswith(f"column {name!r} has no effect: {said}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5), ("response_format", '{"type": "text"}'),  # read
        ("answer", "x"), ("model_name", "x"), ("token", "x"), ("logprobs", [-0.5]),  # data
        ("schema", None), ("bad_words", []),  # they ask for nothing
    ],
)
def test_columns_that_are_read_or_data_or_empty_are_not_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    assert "columns" not in planned(capsys, words_of(model, tmp_path, **{name: value}))


@pytest.mark.second
def test_texts_for_a_chat_model_are_named_by_plan_and_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(model, tmp_path)
    assert planned(capsys, words)["chat"] == CHAT
    assert cli.main(["run", *words, f"output.dir={tmp_path}/out"]) == 0
    assert CHAT in capsys.readouterr().err.splitlines()
    assert "chat" not in planned(capsys, [*words, "input.chat=true"])
    template_applied = "<|im_start|>user\nName a sea.<|im_end|>\n<|im_start|>assistant\n"
    assert "chat" not in planned(capsys, words_of(model, tmp_path, prompt=template_applied))
    base = shutil.copytree(model, tmp_path / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    assert "chat" not in planned(capsys, words_of(base, tmp_path))


@pytest.mark.second
def test_a_warm_engine_says_it_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with batchspec.Engine({"model.path": str(model), "decode.max_new_tokens": 2, "draft": "none"}) as engine:
        for _ in range(2):
            engine.generate([{"prompt": "a", "schema": SCHEMA}])
    said = capsys.readouterr().err
    assert said.count(CHAT) == 1
    assert said.count("column 'schema' has no effect") == 1


def test_keys_of_sampling_in_a_greedy_job_are_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(model, tmp_path, "decode.top_p=0.5", "decode.top_k=20")
    said = "decode.top_k=20, decode.top_p=0.5 without effect, since decode.temperature=0 is greedy: set decode.temperature, or "
    assert planned(capsys, words)["greedy"] == f"{said}choose decode=sampled"
    assert "greedy" not in planned(capsys, words_of(model, tmp_path))
    assert "greedy" not in planned(capsys, [*words, "decode.temperature=0.7"])
    assert "greedy" not in planned(capsys, words_of(model, tmp_path, "decode.top_p=0.5", temperature=0.7))


@pytest.mark.second
def test_plan_and_run_count_rows_whose_several_completions_are_equal(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def words(n: list[int | None] | None, temperature: list[float | None] | None, *more: str) -> list[str]:
        columns = {name: values for name, values in (("n", n), ("temperature", temperature)) if values is not None}
        pl.DataFrame({"prompt": ["a", "b", "c"], **columns}).write_parquet(tmp_path / "in.parquet")
        return [f"model.path={model}", f"input.path={tmp_path}/in.parquet", "decode.max_new_tokens=2", "draft=none", *more]

    end = "for several completions at temperature 0, which are all equal: give them a temperature above 0, or n=1"
    sampled = ["decode=sampled", "decode.n=2"]
    one = words(None, [0.0, 0.5, None], *sampled)
    assert planned(capsys, one)["samples"] == f"1 row asks {end}"
    assert cli.main(["run", *one, f"output.dir={tmp_path}/out"]) == 0
    assert capsys.readouterr().err.splitlines().count(f"1 row asks {end}") == 1
    assert planned(capsys, words([2, 2, 1], [0.0, None, 0.7]))["samples"] == f"2 rows ask {end}"
    assert "samples" not in planned(capsys, words([1, 2, None], [0.0, 0.5, 0.5]))
    assert "samples" not in planned(capsys, words(None, [0.1, 0.5, None], *sampled))
    assert "samples" not in planned(capsys, words([2, 3, 1], None, "decode=sampled"))
