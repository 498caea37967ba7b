"""Whole jobs of a model with latents in e4m3: drafts of its MTP layer, ranks, structured output, another run of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchspec import run
from batchspec.commands import plan, verify
from batchspec.errors import OutputError
from tests.gpu_jobs.compare import Rows, differences
from tests.gpu_jobs.models import Model, make_model
from tests.model.test_recurrent_jobs import command, prompts, written

pytestmark = pytest.mark.second


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model("glm4_moe_lite", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def job(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the prompts, and with the output of a run without drafts, one row at a time."""
    folder = tmp_path_factory.mktemp("job")
    prompts(model).write_parquet(folder / "prompts.parquet")
    assert run.main(words(model, folder, "plain", draft="none", packing__max_num_seqs=1)) == 0
    return folder


def words(model: Model, folder: Path, out: str, **more: Any) -> list[str]:
    return command(model, folder, folder / out, **{"cache__dtype": "fp8", **more})


@pytest.fixture(scope="module")
def plain(model: Model, job: Path) -> Rows:
    return written(model, job / "plain")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("mtp", {"packing__max_num_seqs": 4}),
        ("mtp_e4m3", {"draft__cache_dtype": "fp8", "packing__max_num_seqs": 3}),
        ("ranks", {"cluster__tensor_parallel": 2, "packing__max_num_seqs": 4}),
    ],
)
def test_rows_are_those_without_drafts(model: Model, job: Path, plain: Rows, name: str, more: dict[str, Any]) -> None:
    own = words(model, job, name, draft="mtp", draft__num_speculative_tokens=3, **more)
    assert run.main(own) == 0
    assert differences(plain, written(model, job / name), bits=False) == []
    assert run.main(own) == 0  # a finished job


def test_a_run_with_another_cache_is_refused_and_verify_compares_both(model: Model, job: Path, capsys: Any) -> None:
    assert run.main(words(model, job, "plain", draft="none", cache__dtype="auto")) == OutputError.exit_code
    assert "cache.dtype" in capsys.readouterr().err
    assert verify.main([str(job / "plain"), "--rows", "4"]) == 0
    assert verify.main([str(job / "plain"), "--rows", "4", "--kv"]) == 0
    assert "output positions: mean" in capsys.readouterr().out


def test_plan_says_what_pages_hold(model: Model, job: Path, capsys: Any) -> None:
    assert plan.main(words(model, job, "planned", draft="mtp")) == 0
    said = capsys.readouterr().out
    assert "latents in e4m3" in said
    assert "K and V in e4m3" not in said
