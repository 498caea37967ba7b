"""`batchspec submit`: run a job as a Slurm array. It checks everything that the run will check - configuration, input, model and
drafter with the headers of their weights - and prints the sbatch command; --go runs it.

`--to kubernetes` and `--to skypilot` print the manifest of jobs/manifests for that system, filled in. `--unseen` checks only the
configuration: for paths that exist only on the nodes of the cluster.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchspec.cluster.manifests import OF_SLURM, SYSTEMS, kubernetes, skypilot
from batchspec.config.checks import AUTO
from batchspec.config.compose import launch
from batchspec.config.key import value_of
from batchspec.config.no_effect import refuse_given
from batchspec.config.schema import KEYS, ClusterConfig, RunConfig
from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.console.text import counted, for_shell
from batchspec.errors import ConfigError

if TYPE_CHECKING:
    from batchspec.job.prepare import Job

TIMEOUT_S = 60.0
LAUNCH = {
    "kubernetes": "kubectl create -f FILE",
    "skypilot": "sky jobs launch --secret HF_TOKEN FILE, once for each of cluster.tasks",
}
"""What a user does with the file that is printed."""
WHERE = {
    "kubernetes": "in the container of each task; mount a volume there that all share (the lines `shared`), or give URLs",
    "skypilot": "in the container of each task; give URLs, or mount a bucket there (file_mounts)",
}
"""Where a task looks for a local path, and what to do about it."""


def main(argv: Sequence[str]) -> int:
    """Hydra overrides as for `run`, and options of its own; returns the exit code."""
    options, overrides = _options(argv)
    if {"-m", "--multirun"} & set(overrides):
        raise ConfigError("submit takes one job; for a sweep: batchspec run -m hydra/launcher=submitit_slurm ...")

    def submit(config: RunConfig) -> None:
        if not options.unseen:
            from batchspec.data.dataset.input_paths import check_exist  # imports pyarrow: a wrong key is refused without it

            check_exist(config.input.path)
        cluster = config.cluster
        if config.device == "cpu":
            cluster.gpus = 0
        gpus, ranks = cluster.gpus, cluster.tensor_parallel
        if ranks != AUTO and 0 < gpus < ranks:
            raise ConfigError(f"cluster.gpus={gpus} is less than cluster.tensor_parallel={ranks}; raise cluster.gpus")
        if options.to != "slurm":
            of_slurm = [f"cluster.{name}" for name in OF_SLURM]
            refuse_given(config, of_slurm, f"is a key of Slurm, and is not read with --to {options.to}; remove it")
        notes = [] if options.unseen else [idle_note(config, _checked(config))]
        for note in filter(None, [*notes, *place_notes(config, options.to)]):
            terminal.notice(note)
        if options.to == "slurm":
            _to_slurm(config, overrides, go=options.go)
        else:
            text = {"kubernetes": kubernetes, "skypilot": skypilot}[options.to](cluster, overrides, options.image)
            terminal.show(text)
            terminal.notice(f"nothing is submitted yet; edit the lines marked so, in a file, then {LAUNCH[options.to]}")

    return launch(submit, overrides, require=("model.path", "input.path", "output.dir"))


def _checked(config: RunConfig) -> Job:
    """The job, with all checks of a run. Raises ConfigError, InputError or CheckpointError."""
    from batchspec.job.prepare import open_job  # imports torch: a missing input is refused without it
    from batchspec.job.report.push import check_push_key
    from batchspec.job.runner.checked_run import check_target

    check_push_key(config.output)
    job = open_job(config, fetch=False, on_this_machine=False)
    check_target(job)
    return job


def idle_note(config: RunConfig, job: Job) -> str:
    """One line if the job has fewer shards to compute than the tasks have processes; else empty."""
    from batchspec.data.runstate.output_folder import OutputFolder

    assert config.output.dir is not None
    cluster, output = config.cluster, OutputFolder(config.output.dir)
    if config.resume.retry != "none" or config.resume.extend:
        return ""
    begins = output.begins_job(config.output.overwrite)
    shards = job.layout.num_shards if begins else output.num_shards - len(output.finished())
    each = 1 if cluster.tensor_parallel == AUTO else max(1, cluster.gpus // cluster.tensor_parallel)
    needed = -(-shards // each)
    if needed >= cluster.tasks:
        return ""
    advice = "lower cluster.tasks or output.shard_rows" if begins and shards else "lower cluster.tasks"
    return (
        f"{counted(cluster.tasks - needed, 'task')} of cluster.tasks={cluster.tasks} would have nothing to do: "
        f"{counted(shards, 'shard')} {'is' if shards == 1 else 'are'} to be computed; {advice}"
    )


def _to_slurm(config: RunConfig, overrides: Sequence[str], *, go: bool) -> None:
    command = sbatch_line(config.cluster, overrides)
    terminal.show(shlex.join(command))
    if go:
        terminal.show_line(submitted(command, config))
    else:
        terminal.notice("nothing is submitted yet; the same command with --go submits it")


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and the words of `run`. Raises ConfigError for options that do not go together."""
    parser = ArgumentParser(prog="batchspec submit", add_help=False, allow_abbrev=False)
    parser.add_argument("--to", choices=SYSTEMS, default="slurm")
    parser.add_argument("--image")
    parser.add_argument("--go", action="store_true")
    parser.add_argument("--unseen", action="store_true")
    options, words = parser.parse_known_args(list(argv))
    if options.to != "slurm":
        parser.refuse(options, ["go"], f"is for Slurm, and --to {options.to} prints a file")
    else:
        parser.refuse(options, ["image"], "is read only with --to kubernetes or skypilot")
    return options, words


def place_notes(config: RunConfig, system: str) -> list[str]:
    """A line about local paths, if there are any that tasks may not find: where they look for them."""
    local = [(key, path) for key, path in _local_paths(config) if system != "slurm" or not os.path.isabs(path)]
    if not local:
        return []
    named = ", ".join(f"{key}={path}" for key, path in local)
    if system == "slurm":
        return [f"relative paths ({named}) are in {os.getcwd()} on every node"]
    return [f"local paths ({named}) are {WHERE[system]}"]


def _local_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The local paths that the configuration names, each with its key; a model that is not a folder here is one of the hub."""
    packaged = str(importlib.resources.files("batchspec"))
    for key in (name for name, declared in KEYS.items() if declared.path):
        value = value_of(config, key)
        several = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        for path in several:
            if not isinstance(path, str) or "://" in path or key == "cluster.log" or path.startswith(packaged):
                continue
            if key not in ("model.path", "draft.path") or path.startswith((".", "/")) or os.path.isdir(path):
                yield key, path


def sbatch_line(cluster: ClusterConfig, overrides: Sequence[str]) -> list[str]:
    """The sbatch command of an array whose tasks run `overrides` with this Python."""
    script = importlib.resources.files("batchspec.conf") / "manifests" / "submit.sbatch"
    memory = None if cluster.memory_gb is None else max(1, int(cluster.memory_gb * 1e9 / 2**20))
    minutes = None if cluster.time_h is None else max(1, round(cluster.time_h * 60))
    options = {
        "array": f"0-{cluster.tasks - 1}",
        "output": cluster.log,
        "signal": f"B:USR1@{cluster.signal_s}",
        "time": minutes and f"{minutes // 60}:{minutes % 60:02}:00",
        "gpus-per-node": cluster.gpus or None,
        "cpus-per-task": cluster.cpus,
        "mem": memory and f"{memory}M",
        "partition": cluster.partition,
        "account": cluster.account,
        "export": f"ALL,BATCHSPEC_PYTHON={sys.executable}",
    }
    flags = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return ["sbatch", *flags, *cluster.sbatch, str(script), *overrides]


def submitted(command: Sequence[str], config: RunConfig) -> str:
    """Run sbatch; returns the job id with commands to watch it. Raises ConfigError with sbatch's message if it fails."""
    Path(config.cluster.log).parent.mkdir(parents=True, exist_ok=True)  # Slurm fails silently without it
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError as error:
        raise ConfigError("there is no sbatch on this machine; run the command above on a login node of the cluster") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"sbatch did not answer within {TIMEOUT_S:g} s; ask squeue before you submit again") from error
    number = re.search(r"batch job (\d+)", done.stdout)
    if done.returncode != 0 or number is None:
        raise ConfigError(f"sbatch refused: {' '.join((done.stderr or done.stdout).split())}")
    job, log = number[1], config.cluster.log.replace("%A", number[1]).replace("%a", "*")
    watch = f"inspect it:  squeue -j {job}  |  tail -f {log}  |  batchspec status {for_shell(config.output.dir)}"
    return f"job {job} with {config.cluster.tasks} tasks; {watch}"
