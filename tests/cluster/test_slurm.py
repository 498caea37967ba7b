"""Arrays on a real Slurm (slurm_lab.py): tasks share a job without an index, requeue themselves, and every row comes out once."""

from __future__ import annotations

import json
import math
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

from batchspec import run
from batchspec.job.supervise import slurm
from batchspec.job.supervise.slurm import Task, parse_time, requeue, this_task
from tests.cluster.slurm_lab import Lab, lacking, running_slurm, wait_for
from tests.helpers.forked import run_python
from tests.helpers.models import make_checkpoint, make_tokenizer

ROOT = Path(__file__).parents[2]
PATIENT_S = 300
"""Until a test gives up what should happen, on a busy machine too."""
STARTED = " rows at a time, up to "
"""What a run says when its engine is made."""
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
    ]


def tokens(out: Path) -> list[tuple[str, list[int]]]:
    """Every row as often as it is there."""
    return sorted(pl.read_parquet(out / "data").select("request_id", "token_ids").rows())


def submit(lab: Lab, cwd: Path, *overrides: str) -> str:
    """The number of the job that `batchspec submit --go` made; its tasks say what they say in cwd/task-N.log."""
    common = ["cluster.gpus=0", "cluster.log=task-%a.log"]
    command = [sys.executable, "-m", "batchspec.cli", "submit", *common, *overrides, "--go"]
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


@pytest.mark.second
@on_slurm
def test_an_array_loses_no_row_to_requeueing_cancelling_and_running_out_of_restarts(
    lab: Lab, model: Path, tmp_path: Path
) -> None:
    """Three tasks. The last one, whose SLURM_JOB_ID is the array's, gets the signal twice and may requeue itself once; another
    is cancelled for good; the third is left alone and must not notice. The requeue and the second start take 5 s, in which the
    third decodes 100 rows."""
    overrides = job_of(model, tmp_path, 480)
    out, slow = tmp_path / "out", "packing.max_num_seqs=2"
    cluster = ["cluster.tasks=3", "cluster.max_restarts=1", "cluster.time_h=0.2"]
    job = submit(lab, tmp_path, *overrides, slow, f"output.dir={out}", *cluster)
    log = tmp_path / "task-2.log"
    wait_for(lambda: claims_of(out, "2") and claims_of(out, "1"), PATIENT_S, "claims of tasks 1 and 2")
    left = slurm_says(lab, Task(f"{job}_2", 0, 1, None))
    assert left is not None
    assert 600 < left <= 720

    lab.run("scancel", f"{job}_1")
    node = lab.job(f"{job}_2")["NodeList"]
    lab.run("scancel", "-b", "-s", "USR1", f"{job}_2")
    wait_for(lambda: lab.state(f"{job}_2") == "PENDING", PATIENT_S, "the requeue, in half of cluster.signal_s")
    told = log.read_text()  # Slurm may end the task before that has said so
    assert f"batchspec: job {job}_2 is requeued, restart 1 of 1" in told or "DUE TO JOB REQUEUE" in told
    assert (lab.state(f"{job}_0"), lab.restarts(f"{job}_0")) == ("RUNNING", 0)

    lab.release(f"{job}_2", node)
    said = len(log.read_text())
    wait_for(lambda: STARTED in log.read_text()[said:], PATIENT_S, "the second start of task 2")
    lab.run("scancel", "-b", "-s", "USR1", f"{job}_2")
    wait_for(lambda: lab.state(f"{job}_2") not in ("RUNNING", "COMPLETING"), PATIENT_S, "the end of task 2")
    facts = lab.job(f"{job}_2")
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "75:0", "1")
    assert "is out of restarts: 1 of cluster.max_restarts=1 are used; everything is saved" in log.read_text()
    assert lab.state(f"{job}_1") == "CANCELLED"
    assert "was cancelled and is not requeued" in (tmp_path / "task-1.log").read_text()

    wait_for(lambda: lab.state(f"{job}_0") == "COMPLETED", PATIENT_S, "the end of task 0")
    assert lab.restarts(f"{job}_0") == 0
    assert run.main([*overrides, f"output.dir={tmp_path / 'undisturbed'}"]) == 0
    assert tokens(out) == tokens(tmp_path / "undisturbed")


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


@pytest.mark.second
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


ENDED = re.compile(r"batchspec: (SIG\w+): ended (\d+\.\d) s later")
GRACE_S = 10


@on_slurm
@pytest.mark.soak
def test_four_nodes_lose_no_row_to_preemption_time_limit_dead_nodes_and_another_array_size(model: Path, tmp_path: Path) -> None:
    """2,400 rows. Four tasks of a minute each; one is preempted, a node loses power, another one only its slurmd: its task runs
    twice at the same time. Then the array is cancelled, and an array of two does the rest."""
    overrides = job_of(model, tmp_path, 2400)
    out, began = tmp_path / "out", time.monotonic()
    with running_slurm(nodes=4, cpus=2) as lab:
        words = '["--partition=grace","--cpus-per-task=2"]'
        common = [*overrides, f"output.dir={out}", f"cluster.signal_s={GRACE_S}", f"cluster.sbatch={words}"]
        first = submit(lab, tmp_path, *common, "packing.max_num_seqs=2", "cluster.tasks=4", "cluster.time_h=0.0167")
        tasks = [f"{first}_{i}" for i in range(4)]
        wait_for(lambda: all(claims_of(out, str(i)) for i in range(4)), 120, "claims of all tasks")
        node = {task: lab.job(task)["NodeList"] for task in tasks}
        assert len(set(node.values())) == 4

        wants = ["-p", "urgent", "-w", node[tasks[0]], "-c", "2", "-t", "1", "-o", "/dev/null", "--wrap", "sleep 1"]
        urgent = lab.run("sbatch", "--parsable", *wants)
        lab.kill_node(node[tasks[1]])
        lab.kill_daemon(node[tasks[2]])  # its task lives on, out of Slurm's sight
        wait_for(lambda: all(lab.restarts(task) >= 1 for task in tasks), 180, "a restart of every task")
        lab.start_node(node[tasks[1]])
        log = tmp_path / "task-2.log"
        wait_for(lambda: log.read_text().count(STARTED) >= 2, 180, "the second life of the task that still has its first")
        restarts = {task: lab.restarts(task) for task in tasks}
        assert lab.state(urgent) == "COMPLETED"

        lab.run("scancel", first)
        second = submit(lab, tmp_path, *common, "cluster.tasks=2", "cluster.log=second-%a.log", "cluster.time_h=1")
        wait_for(lambda: all(lab.state(f"{second}_{i}") == "COMPLETED" for i in range(2)), 900, "the end of the job")
        seconds = time.monotonic() - began
        controller = (lab.folder / "log/slurmctld.log").read_text()
    assert len(re.findall(r"requeue job JobId=\S+ due to failure of node", controller)) == 2
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    ended = [(name, float(after)) for name, after in ENDED.findall(logs)]
    by_themselves = logs.count("is requeued, restart")
    print(f"{seconds:.0f} s; restarts {restarts}, {by_themselves} by themselves; from signal to exit {ended}")
    assert by_themselves >= 2  # the one that was preempted and the one whose time was up
    assert all(after < GRACE_S for name, after in ended if name == "SIGUSR1")
    assert run.main([*overrides, f"output.dir={tmp_path / 'undisturbed'}"]) == 0
    assert len(tokens(out)) == 2400
    assert tokens(out) == tokens(tmp_path / "undisturbed")


@pytest.mark.second
def test_a_task_whose_time_runs_out_untold_ends_by_itself_saves_and_requeues(model: Path, tmp_path: Path) -> None:
    """Without a signal, and with stand-ins for Slurm's clients: a real time limit is a minute at least.

    The limit is extended until a shard is committed, as the time until then depends on the machine. So does whether it ends
    right after a shard, when no row of another one has a token yet.
    """
    for name, says in (
        ("squeue", f"ls {tmp_path}/out/data/*.parquet >/dev/null 2>&1 && echo INVALID || echo 0:09"),
        ("scontrol", f"echo $* >> {tmp_path}/asked; echo JobState=RUNNING Reason=None Restarts=0"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "ENVIRONMENT": "BATCH"}
    words = [*job_of(model, tmp_path, 4000), "packing.max_num_seqs=2", f"output.dir={tmp_path / 'out'}", "cluster.signal_s=2"]
    done = run_python(["-m", "batchspec.run", *words], env=env)
    assert done.returncode == 75, done.stderr
    said = r"time limit: [1-9]\d* of 1000 shards are committed, of the other shards (no|[1-9]\d*) completions? (is|are) saved"
    assert re.search(said, done.stderr)
    assert done.stderr.splitlines()[-1] == "batchspec: job 7 is requeued, restart 1 of 10"
    assert (tmp_path / "asked").read_text() == "show job -o 7\nrequeue 7\n"


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
    [
        ("0:58", 58),
        ("10:00", 600),
        ("1:02:03", 3723),
        ("2-01:00:00", 176400),
        ("UNLIMITED", math.inf),
        ("INVALID", None),
        ("", None),
    ],
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
def test_a_task_is_requeued_unless_it_was_cancelled_or_is_out_of_restarts(
    monkeypatch: pytest.MonkeyPatch, shown: str, restarts: int, said: str
) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(*command: str) -> tuple[int, str]:
        asked.append(command)
        return (0, shown) if shown else (1, "slurm_load_jobs error: Invalid job id")

    monkeypatch.setattr(slurm, "_ask", ask)
    assert said in requeue(Task("9_0", restarts, 1, None), 3)
    assert (("scontrol", "requeue", "9_0") in asked) == (", restart " in said)


FROM_THE_FIRST_LINE = """
import os, sys
from batchspec.process.program import begin_program
begin_program()
os.kill(os.getpid(), 10)
from batchspec.cli import guarded
from batchspec.run import main
sys.exit(guarded(main, requeues=True))
"""


@pytest.mark.second
def test_a_task_that_is_signalled_before_it_has_read_its_job_is_requeued_too(model: Path, tmp_path: Path) -> None:
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho \"$@\" >>{tmp_path}/asked\necho JobState=RUNNING Restarts=0\n")
    scontrol.chmod(0o755)
    overrides = [*job_of(model, tmp_path, 8), f"output.dir={tmp_path / 'out'}", "device=cpu"]
    env = {**os.environ, **BATCH, "PATH": f"{scontrol.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FROM_THE_FIRST_LINE, *overrides], check=False, capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode == 75, done.stderr
    assert done.stderr.splitlines()[-1] == "batchspec: job 12 is requeued, restart 1 of 10"
    assert (tmp_path / "asked").read_text().splitlines() == ["show job -o 12", "requeue 12"]


def test_one_of_several_tasks_of_an_srun_does_not_end_the_others() -> None:
    assert "the batch script has to run `scontrol requeue 9_0`" in requeue(Task("9_0", 0, 4, None), 3)


def test_where_slurm_does_not_answer_its_own_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_ask", lambda *command: (1, "timed out"))
    left = slurm.time_left_s(Task("9", 0, 1, time.time() + 100))
    assert left is not None
    assert 98 < left <= 100
    assert slurm.time_left_s(Task("9", 0, 1, None)) is None
    monkeypatch.setattr(slurm, "_ask", lambda *command: (0, "UNLIMITED"))
    assert slurm.time_left_s(Task("9", 0, 1, time.time() + 100)) == math.inf


def test_submit_prints_one_line_that_a_shell_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    from batchspec.commands import submit as command

    given = ["--unseen", "model.path=m", "input.path=data/*.parquet", "output.dir=o"]
    keys = ["cluster.tasks=8", "cluster.gpus=2", "cluster.time_h=1.5", "cluster.memory_gb=64", 'cluster.sbatch=["--qos=low"]']
    assert command.main([*given, *keys]) == 0
    said = capsys.readouterr()
    assert "nothing is submitted yet; the same command with --go submits it" in said.err
    (line,) = said.out.splitlines()
    assert line.startswith("sbatch --array=0-7 --output=batchspec-%A_%a.log --signal=B:USR1@120 --time=1:30:00 --gpus-per-node=2")
    assert " --mem=61035M " in line
    assert line.endswith(
        "submit.sbatch model.path=m 'input.path=data/*.parquet' output.dir=o cluster.tasks=8 cluster.gpus=2 "
        "cluster.time_h=1.5 cluster.memory_gb=64 'cluster.sbatch=[\"--qos=low\"]'"
    )
    assert Path(re.findall(r"\S+submit\.sbatch", line)[0]).is_file()


def test_submit_refuses_what_run_would_refuse_and_names_a_missing_slurm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from batchspec.commands import submit as command

    assert command.main(["model.path=m", "output.dir=o", "--go"]) == 2
    assert "input.path is required" in capsys.readouterr().err
    assert command.main(["model.path=m", f"input.path={tmp_path}/i.parquet", "output.dir=o"]) == 2
    assert "i.parquet: does not exist" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["model.path=m", "input.path=i", "output.dir=o", "--go", "--unseen"]) == 2
    assert "there is no sbatch on this machine" in capsys.readouterr().err
