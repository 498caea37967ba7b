"""What a job costs beside its model: little by the row, the same memory however many rows, and every row once."""

from __future__ import annotations

import cProfile
from pathlib import Path
from pstats import Stats
from typing import Any, cast

import polars as pl
import pytest

import batchspec
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.packing.ordered_requests import WINDOW_SHARDS
from tests.job_layer import SHARD_ROWS, run_job

PACKAGE = str(Path(batchspec.__file__).parent)


@pytest.mark.second
@pytest.mark.parametrize("num_rows", [20_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_the_job_layer_keeps_to_its_budget_in_flat_memory_and_writes_every_row_once(num_rows: int, tmp_path: Path) -> None:
    with cProfile.Profile() as profile:
        cost = run_job(tmp_path, num_rows)
    print(cost)
    # The budget is calls of batchspec's functions, 168 a row on 2026-11-30: time on a machine with other work says little. Work
    # for each of a row's 512 tokens would show. `python -m tests.job_layer` measures the time.
    calls = sum(counts[1] for (file, _, _), counts in cast(Any, Stats(profile)).stats.items() if file.startswith(PACKAGE))
    assert 0 < calls < 175 * num_rows
    # Memory that a row never frees would show: 100 bytes of each are 25 MB in a quarter of a million rows.
    assert max(cost.held_mb[2:]) - cost.held_mb[1] < 15
    # A sample within a flush of the journal is higher by 16 KB for each row of its window.
    assert cost.peak_mb[3] - cost.peak_mb[1] < 30 + WINDOW_SHARDS * SHARD_ROWS * 16e-3
    # So would a few objects that are kept of each row, in a short run too. In the last quarter the rows of a window go.
    assert max(cost.blocks[2:]) - cost.blocks[1] < 5000 + 0.05 * num_rows
    out = OutputFolder(tmp_path / "out")
    assert not out.missing()
    rows = out.scan().select("request_id", pl.col("token_ids", "prompt_ids").list.len()).collect(engine="streaming")
    assert rows["request_id"].to_list() == [f"row-{i:08d}" for i in range(num_rows)]
    assert rows.select("token_ids", "prompt_ids").unique().rows() == [(512, 512)]
