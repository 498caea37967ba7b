"""A process in which something goes wrong: `python -m tests.distributed.rank_faults SEAT NUMBER` in place of a worker, or
`python -m tests.distributed.rank_faults SEAT [PIPE]` with WARM in the environment in place of a rank of a warm engine.

The environment says what: FAULT is KIND RANK STEP. From that step of that rank's on, or from that tensor on while it loads,

    diverge   a weight is another one
    swap      it reads rank STEP's part of the weights
    oom       memory runs out
    memory    memory runs out while it loads
    join      memory runs out where the rank joins its group
    nccl      it never makes its groups of NCCL, on a GPU
    prefill   memory runs out in the first prefill after that step
    disk      its weight files cannot be opened; STEP is the errno
    hang      a step never ends
    poison    the process dies when it prefills a prompt that begins with token STEP
    device    the rank has another one
    files     the model's files are replaced before the rank reads them
    load      the tensor is never read
    stop      no thread of the process runs, while it loads
    slow      as stop, and the other ranks load slowly: they do not wait for this one yet
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from batchspec.checkpoint import weight_files
from batchspec.cli import guarded
from batchspec.cluster import worker
from batchspec.distributed import group
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.executor import Executor
from batchspec.engine.step import ScheduledStep
from batchspec.job import prepare
from batchspec.job.runner import follower
from batchspec.model.layers.base import Shard
from batchspec.model.shard import part_of
from batchspec.model.weights import Checkpoint
from batchspec.process.program import end_program
from batchspec.warm import rank_process
from tests.helpers.runs import put

KIND, RANK, STEP = os.environ["FAULT"].split()


def make_faulty() -> None:
    build, execute, count = Engine.__init__, Executor.execute, [0]
    engines: list[Engine] = []

    def built(self: Engine, *rest: object, **named: object) -> None:
        build(self, *rest, **named)  # type: ignore[arg-type]
        engines.append(self)

    def executed(self: Executor, step: ScheduledStep) -> None:
        count[0] += step.round is not None
        if KIND == "poison":
            if any(int(refill.request.prompt_ids[0]) == int(STEP) for refill in step.refills):
                os.kill(os.getpid(), signal.SIGKILL)
        elif KIND == "prefill":
            if count[0] >= int(STEP) and step.refills:
                run_out()
        elif count[0] == int(STEP):
            count[0] += 1
            if KIND == "oom":
                run_out()
            if KIND == "hang":
                time.sleep(3600)
            if KIND == "diverge":
                engines[-1].target._norm[0] += 1e-6
        execute(self, step)

    if KIND in ("load", "stop", "slow", "memory"):
        act = run_out if KIND == "memory" else hang
        before_tensors(lambda number: act() if number == int(STEP) else None)
    if KIND == "join":
        put(group, "_collectives", run_out)
    if KIND == "nccl":
        put(dist, "new_group", lambda **_: time.sleep(3600))
    if KIND == "disk":
        put(weight_files, "safe_open", unreadable)
    if KIND == "swap":
        put(prepare, "part_of_group", lambda spec, group: part_of(spec, Shard(int(STEP), group.ranks)))
    if KIND == "device":
        put(follower, "device_facts", lambda _: "NVIDIA H100")
    if KIND == "files":
        put(follower, "weight_files", lambda _: SimpleNamespace(state="other"))
    Engine.__init__, Executor.execute = built, executed  # type: ignore[method-assign]


def before_tensors(act: Callable[[int], None]) -> None:
    """Call `act` with a tensor's number before that is read."""
    stored, count = Checkpoint.stored, [0]

    def patched(self: Checkpoint, name: str) -> Tensor:
        count[0] += 1
        act(count[0])
        return stored(self, name)

    Checkpoint.stored = patched  # type: ignore[method-assign]


def run_out(*_: object, **__: object) -> NoReturn:
    if torch.cuda.is_available():
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")


def unreadable(path: Path, **_: object) -> NoReturn:
    raise OSError(int(STEP), os.strerror(int(STEP)), str(path))


def hang() -> None:
    if KIND == "load":
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    if sys.argv[1] == RANK:
        make_faulty()
    elif KIND == "slow":
        before_tensors(lambda _: time.sleep(1))
    end_program(guarded(rank_process.main if "WARM" in os.environ else worker.main))
