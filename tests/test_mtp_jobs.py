"""Whole jobs with draft=mtp: the rows of a run without drafts and with one slot, whatever they ask for."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from batchspec import run
from tests.gpu_jobs.compare import Rows, differences
from tests.gpu_jobs.models import Model, make_model
from tests.runs import run_apart, signalled_after_commits
from tests.test_recurrent_jobs import HYBRIDS, Keys, command, folder, job, plain, written

pytestmark = pytest.mark.second

__all__ = ["folder", "job", "plain"]

MTP: Keys = {"draft": "mtp", "packing.max_num_seqs": 3}
WAYS: dict[str, Keys] = {
    "four drafts": {"draft.num_speculative_tokens": 4},
    "eight drafts, few pages, rounds ahead of the host": {
        "draft.num_speculative_tokens": 8, "packing.max_num_seqs": 5, "packing.pages": 34, "packing.memory_gb": None,
        "packing.run_ahead": 2,
    },
    "64 tokens may be drafted, one slot": {"draft.vocab_size": 64, "packing.max_num_seqs": 1},
    "a window and e4m3, the long ways": {
        "draft.window": 5, "draft.sink_tokens": 2, "draft.cache_dtype": "fp8", "ablation.dead_positions": False,
        "ablation.uniform_slots": False, "ablation.argmax": False,
    },
    "deterministic": {"decode.deterministic": True},
}


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    """Those that have an MTP layer."""
    return make_model(request.param, folder)


def drafted(out: Path) -> int:
    stats = pl.read_parquet(out / "data")["spec_decode"].drop_nulls().struct
    assert set(stats.field("drafter")) == {"mtp"}
    return int(stats.field("num_draft_tokens").sum())


@pytest.mark.parametrize("way", WAYS)
def test_rows_do_not_depend_on_drafting_or_packing(way: str, model: Model, job: Path, plain: Rows, tmp_path: Path) -> None:
    assert run.main(command(model, job, tmp_path / "out", **MTP | WAYS[way])) == 0
    assert differences(written(model, tmp_path / "out"), plain, bits=False) == []
    assert drafted(tmp_path / "out") > 100


def test_two_ranks_write_what_one_process_does(model: Model, job: Path, plain: Rows, tmp_path: Path) -> None:
    words = command(model, job, tmp_path / "out", cluster__tensor_parallel=2, **MTP)
    code, said = run_apart(words, tmp_path / "log")
    assert code == 0, said
    assert "in float64 on 2 x cpu" in said
    assert differences(written(model, tmp_path / "out"), plain, bits=False) == []


def test_a_killed_job_is_finished_by_the_same_command(model: Model, job: Path, plain: Rows, tmp_path: Path) -> None:
    words = command(model, job, tmp_path / "out", **MTP)
    assert run_apart(words, tmp_path / "log", partial(signalled_after_commits, 2, signal.SIGKILL))[0] == -signal.SIGKILL
    assert run.main(words) == 0
    assert differences(written(model, tmp_path / "out"), plain, bits=False) == []


def test_rows_that_were_cut_off_resume_with_other_drafts(model: Model, job: Path, plain: Rows, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for draft_len, more in ((1, {"decode.max_new_tokens": 9}), (4, {"resume": "length"})):
        keys = {"output.logprobs": None, **MTP, "draft.num_speculative_tokens": draft_len, **more}
        assert run.main(command(model, job, out, **keys)) == 0
    wanted = {key: {**row} for key, row in plain.items()}
    for row in wanted.values():
        del row["logprobs"], row["top_logprobs"]
    assert differences(written(model, out), wanted, bits=False) == []
