"""Promises 3, 4 and 6 under attack: many runs at one shard, one that sleeps past its claim, work that changes hands."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from batchspec.data.runstate.output_folder import OutputFolder
from tests.helpers.processes import ended, until_stopped
from tests.job.kill_lab import SHARDS, Conduct, KillLab, Row, check_visible, polled, written

pytestmark = pytest.mark.second


@pytest.fixture(scope="module")
def lab() -> Iterator[KillLab]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield KillLab(Path(folder))


@pytest.fixture(scope="module")
def expected(lab: KillLab) -> list[Row]:
    out = lab.new()
    assert lab.run(out) == 0
    return written(out)


def race_of_renames(lab: KillLab, count: int) -> None:
    """Each has found the shard's name free and stops before its rename to it; then all of them continue.

    All win, one after the other, in float32: whichever stays, its rows and tokens are those of all, and the end says so.
    """
    out, one = lab.new(), ("input.limit=2", "model.dtype=float32")
    conduct = Conduct(method="rename", claims=False, journal_s=None, hold=("replace", "^replace data/part-"))
    runs = [lab.start(out, *one, conduct=conduct) for _ in range(count)]
    pids = [until_stopped(process) for process in runs]
    assert check_visible(out) == 0
    files = sorted((out / "_batchspec/tmp").glob("part-*"))
    made = [pl.read_parquet(path) for path in files]
    assert len(made) == count
    assert len({frame["perf"].struct.field("attempt")[0] for frame in made}) == count
    with polled(lambda: check_visible(out)):
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert [ended(process, 600) for process in runs] == [0] * count
    for frame in made:
        assert frame.drop("perf").equals(made[0].drop("perf"))
    assert pl.read_parquet(out / "data").drop("perf").equals(made[0].drop("perf"))
    folder = OutputFolder(out)
    assert not folder.missing()
    assert list(folder.damage()) == []
    check = ["sh", "-c", "cat _batchspec/sums/* | sha256sum --check --status"]
    assert subprocess.run(check, cwd=out, check=False).returncode == 0
    assert lab.said.read_text().count(f"{out}: done, 2 rows in 1 shard") == count


def test_runs_that_all_rename_one_shard_into_place_have_the_same_rows(lab: KillLab) -> None:
    race_of_renames(lab, 4)


@pytest.mark.soak
def test_sixty_four_runs_that_all_rename_one_shard_into_place_have_the_same_rows(lab: KillLab) -> None:
    race_of_renames(lab, 64)


@pytest.mark.parametrize("count", [5, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["link", "rename"])
def test_runs_that_all_compute_one_shard_leave_one_part(lab: KillLab, method: str, count: int) -> None:
    """Each of them stops with the finished file in hand; then they publish at once. Claims are out of the way."""
    out = lab.new()
    one = ("input.limit=2",)
    conduct = Conduct(method=method, claims=False, hold=("fsync", "/tmp/part-"))
    runs = [lab.start(out, *one, conduct=conduct) for _ in range(count)]
    pids = [until_stopped(process) for process in runs]
    assert check_visible(out) == 0
    with polled(lambda: check_visible(out)):
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert [ended(process) for process in runs] == [0] * count
    assert [path.name for path in (out / "data").iterdir()] == ["part-00000.parquet"]
    assert not [path for path in (out / "_batchspec/tmp").iterdir() if path.name.startswith("part")]
    assert [name for name, *_ in written(out)] == ["q0", "q1"]


def test_a_run_that_sleeps_past_its_claims_loses_them_and_does_no_harm_when_it_wakes(lab: KillLab, expected: list[Row]) -> None:
    """It stops in the middle of its second commit, the file finished; another run waits out its claims and does its work."""
    out = lab.new()
    slow = lab.start(out, conduct=Conduct(stale_s=1.5, hold=("link", r"data/part-N")))
    pid = until_stopped(slow)
    began = time.monotonic()
    assert lab.run(out, conduct=Conduct(stale_s=1.5)) == 0
    assert time.monotonic() - began > 1.5  # it had to wait: the sleeper's process was there all the time
    assert re.search(r"shards? left, claimed by other runs: waiting up to \d+ s to learn", lab.said.read_text())
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    parts = {path for path in before if path.parent.name == "data"}
    assert len(parts) == SHARDS
    os.kill(pid, signal.SIGCONT)
    assert ended(slow) == 0
    assert {path: path.read_bytes() for path in parts} == {path: before[path] for path in parts}
    assert check_visible(out) == SHARDS
    assert written(out) == expected
    work = {name: out / "_batchspec" / name for name in ("claims", "journal", "attempts")}
    assert not any(folder.exists() for folder in work.values())
    for folder in work.values():  # as a run leaves them that dies after others have completed the job
        folder.mkdir()
        (folder / "00001.json").write_text("{}")
    assert lab.run(out) == 0
    assert not any(folder.exists() for folder in work.values())


def test_a_run_that_sleeps_while_others_complete_the_job_computes_none_of_their_shards(lab: KillLab) -> None:
    """Their claims are deleted by then: every shard looks free."""
    out, log = lab.new(), lab.folder / "calls"
    slow = lab.start(out, conduct=Conduct(stale_s=1.5, hold=("link", r"data/part-N"), log=log, journal_s=None))
    pid = until_stopped(slow)
    assert lab.run(out, conduct=Conduct(stale_s=1.5)) == 0
    seen = len(log.read_text())
    os.kill(pid, signal.SIGCONT)
    assert ended(slow) == 0
    claimed = [line for line in log.read_text()[seen:].splitlines() if line == "link _batchspec/claims/N.json"]
    assert len(claimed) < SHARDS - 1, "those that it had taken, and no more"


def test_tokens_are_those_of_one_run_whatever_the_number_of_runs_and_whoever_dies(lab: KillLab, expected: list[Row]) -> None:
    """Four side by side; then three that are killed one by one, two others that take up what those left, and one at the end."""
    four = lab.new()
    assert [ended(process) for process in [lab.start(four) for _ in range(4)]] == [0] * 4
    assert check_visible(four) == SHARDS
    assert written(four) == expected

    changing, draw = lab.new(), random.Random(1)
    with polled(lambda: check_visible(changing)):
        for count in (3, 2):
            runs = [lab.start(changing) for _ in range(count)]
            for process in runs:
                process.join(draw.uniform(0.2, 0.6))
                process.kill()
                assert ended(process) in (0, -signal.SIGKILL)
        assert lab.run(changing) == 0
    assert written(changing) == expected


@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_finished_job_is_not_touched_by_more_runs(lab: KillLab, count: int) -> None:
    out = lab.new()
    assert lab.run(out) == 0
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*") if path.is_file()}
    assert [ended(process) for process in [lab.start(out) for _ in range(count)]] == [0] * count
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*") if path.is_file()}
    assert after == before
