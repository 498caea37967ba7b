"""Whole jobs over images whose model two processes compute: the rows of one process, whatever becomes of a rank."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import batchspec
from batchspec import run
from batchspec.distributed import rank_processes
from tests.cluster.test_group_jobs import impatient_in_the_middle, ranks_of
from tests.helpers.forked import ServedPopen
from tests.helpers.image_models import make_image_model
from tests.helpers.pdfs import Page, make_pdf
from tests.helpers.processes import ended, wait_for_end
from tests.helpers.runs import run_apart, start_apart
from tests.job.crews import wait_until, workers_of
from tests.job.test_image_jobs import A, B, C, user

pytestmark = pytest.mark.second

RANKS = "cluster.tensor_parallel=2"
ROWS = [{"id": f"q{i}", "messages": user(f"<image>{i} and <image>"), "images": [A, (B, C)[i % 2]]} for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / "model", "qwen3_vl", seed=3, dtype=torch.float64)


def words(model: Path, path: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", f"input.path={path}", "model.dtype=float64", "output.token_ids=true", "decode.ignore_eos=true",
        "decode.max_new_tokens=12", "draft=lookup", *more,
    ]


def tokens(out: Path) -> dict[str, list[int]]:
    frame = pl.read_parquet(out / "data")
    assert frame["error"].drop_nulls().to_list() == []
    return dict(frame.select("request_id", "token_ids").iter_rows())


def test_a_job_whose_rank_is_killed_is_resumed_with_the_tokens_of_one_process(model: Path, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet")
    keys = words(model, tmp_path / "in.parquet", "input.columns={images:images}", "output.shard_rows=3", "packing.max_num_seqs=3")
    assert run.main([*keys, f"output.dir={tmp_path / 'one'}"]) == 0
    expected, out, go = tokens(tmp_path / "one"), tmp_path / "out", tmp_path / "go"
    assert len({tuple(one) for one in expected.values()}) > 6
    parent = start_apart([*keys, f"output.dir={out}", RANKS], tmp_path / "log", partial(impatient_in_the_middle, go))
    wait_until(lambda: (out / "data").is_dir() and any((out / "data").iterdir()), parent)
    pids = workers_of(parent)
    os.kill(ranks_of(parent, 1)[0], signal.SIGKILL)
    go.touch()
    code, said = ended(parent), (tmp_path / "log").read_text()
    assert code == 75, said
    assert "batchspec: rank 1 of worker 0 was killed by SIGKILL; its group ends\n" in said
    wait_for_end(pids)
    assert len(tokens(out)) < len(ROWS)
    code, said = run_apart([*keys, f"output.dir={out}", RANKS], tmp_path / "log")
    assert code == 0, said
    assert tokens(out) == expected


def test_pages_of_pdfs_whose_column_the_other_ranks_do_not_know(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.pdf").write_bytes(make_pdf([Page(lines=("one",)), Page(colour=(0.1, 0.7, 0.3)), Page(lines=("two",))]))
    keys = words(model, tmp_path / "in", "input.chat=true", "input.prompt='Read page {{ page }}.'")
    assert run.main([*keys, f"output.dir={tmp_path / 'one'}"]) == 0
    code, said = run_apart([*keys, f"output.dir={tmp_path / 'two'}", RANKS], tmp_path / "log")
    assert code == 0, said
    assert tokens(tmp_path / "two") == tokens(tmp_path / "one")
    assert len(tokens(tmp_path / "two")) == 3


def test_calls_of_a_warm_engine_on_two_ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "Popen", ServedPopen)
    keys = [word for word in words(model, Path("x"), "input.columns={images:images}") if not word.startswith("input.path")]
    rows = [{"messages": ROWS[0]["messages"], "images": one} for one in ([A, B], [C, A], [A, B])]
    expected = batchspec.generate(rows, overrides=keys)["token_ids"].to_list()
    assert expected[0] == expected[2] != expected[1]
    with batchspec.Engine([*keys, RANKS, "device=cpu"]) as engine:
        for _ in range(2):
            assert engine.generate(rows)["token_ids"].to_list() == expected
