"""The files of jobs/manifests for Kubernetes and SkyPilot, filled in for a job. What only the user knows keeps its `# edit`."""

from __future__ import annotations

import importlib.resources
import json
import re
import shlex
import uuid
from collections.abc import Sequence

from batchspec.config.schema import ClusterConfig
from batchspec.data.runstate.overwrite import CREW
from batchspec.errors import ConfigError

SYSTEMS = ("slurm", "kubernetes", "skypilot")
OF_SLURM = ("time_h", "partition", "account", "log", "sbatch", "signal_s", "max_restarts")
"""Keys of `cluster` that only Slurm's tasks read."""


ENVS = {"model.path": "MODEL", "input.path": "INPUT", "output.dir": "OUTPUT"}
"""Keys that are environment variables in SkyPilot's file: `sky jobs launch --env OUTPUT=...` sets another value."""


def kubernetes(cluster: ClusterConfig, words: Sequence[str], image: str | None = None) -> str:
    """The manifest of an Indexed Job whose tasks run `words`. image: of the container; None: the user edits it."""
    text = _manifest("kubernetes", words)
    for key in ("completions", "parallelism"):
        text = _replaced(text, rf"{key}: 8 .*", f"{key}: {cluster.tasks}")
    if image is not None:
        text = _replaced(text, r"image: .*", f"image: {json.dumps(image)}")
    given = (json.dumps(word.replace("$(", "$$(")) for word in words)  # $(NAME) is a variable
    text = _replaced(text, r"args:(\n +- .*)+", "".join(["args:", *(f"\n            - {word}" for word in given)]))
    cpus, memory = cluster.cpus or 8, "64Gi" if cluster.memory_gb is None else f"{max(1, int(cluster.memory_gb * 1e9 / 2**20))}Mi"
    edit = "  # edit" if None in (cluster.cpus, cluster.memory_gb) else ""
    text = _replaced(text, r"requests: .*", f"requests: {{cpu: {cpus}, memory: {memory}}}{edit}")
    gpus = f", nvidia.com/gpu: {cluster.gpus}" * bool(cluster.gpus)
    return _replaced(text, r"limits: .*", f"limits: {{memory: {memory}{gpus}}}{edit}")


def skypilot(cluster: ClusterConfig, words: Sequence[str], image: str | None = None) -> str:
    """A managed job that runs `words`: one of cluster.tasks, launched one by one. image: as above. Raises ConfigError."""
    if any("\n" in word for word in words):
        raise ConfigError("a value with a line break cannot be written into SkyPilot's file; put it into a recipe or a file")
    text = _manifest("skypilot", words)
    if image is not None:
        text = _replaced(text, r"image_id: .*", f"image_id: {json.dumps(f'docker:{image}')}")
    gpus = [f"accelerators: H100:{cluster.gpus}  # edit: the kind of GPU"] if cluster.gpus else []
    cpus = [] if cluster.cpus is None else [f"cpus: {cluster.cpus}+"]
    memory = [] if cluster.memory_gb is None else [f"memory: {cluster.memory_gb:g}+"]
    text = _replaced(text, r"accelerators: .*\n  ", "".join(f"{line}\n  " for line in (*gpus, *cpus, *memory)))
    values = dict(word.split("=", 1) for word in words if "=" in word)
    envs = {name: values[key] for key, name in ENVS.items() if key in values}
    shown = [f'{key}="${name}"' for key, name in ENVS.items() if name in envs]
    shown += [shlex.quote(word) for word in words if word.partition("=")[0] not in ENVS]
    lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in envs.items())
    lines += f"  {CREW}: {json.dumps(uuid.uuid4().hex)}  # the launches of this file are one command\n"
    text = _replaced(text, r"envs:\n(  .*\n)+\n", f"envs:\n{lines}\n")
    command = f"/opt/batchspec/bin/python -m batchspec.run {' '.join(shown)} ||"
    return _replaced(text, r"# edit: more keys\n +/opt/batchspec/bin/python -m batchspec\.run [^|]*\|\|", command)


def _manifest(system: str, words: Sequence[str]) -> str:
    """The manifest, with the command that fills it in instead of its first comment."""
    file = importlib.resources.files("batchspec.conf") / "manifests" / f"{system}.yml"
    text = re.sub(r"\A(#.*\n)+", "", file.read_text(encoding="utf-8"))
    command = shlex.join(["batchspec", "submit", "--to", system, *words]).replace("\n", " ")
    return f"# {command}\n{text}"


def _replaced(text: str, pattern: str, by: str) -> str:
    found, count = re.subn(pattern, lambda _: by, text)
    assert count == 1, f"the manifest has {count} places for {by}"
    return found
