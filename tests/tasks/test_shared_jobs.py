"""Jobs of tasks that decode nothing, done by two runs at once or in an object store: each row is written once, with the values of
one run on a disk."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from batchspec import run
from batchspec.data.runstate.claims import Claims
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.engine.features.states import StateValues
from tests.data.s3_lab import running_lab
from tests.helpers.lost_runs import lost, run_and_lose
from tests.helpers.models import make_checkpoint, make_classifier, make_thinking_tokenizer
from tests.helpers.processes import ended
from tests.helpers.runs import start_apart
from tests.job.crews import owners, wait_until

pytestmark = pytest.mark.second
ROWS = 40


def values(frame: pl.DataFrame, column: str) -> dict[str, Any]:
    """Request -> its numbers."""
    cells = {"scores": pl.col("scores").list.get(0).struct.field("score")}.get(column, pl.col(column))
    return dict(frame.select("request_id", cells.alias("value")).iter_rows())


def make_job(task: str, folder: Path, shard_rows: int) -> list[str]:
    """The command of a job without its output folder."""
    sizes: dict[str, Any] = {"max_position_embeddings": 512}
    model = folder / "model"
    if task == "reward":
        make_classifier(model, "qwen3", {0: "good"}, **sizes)
    else:
        make_checkpoint(model, "qwen3", **sizes)
    make_thinking_tokenizer(model, more=("yes", "no"))
    texts = [f"Say word{number} again" for number in range(ROWS)]
    own = {"query": ["a river"] * ROWS, "document": texts} if task == "rerank" else {"prompt": texts}
    pl.DataFrame({"id": [f"q{number}" for number in range(ROWS)], **own}).write_parquet(folder / "in.parquet")
    own_words = [f"task={task}", f"output.shard_rows={shard_rows}", "device=cpu"]
    return [f"model.path={model}", f"input.path={folder}/in.parquet", *own_words]


def claims_wait_for(file: Path) -> None:
    """A patch: a run with a shard takes no other before there is this file, so that another run has some too."""
    take = Claims.take

    def patched(self: Claims, shard: int) -> bool:
        while self.own and not file.exists():
            time.sleep(0.01)
        return take(self, shard)

    Claims.take = patched  # type: ignore[method-assign]


TASKS = [("embed", "embedding"), ("reward", "scores"), ("rerank", "score")]


@pytest.mark.parametrize(("task", "column"), TASKS)
def test_two_runs_share_a_job_and_write_each_row_once(task: str, column: str, tmp_path: Path) -> None:
    words = make_job(task, tmp_path, 4)
    out, go = tmp_path / "out", tmp_path / "go"
    both = [*words, f"output.dir={out}", "packing.max_num_seqs=2"]
    runs = [start_apart(both, tmp_path / f"log{number}", partial(claims_wait_for, go)) for number in range(2)]
    wait_until(lambda: len(owners(out)) == 2, runs[0])  # both have rows
    go.touch()
    assert [ended(one) for one in runs] == [0, 0], [(tmp_path / f"log{number}").read_text() for number in range(2)]

    shared = pl.read_parquet(out / "data/*.parquet")
    assert sorted(shared["request_id"]) == sorted(f"q{number}" for number in range(ROWS))
    assert shared["perf"].struct.field("attempt").n_unique() == 2
    assert set(shared["status"]) == {"ok"}
    assert run.main([*words, f"output.dir={tmp_path}/alone"]) == 0
    alone = values(pl.read_parquet(tmp_path / "alone/data/*.parquet"), column)
    for name, value in values(shared, column).items():
        np.testing.assert_allclose(value, alone[name], atol=1e-5)


@pytest.mark.parametrize(("task", "column"), TASKS)
def test_a_job_in_an_object_store_that_lost_its_run_has_the_values_of_one_on_a_disk(
    task: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal, too, is in the store: the next run computes nothing."""
    words = make_job(task, tmp_path, ROWS)
    assert run.main([*words, f"output.dir={tmp_path}/alone"]) == 0
    with running_lab() as lab:
        for name, value in lab.environ().items():
            monkeypatch.setenv(name, value)
        words = [*words, f"output.dir={lab.root}/out"]
        run_and_lose(words)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StateValues, "read", lost)
            assert run.main(words) == 0
        found = OutputFolder(f"{lab.root}/out").scan().collect()
    alone = values(pl.read_parquet(tmp_path / "alone/data/*.parquet"), column)
    assert len(alone) == ROWS
    for name, value in values(found, column).items():
        np.testing.assert_allclose(value, alone.pop(name), atol=1e-5)
    assert not alone
