"""The shell scripts in jobs/: a head made of nothing but a model, and the commands that measure the tables of NOTEBOOK.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch

from batchspec.bench import arguments as bench_arguments
from batchspec.config.compose import compose
from tests.helpers.forked import python_for_scripts
from tests.helpers.models import make_checkpoint, make_tokenizer

pytestmark = pytest.mark.second

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.name: path for path in (ROOT / "jobs").glob("*/*.sh")}
SECTIONS = [
    "long",
    "short",
    "small",
    "opt",
    "lengths",
    "window",
    "job",
    "gsm8k",
    "drafters",
    "rows",
    "draws",
    "moe",
    "fp8",
    "one_row",
]


def script(name: str, *words: object, **env: object) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **{k: str(v) for k, v in env.items()}}
    return subprocess.run(["bash", SCRIPTS[name], *map(str, words)], env=known, capture_output=True, text=True, timeout=300)


@pytest.fixture
def python() -> Iterator[Path]:
    with python_for_scripts() as program:
        yield program


def test_a_model_alone_is_enough_to_train_a_head_and_the_same_command_resumes(tmp_path: Path, python: Path) -> None:
    model, work = tmp_path / "model", tmp_path / "work"
    make_tokenizer(model)
    make_checkpoint(model, "llama", hidden_size=32, intermediate_size=48, initializer_range=0.02, max_position_embeddings=1024)
    pl.DataFrame({"prompt": ["one?", "two?"]}).write_parquet(tmp_path / "mine.parquet")
    words = ["train.steps=2", "train.held_out=2", "train.max_len=128", "train.ahead=2"]
    sizes = {"PYTHON": python, "TURNS": 12, "TEXTS": 8, "CAP": 24, "PROMPTS": tmp_path / "mine.parquet"}
    first = script("train_head.sh", model, work, *words, **sizes)
    assert first.returncode == 0, first.stderr
    assert (work / "head" / "model.safetensors").exists()
    assert len(pl.read_parquet(work / "mine" / "data" / "*.parquet")) == 6
    asked = pl.read_parquet(work / "answers" / "data" / "*.parquet")["messages"].list.first().struct.field("content")
    assert asked.str.contains("\n\n", literal=True).sum() >= 8  # the texts below their tasks
    made = {path: path.stat().st_mtime_ns for path in work.rglob("*") if path.suffix in (".parquet", ".safetensors")}
    again = script("train_head.sh", model, work, *words, **sizes)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in made} == made
    block = script("train_head.sh", model, work, "draft=block", "draft.num_speculative_tokens=2", *words, **sizes)
    assert block.returncode == 0, block.stderr
    assert "Qwen3DSparkModel" in (work / "head-block" / "config.json").read_text()
    assert {path: path.stat().st_mtime_ns for path in made} == made  # both heads learn from the same answers


def recorded(tmp_path: Path, *sections: str, **env: object) -> list[list[str]]:
    """The command lines that figures.sh gives to Python."""
    stub, log = tmp_path / "python", tmp_path / "log"
    stub.write_text(
        f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]), file=open({str(log)!r}, 'a'))\n"
    )
    stub.chmod(0o755)
    done = script("figures.sh", tmp_path / "out", *sections, **{"PYTHON": stub, "HEADS": "heads", "DATA": "data", **env})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_command_of_a_figure_is_one_that_its_program_takes(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # nothing runs
    lines = recorded(tmp_path, section)
    assert lines
    for _, module, *words in lines:
        if module == "batchspec.run":
            compose(words)
            continue
        assert (module, words[0]) == ("batchspec.cli", "bench")
        args = bench_arguments.parse(words[1:])
        assert args.make_job or (args.out, bool(args.name)) == (str(tmp_path / "out" / f"{section}.jsonl"), True)


def test_the_figure_of_ranks_compares_two_copies_with_one_that_is_cut_over_two_gpus(tmp_path: Path) -> None:
    lines = recorded(tmp_path, "ranks")
    timed = [bench_arguments.parse(line[3:]) for line in lines if line[2:3] == ["bench"] and "--make-job" not in line]
    assert [(args.batch, args.tensor_parallel) for args in timed] == [(32, 1), (64, 2), (128, 1), (256, 2), (256, 1), (512, 2)]
    assert len({(args.shape, args.prompt, args.gen, *args.draft) for args in timed}) == 1
    plans = [compose(line[3:]) for line in lines if line[2:3] == ["plan"]]
    made = [bench_arguments.parse(line[3:]) for line in lines if "--make-job" in line]
    assert [args.requests for args in made] == [64, 256, 512]
    for plan, job in zip(plans, made, strict=True):
        assert plan.input.path == str(job.make_job / "known.parquet")
        assert (plan.decode.max_new_tokens, job.shape, job.prompt, job.gen) == (
            256,
            timed[0].shape,
            timed[0].prompt,
            timed[0].gen,
        )


def test_the_figure_of_replicas_runs_one_job_on_one_gpu_and_on_all(tmp_path: Path) -> None:
    jobs = [compose(line[2:]) for line in recorded(tmp_path, "replicas") if line[1] == "batchspec.run"]
    assert [job.cluster.workers for job in jobs] == [1, "auto"]
    one, all_of_them = (replace(job, cluster=jobs[0].cluster, output=jobs[0].output) for job in jobs)
    assert one == all_of_them


def test_the_figure_of_quantised_models_compares_each_with_the_model_that_it_was_made_from(tmp_path: Path) -> None:
    lines = recorded(tmp_path, "quantised", MODEL="dense")
    made = tmp_path / "out" / "made"
    assert lines[0][1:] == ["tests.heads.upcycle", "make", "dense", str(made)]
    compared = {line[4]: line[3] for line in lines if line[1:3] == ["tests.heads.upcycle", "compare"]}
    assert compared == {
        str(made / name): str(made / "gpt_oss") if name == "gpt_oss_mxfp4" else "dense"
        for name in ("fp8_block", "fp8_channel", "moe", "moe_fp8_block", "moe_fp8_channel", "gpt_oss_mxfp4")
    }
    benches = [bench_arguments.parse(line[3:]) for line in lines if line[1:3] == ["batchspec.cli", "bench"]]
    assert [args.model for args in benches] == ["dense", *compared]


def test_an_unknown_figure_is_no_success(tmp_path: Path) -> None:
    done = script("figures.sh", tmp_path / "out", "floor", "nonsense")
    assert done.returncode == 2
    assert "no section nonsense" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "words"), [("figures.sh", []), ("figures.sh", ["out"]), ("train_head.sh", []), ("train_head.sh", ["x"])]
)
def test_a_script_without_its_arguments_names_them(name: str, words: list[str]) -> None:
    done = script(name, *words)
    assert done.returncode != 0
    assert ("WORK" if name == "train_head.sh" else "SECTION...") in done.stderr
