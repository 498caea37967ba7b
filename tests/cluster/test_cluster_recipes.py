"""The manifests for Kubernetes and SkyPilot: valid for these systems, and what they do after each exit code is what it means.

There is no cluster here: `Controller` follows the rules of a Kubernetes Job for processes on this machine.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import kubernetes_validate
import polars as pl
import pytest
import yaml  # type: ignore[import-untyped]

from batchspec import errors, run
from batchspec.config.compose import compose
from batchspec.config.schema import ClusterConfig
from batchspec.errors import BatchspecError, DivergedError, Interrupted, StorageError, TooManyErrors
from batchspec.process.first_signals import SIGNALS
from tests.helpers.runs import make_model, make_prompts, start_apart

pytestmark = pytest.mark.second

JOBS = Path(__file__).parents[2] / "jobs"
TEXT = (JOBS / "manifests/kubernetes.yml").read_text(encoding="utf-8")
JOB: dict[str, Any] = yaml.safe_load(TEXT)
POD: dict[str, Any] = JOB["spec"]["template"]["spec"]
SKY: dict[str, Any] = yaml.safe_load((JOBS / "manifests/skypilot.yml").read_text(encoding="utf-8"))
PYTHON = "/opt/batchspec/bin/python"
VERSIONS = ("1.29", "1.31", "1.33", "1.37")
"""Of Kubernetes. 1.29 has backoffLimitPerIndex on by default; 1.33 and later have it as stable."""
ROWS = 160
REFUSED, CRASH, KILLED = 2, BatchspecError.exit_code, 128 + signal.SIGKILL


def exit_codes() -> set[int]:
    """Of every error with which a run can end."""
    return {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BatchspecError)}


def action(code: int, *, disrupted: bool = False) -> str:
    """What the Job does after a pod's exit code: the action of the first rule that matches, or Count, which is the default.

    disrupted  the pod has the condition DisruptionTarget: preempted, evicted, drained
    """
    for rule in JOB["spec"]["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["operator"] == "In"
            matches = code in rule["onExitCodes"]["values"]
        else:
            assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
            matches = disrupted
        if matches:
            return str(rule["action"])
    return "Count"


# -- Kubernetes: the manifest


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_is_valid_for_kubernetes(version: str) -> None:
    assert kubernetes_validate.validate(JOB, version, strict=True) == version


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_with_a_shared_volume_is_valid_too(version: str) -> None:
    text, changed = re.subn(r"# (- \{name: shared)", r"\1", TEXT)
    assert changed == 2
    job = yaml.safe_load(text)
    kubernetes_validate.validate(job, version, strict=True)
    pod = job["spec"]["template"]["spec"]
    assert pod["volumes"][-1]["name"] == pod["containers"][0]["volumeMounts"][-1]["name"] == "shared"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "backoffLimitPerIndexes"), 1),
        (("spec", "completions"), "eight"),
        (("spec", "podFailurePolicy", "rules", 0, "onExitCode"), {}),
        (("spec", "template", "spec", "terminationGracePeriod"), 120),
        (("spec", "template", "spec", "containers", 0, "arg"), []),
        (("spec", "template", "spec", "volumes", 0, "emptydir"), {}),
    ],
)
def test_a_wrong_key_or_value_is_not_valid(path: Sequence[str | int], value: object) -> None:
    wrong = copy.deepcopy(JOB)
    place: Any = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_the_manifest_holds_what_kubernetes_checks_beyond_the_schema() -> None:
    """https://kubernetes.io/docs/concepts/workloads/controllers/job/, on pod failure policies and limits per index."""
    spec = JOB["spec"]
    (container,) = POD["containers"]
    assert (spec["completionMode"], POD["restartPolicy"]) == ("Indexed", "Never")
    assert spec["completions"] == spec["parallelism"]
    assert 0 <= spec["maxFailedIndexes"] <= 1, "at most the completions, of which a user may leave one"
    for rule in spec["podFailurePolicy"]["rules"]:
        assert rule["action"] in ("FailJob", "FailIndex", "Ignore", "Count")
        if codes := rule.get("onExitCodes"):
            assert codes["containerName"] == container["name"]
            assert codes["values"] == sorted({code for code in codes["values"] if 0 < code < 256})
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}


def test_the_manifests_arguments_are_a_job() -> None:
    (container,) = POD["containers"]
    assert container["command"] == ["python", "-m", "batchspec.run"]
    config = compose(container["args"])
    assert (config.model.path, config.output.dir) == ("Qwen/Qwen3-8B", "s3://BUCKET/out")


def test_a_pod_has_the_time_that_a_run_may_take_to_save() -> None:
    assert POD["terminationGracePeriodSeconds"] >= ClusterConfig().signal_s
    assert signal.SIGTERM in SIGNALS


# -- Kubernetes: exit codes


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (REFUSED, "FailJob"),
        (TooManyErrors.exit_code, "FailJob"),
        (DivergedError.exit_code, "FailIndex"),
        (StorageError.exit_code, "Count"),
        (Interrupted.exit_code, "Count"),
        (CRASH, "Count"),
        (KILLED, "Count"),
    ],
)
def test_each_exit_code_has_its_policy(code: int, what: str) -> None:
    assert action(code) == what
    assert action(code, disrupted=True) == ("Ignore" if what == "Count" else what)


def test_the_rules_name_each_exit_code_of_the_program_once_and_no_other() -> None:
    rules = JOB["spec"]["podFailurePolicy"]["rules"]
    named = Counter(code for rule in rules for code in rule.get("onExitCodes", {}).get("values", []))
    assert named == Counter(exit_codes())


def test_a_task_is_restarted_as_often_as_under_slurm() -> None:
    assert JOB["spec"]["backoffLimitPerIndex"] == ClusterConfig().max_restarts


def test_the_table_of_the_page_is_what_the_manifest_does() -> None:
    page = (JOBS / "pages/clusters.md").read_text(encoding="utf-8")
    section = page.split("\n## Kubernetes and SkyPilot\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")]
    said = {int(code): row[1] for row in rows for code in re.findall(r"\b\d+\b", row[0])}
    assert set(said) - {0, KILLED} == exit_codes()
    for code, policy in said.items():
        assert code == 0 or policy.startswith(f"`{action(code)}`"), code


def test_the_page_about_resuming_explains_each_exit_code() -> None:
    page = (JOBS / "pages/resume.md").read_text(encoding="utf-8")
    assert Counter(re.findall(r"^- (\d+): ", page, re.MULTILINE)) == Counter(map(str, exit_codes() | {0}))


# -- Kubernetes: a job


class Controller:
    """The processes of an Indexed Job, started again as its policy says.

    words   the container's arguments
    folder  gets the log of each pod
    """

    def __init__(self, words: list[str], folder: Path, completions: int) -> None:
        self._words, self._folder = words, folder
        self.ended: list[tuple[int, int, str]] = []
        """(index, exit code, action) of each pod that failed, in order."""
        self.pods: dict[int, ForkServerProcess] = {}
        self._logs: list[Path] = []
        for index in range(completions):
            self._start(index)

    def _start(self, index: int) -> None:
        self._logs.append(self._folder / f"{index}-{len(self._logs)}.log")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JOB_COMPLETION_INDEX", str(index))
            self.pods[index] = start_apart(self._words, self._logs[-1])

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self._logs if log.exists())

    def end(self, index: int, number: signal.Signals, *, disrupted: bool) -> None:
        """Send a pod a signal, and start it again if it may be."""
        pid = self.pods[index].pid
        assert pid is not None
        os.kill(pid, number)
        self.pods[index].join(60)
        code = self.pods[index].exitcode
        assert code is not None, self.said()
        code = 128 - code if code < 0 else code  # as a container runtime has it
        what = action(code, disrupted=disrupted)
        self.ended.append((index, code, what))
        counted = sum((which, done) == (index, "Count") for which, _, done in self.ended)
        if what == "Ignore" or (what == "Count" and counted <= JOB["spec"]["backoffLimitPerIndex"]):
            self._start(index)

    def wait_for_work(self, out: Path) -> None:
        """Until every pod holds a shard."""
        ends = time.monotonic() + 120
        while not {pod.pid for pod in self.pods.values()} <= claimants(out):
            assert time.monotonic() < ends, self.said()
            time.sleep(0.02)

    def stop(self) -> None:
        for pod in self.pods.values():
            pod.kill()
            pod.join()


def claimants(out: Path) -> set[int]:
    """Processes that hold shards."""
    found = set()
    for path in (out / "_batchspec/claims").glob("*.json"):
        try:
            claim = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        found |= {int(claim["pid"])} if claim.get("owner") else set()
    return found


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The container's arguments, which follow `python -m batchspec.run`, on a tiny model."""
    mine: dict[str, object] = {
        "model.path": make_model(tmp_path / "model"),
        "input.path": make_prompts(tmp_path / "in.parquet", ROWS),
        "output.dir": tmp_path / "out",
        "decode.max_new_tokens": 60,
    }
    given = dict(word.split("=", 1) for word in POD["containers"][0]["args"])
    assert set(given) == set(mine)
    more = ["decode.ignore_eos=true", "output.token_ids=true", "output.shard_rows=4", "packing.max_num_seqs=2", "draft=none"]
    return [*(f"{name}={mine[name]}" for name in given), *more]


def tokens(out: Path) -> list[tuple[str, list[int]]]:
    """Every row as often as it is there."""
    return sorted(pl.read_parquet(out / "data").select("request_id", "token_ids").rows())


def test_an_evicted_and_a_killed_task_are_restarted_and_every_row_is_written_once(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    controller = Controller(words, tmp_path, completions=2)
    try:
        controller.wait_for_work(out)
        controller.end(0, signal.SIGTERM, disrupted=True)
        controller.end(1, signal.SIGKILL, disrupted=False)
        for pod in controller.pods.values():
            pod.join(120)
    finally:
        controller.stop()
    assert controller.ended == [(0, Interrupted.exit_code, "Ignore"), (1, KILLED, "Count")]
    assert [pod.exitcode for pod in controller.pods.values()] == [0, 0], controller.said()
    assert "SIGTERM: " in controller.said()
    assert [name for name, _ in tokens(out)] == sorted(f"q{i}" for i in range(ROWS))
    assert run.main([*words, f"output.dir={tmp_path / 'undisturbed'}", "packing.max_num_seqs=64"]) == 0
    assert tokens(out) == tokens(tmp_path / "undisturbed")


def test_a_refused_command_ends_the_whole_job(words: list[str]) -> None:
    assert action(run.main([*words, "decode.n=0"])) == "FailJob"


# -- SkyPilot


def starts(folder: Path, codes: Sequence[int]) -> tuple[list[list[str]], int]:
    """The commands that the recipe's `run` gives to Python, which ends with these codes and then with the last of them again, and
    the exit code of the whole."""
    home, log = folder / "home", folder / "log"
    program, pause = home / "python", folder / "bin/sleep"
    for path in (program, pause):
        path.parent.mkdir(parents=True)
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nlog, codes = {str(log)!r}, {list(codes)!r}\n"
        "start = len(open(log).readlines()) if os.path.exists(log) else 0\n"
        "print(json.dumps(sys.argv[1:]), file=open(log, 'a'))\n"
        "sys.exit(codes[min(start, len(codes) - 1)])\n"
    )
    pause.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    pause.chmod(0o755)
    env = {"HOME": str(home), "PATH": f"{pause.parent}:{os.environ['PATH']}", **SKY["envs"]}
    done = subprocess.run(["bash", "-c", SKY["run"].replace(PYTHON, str(program))], env=env, check=False, timeout=60)
    return [json.loads(line) for line in log.read_text().splitlines()], done.returncode


@pytest.mark.parametrize("code", sorted(exit_codes() | {0, KILLED}))
def test_each_exit_code_under_skypilot(code: int, tmp_path: Path) -> None:
    """Crashes and failed storage: restarted in place; exit 75: SkyPilot restarts the job elsewhere; other codes end it."""
    commands, last = starts(tmp_path, [code])
    in_place = action(code) == "Count" and code not in (0, Interrupted.exit_code)
    assert len(commands) == (1 + ClusterConfig().max_restarts if in_place else 1)
    assert last == code


def test_a_crash_that_does_not_come_again_is_forgotten(tmp_path: Path) -> None:
    commands, last = starts(tmp_path, [CRASH, KILLED, 0])
    assert (len(commands), last) == (3, 0)
    assert commands[0] == commands[1] == commands[2]
    assert commands[0][:2] == ["-m", "batchspec.run"]
    config = compose(commands[0][2:])
    assert [config.model.path, config.input.path, config.output.dir] == list(SKY["envs"].values())


def test_skypilot_recovers_interrupted_runs_alone() -> None:
    assert SKY["resources"]["job_recovery"] == {
        "recover_on_exit_codes": [Interrupted.exit_code],
        "max_restarts_on_errors": 0,
    }


@pytest.mark.slow
def test_skypilot_takes_the_recipe(tmp_path: Path) -> None:
    """`pip install skypilot` first, 500 MB; it writes to its home folder."""
    sky: Any = pytest.importorskip("sky", reason="SkyPilot is not installed: pip install skypilot")
    task = sky.Task.from_yaml(str(JOBS / "manifests/skypilot.yml"))
    (resources,) = task.resources
    assert (resources.use_spot, resources.accelerators) == (True, {"H100": 1})
    assert resources.job_recovery["recover_on_exit_codes"] == [Interrupted.exit_code]
    assert (task.run, task.setup, task.num_nodes) == (SKY["run"], None, 1)
    for name, wrong in (("jobrecovery", {}), ("accelerator", "H100:1"), ("job_recovery", {"recover_on_exit_codes": ["75"]})):
        (tmp_path / "wrong.yml").write_text(yaml.safe_dump({**SKY, "resources": {**SKY["resources"], name: wrong}}))
        with pytest.raises(Exception, match="nvalid"):
            sky.Task.from_yaml(str(tmp_path / "wrong.yml"))
