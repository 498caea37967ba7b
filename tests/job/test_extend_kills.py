"""A job that grows while its runs are killed at every step that a reader could see, while two commands begin the extension at
once, and while a run of the old command still works."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.job.report.status import StatusReader
from tests.data.s3_lab import BUCKET, running_lab
from tests.helpers.processes import ended, until_stopped
from tests.job.kill_lab import (
    CALLS,
    Conduct,
    KillLab,
    Row,
    Step,
    death_in,
    killed_at_every_step,
    rows_of,
    written,
)
from tests.job.test_s3_kills import killer

pytestmark = pytest.mark.second

TRIAL, GROWN = "input.limit=5", "resume=extend"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> KillLab:
    return KillLab(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def expected(lab: KillLab) -> list[Row]:
    """The rows of the whole job at once."""
    out = lab.new()
    assert lab.run(out) == 0
    return written(out)


@pytest.fixture(scope="module")
def trial(lab: KillLab) -> Path:
    """The job with the first five rows, complete."""
    out = lab.new()
    assert lab.run(out, TRIAL) == 0
    return out


@pytest.fixture(scope="module")
def calls(lab: KillLab, trial: Path, expected: list[Row]) -> list[str]:
    """What an undisturbed extension does."""
    out, log = grown_from(lab, trial), lab.folder / "calls.txt"
    assert lab.run(out, GROWN, conduct=Conduct(log=log)) == 0
    assert written(out) == expected
    return log.read_text().splitlines()


def grown_from(lab: KillLab, trial: Path) -> Path:
    out = lab.new()
    shutil.copytree(trial, out)
    return out


def held(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.glob("data/*")}


def killed_and_resumed(lab: KillLab, trial: Path, expected: list[Row], step: Step) -> str | None:
    """What the run that was killed was about to do; None: it came to its end before that."""
    out, log = grown_from(lab, trial), lab.folder / "killed.txt"
    log.unlink(missing_ok=True)
    code = lab.run(out, GROWN, conduct=Conduct(kill_at=step, log=log))
    assert code in (0, -signal.SIGKILL)
    before = held(out)
    begun = OutputFolder(out).manifest.num_rows > 5
    assert lab.run(out, *([] if begun else [GROWN])) == 0, "it has begun, as a whole, or it has not"
    assert {path: path.read_bytes() for path in before} == before
    assert written(out) == expected
    assert not [path for path in (out / "_batchspec").iterdir() if path.name in ("claims", "journal")]
    shutil.rmtree(out)
    return death_in(log) if code else None


def test_an_extension_that_was_killed_and_finished_is_complete_and_the_old_command_is_refused(
    lab: KillLab, trial: Path, calls: list[str], expected: list[Row]
) -> None:
    out = grown_from(lab, trial)
    assert lab.run(out, GROWN, conduct=Conduct(kill_at=("link data/part-N.parquet", 1))) == -signal.SIGKILL
    for words, code in (((), 0), ((GROWN,), 0), ((TRIAL,), 2)):
        assert lab.run(out, *words) == code
        assert written(out) == expected


def test_a_kill_at_every_kind_of_step_leaves_no_extension_or_a_whole_one(
    lab: KillLab, trial: Path, calls: list[str], expected: list[Row]
) -> None:
    kinds = Counter(call for call in calls if call.split()[0] in ("link", "replace") and "progress" not in call)
    # How often the journal is written depends on how fast rows end, so another run may write it fewer times.
    steps = [(kind, 1 if "journal" in kind else 1 + turn % count) for turn, (kind, count) in enumerate(kinds.items())]
    assert [killed_and_resumed(lab, trial, expected, step) for step in steps] == list(kinds)
    assert {"link _batchspec/retry/N.json", "link data/part-N.parquet", "link _batchspec/retry/N/card"} <= set(kinds)


@pytest.mark.soak
def test_a_kill_at_every_step_leaves_no_extension_or_a_whole_one(
    lab: KillLab, trial: Path, calls: list[str], expected: list[Row]
) -> None:
    met = killed_at_every_step(calls, partial(killed_and_resumed, lab, trial, expected))
    assert met["link data/part-N.parquet"] == met["fsync data"] > 3
    assert met.total() > len(CALLS) * met["fsync data"]


def test_the_rows_that_a_killed_trial_had_done_are_not_done_again(lab: KillLab, expected: list[Row]) -> None:
    out = lab.new()
    assert lab.run(out, TRIAL, conduct=Conduct(kill_at=("link data/part-N.parquet", 2))) == -signal.SIGKILL
    before = held(out)
    assert len(before) == 1
    assert lab.run(out, GROWN) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert written(out) == expected


@pytest.mark.parametrize("method", ["link", "rename"])
def test_two_runs_that_begin_the_extension_at_once_share_its_shards(lab: KillLab, expected: list[Row], method: str) -> None:
    trial = lab.new()
    assert lab.run(trial, TRIAL, conduct=Conduct(method=method)) == 0
    assert OutputFolder(trial).manifest.publish == method
    for more in ([GROWN], [GROWN, "input.limit=9"]):
        out = grown_from(lab, trial)
        runs = [lab.start(out, *command, conduct=Conduct(method=method, wait=True)) for command in ([GROWN], more)]
        for pid in [until_stopped(process) for process in runs]:
            os.kill(pid, signal.SIGCONT)
        codes = [ended(process) for process in runs]
        if len(more) == 1:
            assert codes == [0, 0], lab.said.read_text()[-2000:]
        else:
            assert 0 in codes, "one of two different extensions takes place, or they follow each other"
            assert set(codes) <= {0, 2}, lab.said.read_text()[-2000:]
            assert lab.run(out, GROWN) == 0
        assert written(out) == expected


STOPPED = Conduct(hold=("link", "data/part"))
"""The run stops when its first shard is about to get its name."""


def test_a_run_of_the_old_command_ends_its_rows_while_others_extend_the_job(lab: KillLab, expected: list[Row]) -> None:
    out = lab.new()
    old = lab.start(out, TRIAL, conduct=STOPPED)
    until_stopped(old)
    new = lab.start(out, GROWN, conduct=STOPPED)
    until_stopped(new)
    assert OutputFolder(out).manifest.num_rows == 12
    assert old.pid is not None
    os.kill(old.pid, signal.SIGCONT)
    assert ended(old) == 0, lab.said.read_text()[-2000:]
    assert "this run's rows are done; another command added rows since" in lab.said.read_text()
    before = held(out)
    assert len(before) == 3
    assert not (out / "README.md").exists()
    assert new.pid is not None
    os.kill(new.pid, signal.SIGCONT)
    assert ended(new) == 0, lab.said.read_text()[-2000:]
    assert {path: path.read_bytes() for path in before} == before
    assert written(out) == expected
    assert (out / "README.md").exists()


def test_a_kill_at_every_kind_of_put_on_s3_leaves_no_extension_or_a_whole_one(lab: KillLab, expected: list[Row]) -> None:
    out = f"s3://{BUCKET}/out"
    with running_lab() as server:

        def conduct(**changes: bool) -> Conduct:
            return Conduct(environ=server.environ(), **changes)  # type: ignore[arg-type]

        assert lab.run(out, TRIAL, conduct=conduct()) == 0
        trial = {key: server.held(key) for key in server.names()}
        for kind, sides in (
            ("_batchspec/retry/N.json", ("before", "after")), ("data/part-N.parquet", ("after",)),
            ("_batchspec/retry/N/card", ("before",)),
        ):
            for side in sides:
                server.empty()
                for key, body in trial.items():
                    server.put(key, body)
                process, met = lab.start(out, GROWN, conduct=conduct(wait=True)), list[str]()
                pid = until_stopped(process)
                setattr(server.faults, side, killer(process, (kind, 1), met))
                os.kill(pid, signal.SIGCONT)
                assert ended(process) == -signal.SIGKILL, (kind, side)
                setattr(server.faults, side, lambda environ: None)
                assert met == [kind]
                before = {key: server.held(key) for key in server.names() if key.startswith("out/data/")}
                assert lab.run(out, GROWN, conduct=conduct()) == 0
                assert {key: server.held(key) for key in before} == before
                keys = [key for key in server.names() if key.startswith("out/data/")]
                assert rows_of(pl.concat(pl.read_parquet(server.held(key)) for key in keys)) == expected


def test_the_run_that_ends_last_writes_the_card_even_if_it_is_of_the_old_command(lab: KillLab, expected: list[Row]) -> None:
    out = lab.new()
    old = lab.start(out, TRIAL, conduct=STOPPED)
    pid = until_stopped(old)
    reader = StatusReader(OutputFolder(out))
    assert (reader.read().rows, reader.read().rows_total) == (0, 5)
    assert lab.run(out, GROWN, conduct=Conduct(stale_s=0.5, claims=False)) == 0
    assert "done, 12 rows in 7 shards" in lab.said.read_text()
    assert (reader.read().rows, reader.read().rows_total) == (12, 12)
    (out / "README.md").unlink()
    os.kill(pid, signal.SIGCONT)
    assert ended(old) == 0, lab.said.read_text()[-2000:]
    assert "| Input rows | 12 |" in (out / "README.md").read_text()
    assert written(out) == expected
