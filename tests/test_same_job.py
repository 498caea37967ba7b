"""What is another job is refused by the name of what differs; what is the same job goes on, however it is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec import run
from batchspec.decode.engine import Engine
from tests.models import CHAT_TEMPLATE, make_checkpoint, make_tokenizer
from tests.test_job import arguments, prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    return make_tokenizer(folder)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    prompts().write_parquet(tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the plain job: no drafting, one slot."""
    folder = tmp_path_factory.mktemp("plain")
    prompts().write_parquet(folder / "prompts.parquet")
    assert run.main(arguments(model, folder / "prompts.parquet", folder / "out", "draft=none", "packing.slots=1")) == 0
    return folder / "out"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("decode.temperature=0.5", "decode.temperature"),
        ("decode.max_new_tokens=23", "decode.max_new_tokens"),
        ("model.dtype=float32", "model.dtype"),
        ("input.limit=7", "input.rows"),
        ("output.messages=none", "output.schema"),
        ("output.shard_rows=4", "output.shard_rows"),
        ("output.messages=prompt", "output.messages"),
        ("output.logprobs=1", "output.logprobs"),
        ("input.template_kwargs.x=1", "input.template_kwargs"),
        ("input.overlong=skip", "input.overlong"),
        ("decode.ignore_eos=true", "model.end_ids"),
    ],
)
def test_another_job_in_the_same_folder_is_refused_by_name(
    finished: Path, model: Path, change: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(model, finished.parent / "prompts.parquet", finished, change)
    assert run.main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert key in said
    assert "output.overwrite=true" in said


def same_size_edit(path: Path) -> None:
    frame = pl.read_parquet(path)
    frame.with_columns(topic=pl.col("topic").replace({"a": "b", "b": "a"})).write_parquet(path)


def test_an_edited_input_and_other_weights_of_the_same_size_are_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(model, tmp_path / "own")
    command = arguments(own, data, tmp_path / "out", "decode.max_new_tokens=2")
    assert run.main(command) == 0
    size = data.stat().st_size
    same_size_edit(data)
    assert data.stat().st_size == size
    assert run.main(command) == 2
    assert "input.files" in capsys.readouterr().err.splitlines()[-1]
    same_size_edit(data)
    tensors = load_file(own / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, own / "model.safetensors")
    assert run.main(command) == 2
    assert "model.weights" in capsys.readouterr().err.splitlines()[-1]


def test_another_shape_or_template_of_the_model_is_refused_by_name(
    model: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(model, tmp_path / "own")
    command = arguments(own, finished.parent / "prompts.parquet", finished)
    assert run.main(command) == 0  # the same model in another folder
    shape = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**shape, "rope_theta": 5000.0, "rope_parameters": None}))
    assert run.main(command) == 2
    assert "model.config" in capsys.readouterr().err.splitlines()[-1]
    (own / "config.json").write_text((model / "config.json").read_text())
    make_tokenizer(own, chat_template=CHAT_TEMPLATE.replace("assistant", "helper"))
    assert run.main(command) == 2
    assert "model.tokenizer" in capsys.readouterr().err.splitlines()[-1]
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert run.main(arguments(model, finished.parent / "prompts.parquet", finished, f"model.chat_template={template}")) == 2
    assert "model.tokenizer" in capsys.readouterr().err.splitlines()[-1]


def test_how_a_job_is_run_is_no_part_of_what_it_is(
    finished: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another drafter, batch and array: nothing is refused, computed or changed."""
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    monkeypatch.setattr(Engine, "__init__", lambda *rest, **named: pytest.fail("a finished job made an engine"))
    task = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "64"}
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    ways = ["draft=lookup", "draft.max_len=5", "packing.slots=7", "packing.pages=50", "packing.prefill_tokens=9"]
    assert run.main(arguments(model, finished.parent / "prompts.parquet", finished, *ways, "cluster.max_restarts=3")) == 0
    assert "already complete: 22 rows" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_slots_stay_full_from_shard_to_shard(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round that is launched while there are rows to come has all its slots, at the borders of shards too."""
    slots, rows = 4, 60
    caps = [3 + 7 * i % 11 for i in range(rows)]
    frame = pl.DataFrame({"prompt_ids": [[5 + i, 9, 11] for i in range(rows)], "max_new_tokens": caps})
    frame.write_parquet(tmp_path / "in.parquet")
    launch, courses = Engine._launch_round, []

    def noted(self: Engine) -> None:
        committed = len(list((tmp_path / "out/data").glob("*"))) if (tmp_path / "out/data").is_dir() else 0
        courses.append((len(self._scheduler.live), self._scheduler.exhausted, committed))
        launch(self)

    monkeypatch.setattr(Engine, "_launch_round", noted)
    settings = ["decode.ignore_eos=true", "output.messages=none", "output.shard_rows=3", f"packing.slots={slots}", "draft=lookup"]
    assert run.main(arguments(model, tmp_path / "in.parquet", tmp_path / "out", *settings)) == 0
    steady = [(live, committed) for live, exhausted, committed in courses if not exhausted]
    assert {live for live, _ in steady} == {slots}
    assert len({committed for _, committed in steady}) > 6  # commits came in between: as many borders were crossed
    assert len(list((tmp_path / "out/data").iterdir())) == rows / 3
