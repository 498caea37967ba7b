"""The demo of images with its real model, in fp32, as the README starts it: what it reads, and that nothing changes a text."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import torch

from batchspec.checkpoint.hub import resolve_model
from tests.helpers.forked import run_python
from tests.job.test_reader import check

pytestmark = pytest.mark.second

MODEL, ROWS = "pkg://reader", Path(__file__).parents[2] / "conf/prompts/demo_images.parquet"


def run_demo(folder: Path, *overrides: str) -> tuple[pl.DataFrame, str]:
    """Output rows and what the run said, started in the folder that will hold the output."""
    done = run_python(["-m", "batchspec.run", "+job=demo_images", *overrides], cwd=folder)
    assert done.returncode == 0, done.stderr
    return pl.read_parquet(folder / "out/demo_images/data").sort("row_index"), done.stderr


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[pl.DataFrame, str]:
    return run_demo(tmp_path_factory.mktemp("demo"))


def test_it_reads_most_lines_without_a_mistake(demo: tuple[pl.DataFrame, str]) -> None:
    rows, said = demo
    assert "out/demo_images: done, 40 rows" in said
    assert rows["error"].null_count() == 40
    assert "image" not in rows.columns
    assert check.exact(rows)["seen"] >= 0.95
    wrong = rows.filter(pl.col("completion") != pl.col("text"))
    assert wrong.height <= 0.1 * rows.height, wrong.select("text", "completion").rows()


def test_drafts_of_its_mtp_layer_are_accepted_and_change_no_text(demo: tuple[pl.DataFrame, str], tmp_path: Path) -> None:
    drafted = demo[0]["spec_decode"].struct.unnest()
    assert set(drafted["drafter"]) == {"mtp"}
    assert 1 + int(drafted["num_accepted_draft_tokens"].sum()) / int(drafted["num_spec_steps"].sum()) > 1.5
    plain, _ = run_demo(tmp_path, "draft=none", "packing.max_num_seqs=5")
    assert plain["token_ids"].to_list() == demo[0]["token_ids"].to_list()


def test_its_texts_are_those_of_transformers(demo: tuple[pl.DataFrame, str]) -> None:
    rows = pl.read_parquet(ROWS).head(4)
    assert check.by_transformers(str(resolve_model(MODEL)), rows) == demo[0]["completion"].head(4).to_list()


def test_a_kill_and_a_resumed_run_change_no_text(demo: tuple[pl.DataFrame, str], tmp_path: Path) -> None:
    jobs = check.Jobs(MODEL, pl.read_parquet(ROWS), tmp_path, [])
    found = jobs.killed("killed", "draft=mtp", "output.shard_rows=8", "packing.max_num_seqs=4")
    assert found["completion"].to_list() == demo[0]["completion"].to_list()


def test_its_weights_are_small_and_finite() -> None:
    from safetensors.torch import load_file

    folder = resolve_model(MODEL)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 12_000_000
    assert all(torch.isfinite(own).all() for own in load_file(folder / "model.safetensors").values())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_5"
