"""`batchspec submit`: run a job as a Slurm array. It checks everything that the run will check - configuration, input, model and
drafter with the headers of their weights - and prints the sbatch command; --go runs it.

`--unseen` checks only the configuration: for paths that exist only on the nodes of the cluster.
"""

from __future__ import annotations

import importlib.resources
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from batchspec import terminal
from batchspec.config.checks import AUTO
from batchspec.config.compose import launch
from batchspec.config.schema import ClusterConfig, RunConfig
from batchspec.errors import ConfigError
from batchspec.text import for_shell

TIMEOUT_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Hydra overrides as for `run`, `--go` to submit, and `--unseen`; returns the exit code."""
    overrides = [item for item in argv if item not in ("--go", "--unseen")]
    go, unseen = "--go" in argv, "--unseen" in argv
    if {"-m", "--multirun"} & set(overrides):
        raise ConfigError("submit takes one job; for a sweep: batchspec run -m hydra/launcher=submitit_slurm ...")

    def submit(config: RunConfig) -> None:
        gpus, ranks = config.cluster.gpus, config.cluster.tensor_parallel
        if ranks != AUTO and 0 < gpus < ranks:
            raise ConfigError(f"cluster.gpus={gpus} is less than cluster.tensor_parallel={ranks}; raise cluster.gpus")
        if not unseen:
            from batchspec.job import check_target, is_new  # imports torch, so only after the checks of `launch`
            from batchspec.prepare import open_job
            from batchspec.report.push import check_push_key

            check_push_key(config.output)
            check_target(open_job(config, fetch=False, here=False, is_new=is_new(config)))
        command = sbatch_line(config.cluster, overrides)
        terminal.show(shlex.join(command))
        if go:
            terminal.show_line(submitted(command, config))
        else:
            terminal.notice("nothing is submitted yet; the same command with --go submits it")

    return launch(submit, overrides, require=("model.path", "input.path", "output.dir"), reads_input=not unseen)


def sbatch_line(cluster: ClusterConfig, overrides: Sequence[str]) -> list[str]:
    """The sbatch command of an array whose tasks run `overrides` with this Python."""
    script = importlib.resources.files("batchspec.conf") / "job" / "submit.sbatch"
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
