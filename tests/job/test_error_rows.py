"""Shards of error rows alone are committed while the run reads on, whatever else is or is not decoded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from batchspec import run
from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.engine.loop.engine_run import EngineRun
from batchspec.engine.slots import waiting
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RunFeatures
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.runner import commit_shards
from batchspec.job.supervise.deadline import Deadline
from batchspec.packing import ordered_requests
from batchspec.packing.admit import Admission
from batchspec.packing.ordered_requests import WINDOW_SHARDS
from batchspec.records import Completion, Request
from tests.helpers.runs import make_model, make_prompts, put, run_apart

pytestmark = pytest.mark.second

SHARD_ROWS = 3
BLOCKS = ((16, False), (2, True), (16, False), (1, True), (16, False))
"""Shards, and whether their rows are good."""
SHARDS = sum(count for count, _ in BLOCKS)
GOOD = [good for count, good in BLOCKS for _ in range(count)]
MOST_OPEN = 2 * WINDOW_SHARDS + commit_shards.WAITING
"""Shards of error rows that may be read and not committed: those of the last window, which a good row makes the run read at once,
and those that wait for a commit."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"id": f"q{shard}-{i}", "prompt": f"Say word{i} again" if good else None}
        for shard, good in enumerate(GOOD)
        for i in range(SHARD_ROWS)
    ]
    pl.DataFrame(rows).write_parquet(path := tmp_path_factory.mktemp("data") / "prompts.parquet")
    return path


def command_of(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", f"input.path={data}", f"output.dir={out}", f"output.shard_rows={SHARD_ROWS}",
        "packing.max_num_seqs=2", "input.max_error_fraction=1", *more,
    ]


DECODES = ["draft=none", "decode.max_new_tokens=4"]
TASKS = {
    "generate": DECODES, "prompts": ["decode.score=prompts"], "embed": ["task=embed"],
    "choices": ["decode.score=choices", "decode.choice=[a,b c]"], "each row once": [*DECODES, "output.dedup=true"],
}


@pytest.mark.parametrize("task", TASKS)
def test_shards_of_error_rows_are_committed_as_they_are_read(
    task: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the task: a commit waits neither for a good row nor for the end; the deadline and claims are looked after."""
    admit, publish, update, check = Admission.admit, OutputFolder.publish, ProgressBar.update, Deadline.check
    read, most_open, reported, looks = list[int](), list[int](), list[int](), list[int]()

    def admitted(self: Admission, shard: InputShard) -> Iterator[Request | Completion]:
        read.append(shard.index)
        return admit(self, shard)

    def published(self: OutputFolder, index: int, *rest: Any) -> bool:
        most_open.append(0 if GOOD[index] else read[-1] - index)
        return publish(self, index, *rest)

    def updated(self: ProgressBar, **what: Any) -> None:
        update(self, **what)
        reported.append(self.facts()["shards"])

    def checked(self: Deadline) -> None:
        looks.append(read[-1])
        check(self)

    monkeypatch.setattr(Admission, "admit", admitted)
    monkeypatch.setattr(OutputFolder, "publish", published)
    monkeypatch.setattr(ProgressBar, "update", updated)
    monkeypatch.setattr(Deadline, "check", checked)
    monkeypatch.setattr(commit_shards, "MOST_WAITING", commit_shards.WAITING)
    assert run.main(command_of(model, data, tmp_path / "out", *TASKS[task])) == 0
    assert len(most_open) == SHARDS
    assert max(most_open) <= MOST_OPEN, "shards of error rows wait for a good row"
    assert set(reported) >= set(range(SHARDS - MOST_OPEN)), "the heartbeat has each commit"
    early = [one for one in looks if one < 16]
    assert all(b - a <= 2 for a, b in pairwise([-1, *early, 16])), "the deadline and claims wait for two shards"
    frame = pl.read_parquet(tmp_path / "out/data").sort("row_index")
    assert (frame["status"] != "error").to_list() == [good for good in GOOD for _ in range(SHARD_ROWS)]


def test_the_deadline_and_claims_are_looked_after_while_rows_end_as_they_arrive(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then no step has a result."""
    arrive, check, step, looks, steps = RunFeatures.arrive, Deadline.check, EngineRun.step, list[int](), list[int]()

    def arrived(self: RunFeatures, one: Request, draft_len: int) -> RequestState:
        state = arrive(self, one, draft_len)
        if one.row_index < 24:
            state.fail(None)
        return state

    def checked(self: Deadline) -> None:
        looks.append(len(steps))
        check(self)

    def stepped(self: EngineRun, **given: Any) -> list[Completion]:
        steps.append(0)
        done = step(self, **given)
        steps[-1] = len(done)
        return done

    monkeypatch.setattr(RunFeatures, "arrive", arrived)
    monkeypatch.setattr(Deadline, "check", checked)
    monkeypatch.setattr(EngineRun, "step", stepped)
    monkeypatch.setattr(waiting, "MOST_LEFT_OUT", 4)
    monkeypatch.setattr(ordered_requests, "WINDOW_SHARDS", 1)
    command = command_of(model, make_prompts(tmp_path / "in.parquet", 30), tmp_path / "out", *DECODES)
    assert run.main(command) == 0
    assert sum(steps[:4]) == 24, "the first steps end rows that have arrived"
    assert set(looks) == {*range(1, len(steps) + 1)}


def killed_when_read(at: int) -> None:
    """A patch: the process gets SIGKILL when it reads this shard, after the survey of the input."""
    admit, publish, any_published = Admission.admit, OutputFolder.publish, False
    put(commit_shards, "MOST_WAITING", commit_shards.WAITING)

    def published(self: OutputFolder, *rest: Any) -> bool:
        nonlocal any_published
        any_published = True
        return publish(self, *rest)

    def admitted(self: Admission, shard: InputShard) -> Iterator[Request | Completion]:
        if shard.index == at and any_published:
            os.kill(os.getpid(), signal.SIGKILL)
        return admit(self, shard)

    Admission.admit = admitted  # type: ignore[method-assign]
    OutputFolder.publish = published  # type: ignore[method-assign,assignment]


@pytest.fixture(scope="module")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert run.main(command_of(model, data, out, *DECODES)) == 0
    return rows_of(out)


def rows_of(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "data").sort("row_index").select("request_id", "row_index", "status", "completion")


@pytest.mark.parametrize("at", [12, 30, 48])
def test_a_run_killed_while_it_reads_error_rows_leaves_their_shards_to_the_next(
    at: int, model: Path, data: Path, finished: pl.DataFrame, tmp_path: Path
) -> None:
    """Before the first good row, between good rows, and after the last one."""
    out, log = tmp_path / "out", tmp_path / "log"
    command = command_of(model, data, out, *DECODES)
    assert run_apart(command, log, partial(killed_when_read, at))[0] == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in (out / "data").iterdir()}
    assert at - MOST_OPEN <= len(before) <= at
    assert run.main(command) == 0
    after = {path.name: path.stat().st_mtime_ns for path in (out / "data").iterdir()}
    assert {name: after[name] for name in before} == before
    assert rows_of(out).equals(finished)
