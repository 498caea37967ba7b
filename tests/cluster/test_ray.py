"""Ray Data over a warm engine, on a local Ray: `pip install "ray[data]"` first, and `-m slow`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import batchspec
from tests.helpers.runs import make_model

ray: Any = pytest.importorskip("ray", reason='ray is not installed: pip install "ray[data]"')
data: Any = pytest.importorskip("ray.data", reason='pip install "ray[data]"')
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two processes for actors; they import batchspec from where this one does."""
    environment = {
        "env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    }
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment, _temp_dir=str(tmp_path_factory.mktemp("ray")))
    yield
    ray.shutdown()


def test_batches_of_a_dataset_have_the_rows_of_a_job(cluster: None, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    options = [
        f"model.path={model}", "model.dtype=float64", "model.max_len=96", "decode.max_new_tokens=8", "decode.temperature=0.8",
        "output.token_ids=true", "packing.max_num_seqs=4", "packing.memory_gb=0.1",
    ]
    rows = pl.DataFrame({"id": [f"q{i}" for i in range(40)], "prompt": [None if i == 7 else f"Say word{i}" for i in range(40)]})
    rows.write_parquet(tmp_path / "prompts.parquet")

    found = data.read_parquet(str(tmp_path / "prompts.parquet")).map_batches(
        batchspec.Engine, fn_constructor_args=(options,), batch_format="pyarrow", batch_size=16, concurrency=1, num_cpus=1
    )
    found.write_parquet(str(tmp_path / "out"))

    order = ["request_id", "sample_index", "status", "completion", "token_ids", "seed", "finish_reason"]
    written = pl.read_parquet(tmp_path / "out").select(order).sort("request_id")
    job = batchspec.generate(rows, overrides=options).select(order).sort("request_id")
    assert written.height == 40
    assert (written["status"] == "error").sum() == 1
    assert written.equals(job)
