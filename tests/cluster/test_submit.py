"""`batchspec submit`: what it says about tasks and paths, and the files that it prints for Kubernetes and SkyPilot."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from batchspec import cli, run
from batchspec.config.compose import compose
from tests.cluster.test_cluster_recipes import JOB, SKY, VERSIONS
from tests.helpers.runs import make_model, make_prompts

STOP = """decode.stop=["it's","$(HOME)"]"""
WORDS = ["model.path=Qwen/Qwen3-8B", "input.path=s3://b/in/*.parquet", "output.dir=s3://b/out", STOP]
CLUSTER = ["cluster.tasks=3", "cluster.gpus=2", "cluster.cpus=4", "cluster.memory_gb=32"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, list[str]]:
    """What goes to stdout, and the lines on stderr."""
    assert cli.main(["submit", *words]) == 0
    said = capsys.readouterr()
    return said.out, said.err.splitlines()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_is_the_recipe_with_the_arguments(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = printed(capsys, "--unseen", "--to", "kubernetes", "--image", "hub.io/me/batchspec:1", *WORDS, *CLUSTER)
    made = yaml.safe_load(text)
    assert kubernetes_validate.validate(made, version, strict=True) == version
    (container,) = made["spec"]["template"]["spec"].pop("containers")
    (usual,) = JOB["spec"]["template"]["spec"]["containers"]
    assert (made["spec"].pop("completions"), made["spec"].pop("parallelism")) == (3, 3)
    assert container.pop("args") == [word.replace("$(", "$$(") for word in [*WORDS, *CLUSTER]]
    assert container.pop("image") == "hub.io/me/batchspec:1"
    assert container.pop("resources") == {
        "requests": {"cpu": 4, "memory": "30517Mi"}, "limits": {"memory": "30517Mi", "nvidia.com/gpu": 2}
    }
    assert container == {key: value for key, value in usual.items() if key not in ("args", "image", "resources")}
    rest = {key: value for key, value in JOB["spec"].items() if key not in ("completions", "parallelism", "template")}
    assert {key: value for key, value in made["spec"].items() if key != "template"} == rest
    assert "edit" not in "".join(line for line in text.splitlines() if "shared" not in line)
    assert said == ["batchspec: nothing is submitted yet; edit the lines marked so, in a file, then kubectl create -f FILE"]


@pytest.mark.parametrize("to", ["slurm", "kubernetes", "skypilot"])
def test_a_job_on_the_cpu_asks_for_no_gpu(to: str, capsys: pytest.CaptureFixture[str]) -> None:
    asks = "--gpus-per-node|nvidia.com/gpu: [1-9]|accelerators: "
    for device, found in (("cpu", False), ("auto", True)):
        text, _ = printed(capsys, "--unseen", "--to", to, *WORDS, f"device={device}")
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        assert bool(re.search(asks, "\n".join(lines))) is found


def test_what_no_key_says_is_left_to_be_edited(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = printed(capsys, "--unseen", "--to", "kubernetes", *WORDS, "cluster.gpus=0")
    edited = [line.partition(":")[0].strip() for line in text.splitlines() if "# edit" in line and "shared" not in line]
    assert edited == ["image", "requests", "limits"]
    (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "64Gi"}


def test_the_file_of_skypilot_is_the_recipe_with_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    text, said = printed(capsys, "--unseen", "--to", "skypilot", "--image", "hub.io/me/batchspec:1", *WORDS, *CLUSTER)
    made: dict[str, Any] = yaml.safe_load(text)
    (line,) = [line for line in made["run"].splitlines() if "batchspec.run" in line]
    python, *words = shlex.split(line)
    assert python == "/opt/batchspec/bin/python"
    assert re.fullmatch(r"[0-9a-f]{32}", made["envs"].pop("BATCHSPEC_CREW")), "the name of the command that all launches have"
    assert made["envs"] == {"MODEL": "Qwen/Qwen3-8B", "INPUT": "s3://b/in/*.parquet", "OUTPUT": "s3://b/out"}
    expanded = [re.sub(r"=\$(\w+)$", lambda found: f"={made['envs'][found[1]]}", word) for word in words]
    assert expanded == ["-m", "batchspec.run", *WORDS, *CLUSTER, "||", "code=$?"], "as the shell of the task passes them"
    assert compose(expanded[2:-2]).decode.stop == ["it's", "$(HOME)"]
    assert made["resources"] == {
        **SKY["resources"], "image_id": "docker:hub.io/me/batchspec:1", "accelerators": "H100:2", "cpus": "4+", "memory": "32+"
    }
    assert {key: value for key, value in made.items() if key not in ("run", "resources", "envs")} == {
        key: value for key, value in SKY.items() if key not in ("run", "resources", "envs")
    }
    assert made["run"].splitlines()[5:] == SKY["run"].splitlines()[7:]
    assert said[-1].endswith("then sky jobs launch --secret HF_TOKEN FILE, once for each of cluster.tasks")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "kubernetes", "--go"], "--go is for Slurm, and --to kubernetes prints a file; remove it"),
        (["--image", "x"], "--image x is read only with --to kubernetes or skypilot; remove it"),
        (["--to", "nomad"], "argument --to: invalid choice: 'nomad'"),
        (["--to", "kubernetes", "cluster.partition=gpu"], "cluster.partition=gpu is a key of Slurm, and is not read with --to"),
        (["--to", "skypilot", "decode.stop=['\n']"], "a value with a line break cannot be written into SkyPilot's file"),
    ],
)
def test_what_has_no_effect_there_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", "--unseen", *WORDS[:3], *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_relative_paths_are_said_to_be_in_the_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--unseen", "model.path=Qwen/Qwen3-8B", "input.path=[a.parquet,/b.parquet]", "output.dir=out"]
    _, said = printed(capsys, *words)
    assert f"batchspec: relative paths (input.path=a.parquet, output.dir=out) are in {os.getcwd()} on every node" in said
    _, said = printed(capsys, *words, "--to", "kubernetes")
    assert said[0].startswith(
        "batchspec: local paths (input.path=a.parquet, input.path=/b.parquet, output.dir=out) are in the container of each task"
    )
    _, said = printed(capsys, *words, "--to", "skypilot")
    assert "output.dir=out) are in the container of each task; give URLs" in said[0]
    _, said = printed(capsys, "--unseen", *WORDS)
    assert len(said) == 1


@pytest.mark.second
def test_tasks_that_would_have_nothing_to_do_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        f"model.path={make_model(tmp_path / 'model')}", f"input.path={make_prompts(tmp_path / 'in.parquet', 12)}",
        f"output.dir={tmp_path}/out", "decode.max_new_tokens=2", "draft=none", "output.shard_rows=4",
    ]
    _, said = printed(capsys, *words, "cluster.tasks=8")
    assert (
        "batchspec: 5 tasks of cluster.tasks=8 would have nothing to do: 3 shards are to be computed; lower cluster.tasks or "
        "output.shard_rows"
    ) in said
    _, said = printed(capsys, *words, "cluster.tasks=3", "cluster.gpus=2")  # two processes a task
    assert "batchspec: 1 task of cluster.tasks=3 would have nothing to do: 3 shards" in said[0]
    _, said = printed(capsys, *words, "cluster.tasks=3")
    assert not any("nothing to do" in line for line in said)
    assert run.main(words) == 0
    capsys.readouterr()
    _, said = printed(capsys, *words, "cluster.tasks=2")
    assert "2 tasks of cluster.tasks=2 would have nothing to do: 0 shards are to be computed; lower cluster.tasks" in said[0]
