"""task_jobs.py: models of the right sizes, whole jobs without decoding, and the same prompts for another engine."""

from __future__ import annotations

import importlib
import shlex
from math import prod
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from batchspec import run
from batchspec.model.spec import load_spec

JOBS = Path(__file__).parents[2] / "jobs"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(JOBS / "benchmarks")
    task_jobs: Any = importlib.import_module("task_jobs")


@pytest.mark.parametrize(("task", "billions"), [("embed", 0.596), ("reward", 7.5), ("rerank", 0.596)])
def test_a_shape_has_the_weights_of_its_model(task: str, billions: float, tmp_path: Path) -> None:
    tokenizer = task_jobs.tokenizer_of("yes and no")
    task_jobs.write_model(tmp_path, task_jobs.CONFIGS[task], tokenizer)
    tensors = load_spec(tmp_path).tensors()
    assert sum(prod(tensor.shape) for tensor in tensors) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.second
@pytest.mark.parametrize(("task", "column"), [("embed", "embedding"), ("reward", "scores"), ("rerank", "score")])
def test_the_job_that_it_writes_runs(task: str, column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task_jobs.main([str(tmp_path), "--task", task, "--rows", "12", "--tiny"])
    command = capsys.readouterr().out.splitlines()[0].removeprefix("python -m batchspec.run ")
    assert run.main([*shlex.split(command), "device=cpu"]) == 0
    rows = pl.read_parquet(tmp_path / "out/data").sort("row_index")
    assert rows["id"].to_list() == [f"row-{i}" for i in range(12)]
    assert rows[column].null_count() == 0
    given = pl.read_parquet(tmp_path / ("ids.parquet" if task == "rerank" else "in.parquet"))
    assert rows["prompt_ids"].to_list() == given["prompt_ids"].to_list()
