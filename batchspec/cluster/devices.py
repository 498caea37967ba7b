"""Which GPUs the processes of one run compute on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from batchspec.config.schema import RunConfig
from batchspec.config.typed import to_json
from batchspec.console import terminal
from batchspec.errors import ConfigError
from batchspec.process.child_process import python_command


def devices_of(config: RunConfig) -> list[str | None]:
    """One entry a process, those of a group together: its GPU, as CUDA_VISIBLE_DEVICES names it, or None on a CPU.

    Raises ConfigError.
    """
    gpus = [] if config.device == "cpu" else visible_gpus()
    wanted, ranks = config.cluster.workers, config.cluster.tensor_parallel
    if gpus and ranks > len(gpus):
        raise ConfigError(
            f"cluster.tensor_parallel={ranks}: this machine shows {len(gpus)} GPUs, and a model that is cut over {ranks} needs "
            "as many; lower it"
        )
    if wanted == "auto":
        return list(gpus[: len(gpus) // ranks * ranks]) or [None] * ranks
    if gpus and wanted * ranks > len(gpus):
        whose = "one of its own" if ranks == 1 else f"{ranks} of its own (cluster.tensor_parallel)"
        raise ConfigError(
            f"cluster.workers={wanted}: this machine shows {len(gpus)} GPUs, and a worker needs {whose}; lower it, or "
            f"leave it auto for one worker {'a GPU' if ranks == 1 else f'per {ranks} GPUs'}"
        )
    return list(gpus[: wanted * ranks]) or [None] * (wanted * ranks)


def choose_ranks(config: RunConfig) -> int:
    """cluster.tensor_parallel=auto: the number of GPUs for each copy of the model that `plan` would take on this machine.

    Raises ConfigError if there is none, with the reason.
    """
    num_gpus = 0 if config.device == "cpu" else len(visible_gpus())
    if num_gpus < 2:
        return 1
    asked = subprocess.run(
        [*python_command("-m", "batchspec.commands.ranks"), str(num_gpus)], input=to_json(config), capture_output=True, text=True,
        check=False,
    )
    if asked.returncode != 0:
        said = asked.stderr.strip().splitlines()
        raise ConfigError(f"cluster.tensor_parallel=auto: {said[-1].removeprefix(terminal.PREFIX) if said else 'no answer'}")
    ranks = int(asked.stdout.split()[-1])
    terminal.notice(
        f"cluster.tensor_parallel=auto: {ranks} of {num_gpus} GPUs for each copy of the model; `batchspec plan` compares"
    )
    return ranks


def visible_gpus() -> list[str]:
    """Names of the GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES has them."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    import torch  # counts without initialising CUDA here

    return [str(index) for index in range(torch.cuda.device_count())]
