"""`batchspec bench --accept OUT`: requests accept their drafts as often as the rows of a finished job did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchspec.bench.acceptance import rates_of_rows, read_accept
from batchspec.bench.arguments import parse
from batchspec.bench.engines import Bench, variant_specs
from batchspec.bench.workloads import make_workload
from batchspec.data.dataset.schema import SPEC_DECODE
from batchspec.errors import ConfigError
from batchspec.model.families.shapes import COMMON
from tests.bench.test_bench import TINY

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

RATES = [[1.0, 1.0], [0.0, None], None, [1.0, 0.0], [None, None], [0.5, 0.75]]


def written(path: Path, rates: list[Any]) -> Path:
    """Rows whose requests have these values of `acceptance_per_position`; None: no drafts at all."""
    rows = [None if one is None else {"drafter": "lookup", "acceptance_per_position": one} for one in rates]
    pq.write_table(pa.table({"row_index": range(len(rows)), "spec_decode": pa.array(rows, SPEC_DECODE)}), path)
    return path


def test_each_row_with_drafts_has_its_rates(tmp_path: Path) -> None:
    """What was never drafted is never accepted; no position is accepted more often than the one before it."""
    assert read_accept(str(written(tmp_path / "rows.parquet", RATES))) == [[1, 1], [0, 0], [1, 0], [0.5, 0.5]]


def test_shards_of_a_job_follow_each_other_and_shorter_rows_are_filled_up(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    written(tmp_path / "data" / "part-00001.parquet", [[0.25]])
    written(tmp_path / "data" / "part-00000.parquet", [[1.0, 0.5, 0.5]])
    assert rates_of_rows(tmp_path) == [[1.0, 0.5, 0.5], [0.25, 0, 0]]


def test_requests_replay_the_rows_in_turn(tmp_path: Path) -> None:
    """On another shape, with as many drafts as the job had."""
    shape, file = tmp_path / "config.json", written(tmp_path / "rows.parquet", RATES[:4])
    shape.write_text(json.dumps({**COMMON, **TINY}))
    words = ["o", "n", "--shape", str(shape), "--batch", "6", "--prompt", "8", "--gen", "13", "--dtype", "float32"]
    args = parse([*words, "--device", "cpu", "--draft", "eagle3", "--k", "2", "--accept", str(file)])
    bench = Bench(args, make_workload(args, torch.device("cpu")), torch.device("cpu"))
    (variant,) = variant_specs(args)
    done = sorted(bench.engine(variant).run(iter(bench.workload.requests)), key=lambda one: one.row_index)
    histograms = [one.stats.histogram for one in done if one.stats is not None]
    assert histograms == [(0, 0, 4), (12, 0, 0), (0, 6, 0)] * 2


def test_the_line_names_the_job_and_not_every_rate(tmp_path: Path) -> None:
    args = parse(["o", "n", "--accept", str(written(tmp_path / "rows.parquet", RATES))])
    assert args.accept_given == str(tmp_path / "rows.parquet")
    assert len(args.accept) == 4


@pytest.mark.parametrize("rates", [[], [None, None], [[None]]])
def test_an_output_without_drafts_is_refused(rates: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no row has spec_decode\.acceptance_per_position; give the output.dir of a job with"):
        read_accept(str(written(tmp_path / "rows.parquet", rates)))


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="no row has spec_decode"):
        read_accept(str(tmp_path / "a.parquet"))
