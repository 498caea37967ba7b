"""What an engine is prepared for before its first row: the sampling mode of usual rows, the prefill passes of surveyed rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import polars as pl
import pytest
import torch

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.config.compose import compose
from batchspec.engine.loop.engine import Engine
from batchspec.errors import CapacityError
from batchspec.job.load import memory
from batchspec.job.load.build import prepare_engine, usual_mode
from batchspec.job.prepare import open_job
from batchspec.packing.planner import Demand
from batchspec.packing.survey import Survey
from batchspec.records import Request
from tests.helpers.engines import request
from tests.helpers.runs import make_model
from tests.helpers.stand_ins import H200


def prepared(device: str, survey: Survey, num_rows: int, **options: Any) -> list[dict[str, Any]]:
    """The arguments with which `prepare_engine` prepares an engine on this device."""
    calls: list[dict[str, Any]] = []
    engine = SimpleNamespace(
        target=SimpleNamespace(device=torch.device(device)), prepare=lambda mode, **named: calls.append({"mode": mode, **named})
    )
    prepare_engine(cast(Engine, engine), SamplingMode(random=True), survey, num_rows, window_rows=4, **options)
    return calls


def test_an_engine_is_prepared_for_the_rows_that_were_surveyed() -> None:
    survey = Survey()
    survey.add(4, [request(i, [7] * (130 + i), cap=20 + i) for i in range(4)])
    (call,) = prepared("cuda", survey, 100, most_rounds=9)
    assert (call["mode"], call["shared"], call["most_rounds"]) == (SamplingMode(random=True), True, 9)
    assert call["expected"].prompt_lens.tolist() == [133, 132, 131, 130], "the longest output enters first"
    assert (call["expected"].num_rows, call["expected"].common_tokens) == (100, 130)


def test_an_engine_whose_rows_are_unknown_is_prepared_for_any() -> None:
    (call,) = prepared("cuda", Survey(shares_prefix=True), 0)
    assert call == {"mode": SamplingMode(random=True), "shared": True, "most_rounds": None, "expected": None}


def test_on_a_cpu_nothing_is_prepared() -> None:
    assert prepared("cpu", Survey(shares_prefix=True), 0) == []


@pytest.mark.parametrize(
    "keys",
    [
        [], ["decode.temperature=0.7", "decode.top_p=0.9"], ["decode.top_k=5"], ["decode.presence_penalty=0.5"],
        ["decode.min_new_tokens=2"], ["decode.logit_bias={5: -3}"], ["decode.logit_bias={5: 0}"],
    ],
)
def test_the_usual_mode_is_that_of_a_row_without_values_of_its_own(keys: list[str], tmp_path: Path) -> None:
    pl.DataFrame({"prompt": ["Name a sea."]}).write_parquet(tmp_path / "in.parquet")
    model = make_model(tmp_path / "model")
    words = [f"model.path={model}", f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out", "device=cpu"]
    job = open_job(compose([*words, "decode.max_new_tokens=8", *keys]))
    (row,) = job.admission.admit(next(job.source.shards(1)))
    assert isinstance(row, Request)
    assert usual_mode(job) == SamplingMode.of(row.sampling, row.min_new_tokens)


@pytest.mark.parametrize(("least", "fits"), [(10_000, False), (20 * 10**9, True)])
def test_a_gpu_that_another_program_uses_is_named(
    least: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a row does not fit instead of advice that does not help, and where the batch is smaller because of it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(memory, "free_after_loading", lambda *_: [138 * 10**9, least])
    pl.DataFrame({"prompt": ["Name a sea."]}).write_parquet(tmp_path / "in.parquet")
    words = ["decode.max_new_tokens=9", "draft=none", f"input.path={tmp_path}/in.parquet"]
    words.append(f"model.path={make_model(tmp_path / 'model')}")
    job = replace(open_job(compose([*words, f"output.dir={tmp_path / 'out'}"], require=())), device=torch.device("cuda"))
    demand = Demand(num_completions=1, prompt_tokens=9, output_tokens=9, max_tokens=18)
    said = (
        f"rank 1 (GPU 5) has {least / 1e9:.1f} GB of free memory, rank 0 (GPU 2) 138.0 GB, and all ranks use as little; end "
        "the program that holds the rest or choose other GPUs by CUDA_VISIBLE_DEVICES"
    )
    if fits:
        assert memory.plan_batch(job, demand, H200, loaded=True).num_pages > 1
        assert said in capsys.readouterr().err
        return
    with pytest.raises(CapacityError) as refusal:
        memory.plan_batch(job, demand, H200, loaded=True)
    assert str(refusal.value).startswith(f"{said} (the GPU's free 0.00 GB less ")
    assert str(refusal.value).endswith("gives 0 K/V pages of 0.02 MB)"), "no advice that does not help"


def test_gpus_with_about_the_same_memory_are_equal() -> None:
    assert memory.taken_by_others([138 * 10**9, 130 * 10**9]) == memory.taken_by_others([5 * 10**9]) == ""
