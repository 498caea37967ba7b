"""resume=error and resume=length begin once a command: a late task joins the retry, and a run that was interrupted after the last
row is continued by the same command, as its last line advises.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import yaml  # type: ignore[import-untyped]

from batchspec import cli, run
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.overwrite import CREW
from batchspec.errors import StorageError
from batchspec.job.runner import conclude
from tests.cluster.test_cluster_recipes import POD, PYTHON, SKY
from tests.helpers.runs import make_model, make_prompts
from tests.job.test_retry import failing_q8
from tests.job.test_signals import signalled

pytestmark = pytest.mark.second

CAP = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_prompts(folder / "in.parquet", 10)
    make_model(folder / "model")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def command(inputs: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A job with a row that fails in every run, for a reason that may pass."""
    monkeypatch.delenv(CREW, raising=False)
    failing_q8(monkeypatch)
    return [
        f"model.path={inputs}/model", f"input.path={inputs}/in.parquet", f"output.dir={out}", f"decode.max_new_tokens={CAP}",
        "output.shard_rows=5", "output.token_ids=true", "decode.ignore_eos=true", "draft=none",
    ]


def num_retries(out: Path) -> int:
    return len(OutputFolder(out).latest_changes())


# --- the tasks of one job


def pod_environment(job: str) -> dict[str, str]:
    """The variables that a pod of this Job has by its manifest, from the labels that Kubernetes gives to every pod of a Job."""
    labels = {"batch.kubernetes.io/controller-uid": job, "batch.kubernetes.io/job-name": "batchspec-x"}
    (container,) = POD["containers"]
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"] if "fieldRef" in str(each)}
    names = {name: re.fullmatch(r"metadata\.labels\['(.*)'\]", path) for name, path in fields.items()}
    return {name: labels[found[1]] for name, found in names.items() if found is not None}


def task_environment(task: str, file: dict[str, Any] = SKY, given: dict[str, str] | None = None) -> dict[str, str]:
    """The command's name as a task of SkyPilot gives it to the program. given: by the user, with --env."""
    script = file["run"].replace(PYTHON, f"printenv {CREW}; true")
    env = {"PATH": os.environ["PATH"], "SKYPILOT_TASK_ID": task, **file["envs"], **(given or {})}
    done = subprocess.run(["bash", "-c", script], env=env, check=True, capture_output=True, text=True, timeout=60)
    return {CREW: done.stdout.strip()}


TASKS = {
    "pods of a Job": (pod_environment("job-1"), pod_environment("job-1"), pod_environment("job-2")),
    "a recovered task": (task_environment("sky-1"), task_environment("sky-1"), task_environment("sky-2")),
    "launches with a name": tuple(task_environment(f"sky-{i}", given={CREW: name}) for i, name in enumerate(("a", "a", "b"))),
}
"""Environments: of the task that begins the retry, of a late one of the same command, and of one of another command."""


@pytest.mark.parametrize("tasks", TASKS.values(), ids=TASKS)
def test_a_late_task_of_the_same_command_begins_no_second_retry(
    tasks: tuple[dict[str, str], ...], command: list[str], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.main(command) == 0
    for environment, retries in zip(tasks, (1, 1, 2), strict=True):
        assert set(environment) == {CREW}
        monkeypatch.setenv(CREW, environment[CREW])
        assert run.main([*command, "resume=error"]) == 0
        assert num_retries(out) == retries


def test_a_late_task_of_the_same_command_keeps_the_job_that_overwrote_another(
    command: list[str], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.main(command) == 0
    jobs = []
    for task in ("job-1", "job-1", "job-2"):
        monkeypatch.setenv(CREW, pod_environment(task)[CREW])
        assert run.main([*command, "output.overwrite=true"]) == 0
        jobs.append(OutputFolder(out).manifest.job)
    assert jobs[0] == jobs[1] != jobs[2]


def test_all_launches_of_a_printed_file_are_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    crews = list[str]()
    for _ in range(2):
        words = ["model.path=m/m", "input.path=s3://b/in.jsonl", "output.dir=s3://b/out", "resume=error"]
        assert cli.main(["submit", "--unseen", "--to", "skypilot", *words]) == 0
        file = yaml.safe_load(capsys.readouterr().out)
        names = {task_environment(f"sky-{launch}", file)[CREW] for launch in range(2)}
        assert len(names) == 1
        crews += names
    assert crews[0] != crews[1], "a file that is printed later is another command"


def test_the_workers_of_a_task_belong_to_its_command(command: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CREW, "job-1")
    assert run.main([*command, "cluster.workers=2", "device=cpu"]) == 0
    assert OutputFolder(out).manifest.began == ("job-1",)


# --- the same command again


KINDS = {"error": ["resume=error"], "length": ["resume=length", f"decode.max_new_tokens={CAP + 2}"]}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The datasets that were pushed to."""
    pushed: list[str] = []

    def push(output: OutputFolder, repo: str, **_: Any) -> SimpleNamespace:
        pushed.append(repo)
        return SimpleNamespace(line=lambda: f"pushed to {repo}")

    monkeypatch.setattr("batchspec.job.run_job.check_push_key", lambda *_: None)
    monkeypatch.setattr("batchspec.job.runner.checked_run.check_target_key", lambda *_: None)
    monkeypatch.setattr(conclude, "push_output", push)
    monkeypatch.setattr(conclude, "can_draw", lambda: True)
    monkeypatch.setattr(conclude, "write_report", lambda output, _, stats: output.put_report(f"{stats.completions} rows"))
    return pushed


def rows(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "data")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("step", "left"),
    [
        ("job_stats", "README.md and report.html and answers.jsonl and the dataset org/answers of the hub"),
        ("write_report", "report.html and answers.jsonl and the dataset org/answers of the hub"),
        ("write_answers", "answers.jsonl and the dataset org/answers of the hub"),
        ("push_output", "the dataset org/answers of the hub"),
    ],
)
def test_a_retry_that_is_interrupted_after_its_rows_is_finished_by_the_same_command(
    step: str, left: str, kind: str, command: list[str], out: Path, hub: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The answers of the job before the retry are there: they are not those of its rows now."""
    answers = out.parent / "answers.jsonl"
    whole = [*command, f"output.openai={answers}"]
    assert run.main(whole) == 0
    before = answers.read_bytes()
    retry = [*whole, "output.push_to_hub=org/answers", *KINDS[kind]]
    no_more = signalled(monkeypatch, conclude, step, signal.SIGINT)
    assert run.main(retry) == 75
    said = re.sub(r"\S+/answers\.jsonl", "answers.jsonl", capsys.readouterr().err.splitlines()[-1])  # a long path is cut
    assert said.endswith(f"all rows are committed; run the same command again for {left}")
    assert (num_retries(out), hub) == (1, [])
    computed = rows(out)
    no_more()
    assert run.main(retry) == 0
    assert "already complete" in capsys.readouterr().err
    assert (num_retries(out), hub) == (1, ["org/answers"])
    assert rows(out).equals(computed)
    assert (out / "README.md").exists()
    assert (out / "report.html").read_text() == "10 rows"
    assert (answers.read_bytes() != before) == (kind == "length")


@pytest.mark.parametrize("ends", ["a kill", "a push that fails"])
def test_only_a_concluded_retry_is_followed_by_another_one(
    ends: str, command: list[str], out: Path, hub: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(command) == 0
    retry = [*command, "output.push_to_hub=org/answers", "resume=error"]
    with monkeypatch.context() as patch:
        def fail(*_: Any, **__: Any) -> None:
            raise SystemExit(137) if ends == "a kill" else StorageError("the hub is down; run the same command again")

        patch.setattr(conclude, "push_output", fail)
        if ends == "a kill":
            with pytest.raises(SystemExit):
                run.main(retry)
        else:
            assert run.main(retry) == 74
    capsys.readouterr()
    assert run.main(retry) == 0
    said = "an earlier run computed the rows of resume=error, this one does what follows them"
    assert f"already complete: 10 rows in 2 shards; {said}\n" in capsys.readouterr().err
    assert (num_retries(out), hub) == (1, ["org/answers"])
    assert run.main(retry) == 0
    assert "already complete" not in capsys.readouterr().err
    assert (num_retries(out), hub) == (2, ["org/answers"] * 2)
