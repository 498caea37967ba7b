"""Arrays on a real Slurm (slurm_lab.py): tasks share a job without an index, requeue themselves, and every row comes out once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
import torch

from batchspec import run, slurm
from batchspec.slurm import Task, parse_time, requeue, this_task
from tests.models import make_checkpoint, make_tokenizer
from tests.slurm_lab import Lab, lacking, running_slurm, wait_for

ROOT = Path(__file__).parents[1]
on_slurm = pytest.mark.skipif(bool(lacking()), reason=f"no Slurm for tests: {lacking()}")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running_slurm(nodes=2, cpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64))


def job_of(model: Path, folder: Path, rows: int, *more: str) -> list[str]:
    """Overrides of a job of `rows` rows of 60 tokens, all but output.dir."""
    data = folder / "in.parquet"
    pl.DataFrame({"id": [f"q{i}" for i in range(rows)], "prompt": [f"{i} and {i * i}" for i in range(rows)]}).write_parquet(data)
    return [
        f"model.path={model}", f"input.path={data}", "decode.max_new_tokens=60", "decode.ignore_eos=true", "draft=none",
        "output.token_ids=true", "output.shard_rows=4", *more,
    ]  # fmt: skip


def tokens(out: Path) -> list[tuple[str, list[int]]]:
    """Every row as often as it is there."""
    return sorted(pl.read_parquet(out / "data").select("request_id", "token_ids").rows())


def submit(lab: Lab, cwd: Path, *overrides: str) -> str:
    """The number of the job that `batchspec submit --go` made; its tasks say what they say in cwd/task-N.log."""
    command = [sys.executable, "-m", "batchspec.cli", "submit", *overrides, "cluster.gpus=0", "cluster.log=task-%a.log", "--go"]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLURM_CONF": lab.env["SLURM_CONF"]}
    said = lab.run(*command, env=env, cwd=cwd)
    found = re.search(r"^job (\d+) with \d+ tasks", said, re.MULTILINE)
    assert found, said
    return found[1]


def claims_of(out: Path, task: str) -> int:
    """Shards that a task (`_1` of an array) works on."""
    found = 0
    for path in (out / "_batchspec/claims").glob("*.json"):
        try:
            found += str(json.loads(path.read_text()).get("task", "")).split("/")[1:2] == [task]
        except (OSError, ValueError):
            continue
    return found


@on_slurm
def test_an_array_loses_no_row_to_requeueing_cancelling_and_running_out_of_restarts(
    lab: Lab, model: Path, tmp_path: Path
) -> None:
    """Three tasks. The last one, whose SLURM_JOB_ID is the array's, gets the signal twice and may requeue itself once; another
    is cancelled for good; the third is left alone and must not notice."""
    overrides = job_of(model, tmp_path, 160)
    out, slow = tmp_path / "out", "packing.slots=2"
    cluster = ["cluster.tasks=3", "cluster.max_restarts=1", "cluster.time_h=0.2"]
    job = submit(lab, tmp_path, *overrides, slow, f"output.dir={out}", *cluster)
    log = tmp_path / "task-2.log"
    wait_for(lambda: claims_of(out, "2") and claims_of(out, "1"), 60, "claims of tasks 1 and 2")
    left = slurm_says(lab, Task(f"{job}_2", 0, 1, None))
    assert left is not None
    assert 600 < left <= 720

    lab.run("scancel", f"{job}_1")
    node = lab.job(f"{job}_2")["NodeList"]
    began = time.monotonic()
    lab.run("scancel", "-b", "-s", "USR1", f"{job}_2")
    wait_for(lambda: lab.state(f"{job}_2") == "PENDING", 60, "the requeue")
    seconds = time.monotonic() - began
    assert f"batchspec: job {job}_2 is requeued, restart 1 of 1" in log.read_text()
    assert (lab.state(f"{job}_0"), lab.restarts(f"{job}_0")) == ("RUNNING", 0)

    lab.release(f"{job}_2", node)
    said = len(log.read_text())
    wait_for(lambda: "slots," in log.read_text()[said:], 60, "the second start of task 2")
    lab.run("scancel", "-b", "-s", "USR1", f"{job}_2")
    wait_for(lambda: lab.state(f"{job}_2") not in ("RUNNING", "COMPLETING"), 60, "the end of task 2")
    facts = lab.job(f"{job}_2")
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "75:0", "1")
    assert "is out of restarts: 1 of cluster.max_restarts=1 are used; everything is saved" in log.read_text()
    assert lab.state(f"{job}_1") == "CANCELLED"
    assert "was cancelled and is not requeued" in (tmp_path / "task-1.log").read_text()

    wait_for(lambda: lab.state(f"{job}_0") == "COMPLETED", 120, "the end of task 0")
    assert lab.restarts(f"{job}_0") == 0
    assert run.main([*overrides, f"output.dir={tmp_path / 'undisturbed'}"]) == 0
    assert tokens(out) == tokens(tmp_path / "undisturbed")
    print(f"from the signal to the queue {seconds:.1f} s")


def slurm_says(lab: Lab, task: Task) -> float | None:
    """`time_left_s` as a task on this cluster would have it."""
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = lab.env["SLURM_CONF"]
    try:
        return slurm.time_left_s(task)
    finally:
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


@on_slurm
def test_a_sweep_through_submitit_runs_its_jobs_as_an_array(lab: Lab, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    command = [sys.executable, "-m", "batchspec.run", "-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=5"]
    sweep = ["draft=none,lookup", f"output.dir={tmp_path}/${{draft.name}}"]
    overrides = [item for item in job_of(model, tmp_path, 8) if not item.startswith("draft=")]
    env = {**lab.env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *overrides, *sweep], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tokens(tmp_path / "none") == tokens(tmp_path / "lookup")
    assert len(tokens(tmp_path / "none")) == 8
    assert (tmp_path / ".submitit").is_dir()  # where the nodes see it


BATCH = {"SLURM_JOB_ID": "12", "ENVIRONMENT": "BATCH"}


@pytest.mark.parametrize(
    ("env", "task"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, None),  # an interactive allocation
        (BATCH, Task("12", 0, 1, None)),
        ({**BATCH, "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "0"}, Task("9_0", 0, 1, None)),
        (
            {**BATCH, "SLURM_RESTART_COUNT": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_END_TIME": "17"},
            Task("12", 3, 4, 17.0),
        ),
    ],
)
def test_a_task_knows_itself_by_its_environment(env: dict[str, str], task: Task | None) -> None:
    assert this_task(env) == task


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:58", 58), ("10:00", 600), ("1:02:03", 3723), ("2-01:00:00", 176400), ("UNLIMITED", None), ("INVALID", None), ("", None)],
)
def test_times_are_read_as_slurm_writes_them(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("shown", "restarts", "said"),
    [
        ("JobState=RUNNING Reason=None Restarts=1", 1, "job 9_0 is requeued, restart 2 of 3"),
        ("JobState=COMPLETING Reason=TimeLimit Restarts=0", 0, "job 9_0 is requeued, restart 1 of 3"),
        ("JobState=COMPLETING Reason=None Restarts=1", 0, "job 9_0 is requeued by Slurm"),
        ("JobState=COMPLETING Reason=None Restarts=0", 0, "was cancelled and is not requeued"),
        ("JobState=RUNNING Reason=None Restarts=3", 3, "out of restarts: 3 of cluster.max_restarts=3 are used"),
        ("", 0, "job 9_0 is not requeued: scontrol says nothing of it (slurm_load_jobs error: Invalid job id)"),
    ],
)
def test_only_a_task_that_may_come_back_is_requeued(
    monkeypatch: pytest.MonkeyPatch, shown: str, restarts: int, said: str
) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(*command: str) -> tuple[int, str]:
        asked.append(command)
        return (0, shown) if shown else (1, "slurm_load_jobs error: Invalid job id")

    monkeypatch.setattr(slurm, "_ask", ask)
    assert said in requeue(Task("9_0", restarts, 1, None), 3)
    assert (("scontrol", "requeue", "9_0") in asked) == (", restart " in said)


def test_one_of_several_tasks_of_an_srun_does_not_end_the_others() -> None:
    assert "the batch script has to run `scontrol requeue 9_0`" in requeue(Task("9_0", 0, 4, None), 3)


def test_where_slurm_does_not_answer_its_own_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_ask", lambda *command: (1, "timed out"))
    left = slurm.time_left_s(Task("9", 0, 1, time.time() + 100))
    assert left is not None
    assert 98 < left <= 100
    assert slurm.time_left_s(Task("9", 0, 1, None)) is None
    monkeypatch.setattr(slurm, "_ask", lambda *command: (0, "UNLIMITED"))
    assert slurm.time_left_s(Task("9", 0, 1, time.time() + 100)) is None


def test_submit_prints_one_line_that_a_shell_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    from batchspec.commands import submit as command

    given = ["model.path=m", "input.path=data/*.parquet", "output.dir=o"]
    keys = ["cluster.tasks=8", "cluster.gpus=2", "cluster.time_h=1.5", "cluster.memory_gb=64", 'cluster.sbatch=["--qos=low"]']
    assert command.main([*given, *keys]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("sbatch --array=0-7 --output=batchspec-%A_%a.log --signal=B:USR1@120 --time=1:30:00 --gpus-per-node=2")
    assert " --mem=61035M " in line
    assert line.endswith(
        "submit.sbatch model.path=m 'input.path=data/*.parquet' output.dir=o cluster.tasks=8 cluster.gpus=2 "
        "cluster.time_h=1.5 cluster.memory_gb=64 'cluster.sbatch=[\"--qos=low\"]'"
    )
    assert Path(re.findall(r"\S+submit\.sbatch", line)[0]).is_file()


def test_submit_refuses_what_run_would_refuse_and_says_where_there_is_no_slurm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from batchspec.commands import submit as command

    assert command.main(["model.path=m", "output.dir=o", "--go"]) == 2
    assert "input.path is required" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["model.path=m", "input.path=i", "output.dir=o", "--go"]) == 2
    assert "there is no sbatch on this machine" in capsys.readouterr().err
