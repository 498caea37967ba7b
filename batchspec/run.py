"""`python -m batchspec.run +job=demo`: compose the configuration, check it, run the job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from batchspec.console import terminal
from batchspec.console.arguments import asks_for_help
from batchspec.errors import Interrupted
from batchspec.process.bytecode import keep_bytecode
from batchspec.process.early_start import begin_compiler_hash, begin_context, one_gpu
from batchspec.process.garbage import imports_frozen, no_garbage_collection
from batchspec.process.preflight import check_address_space
from batchspec.process.signals import program_does

if TYPE_CHECKING:
    from batchspec.config.schema import RunConfig
    from batchspec.data.runstate.heartbeat_writer import HeartbeatWriter
    from batchspec.distributed.channel import Channel
    from batchspec.distributed.group import Group
    from batchspec.job.supervise.watchdog import Watchdog


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that Hydra's command line describes; returns the exit code (see errors.py)."""
    overrides = sys.argv[1:] if argv is None else argv
    if asks_for_help(overrides):
        from batchspec.commands.reference import help_text

        terminal.show(help_text("run"))
        return 0
    check_address_space()
    keep_bytecode()
    from batchspec.config.compose import launch

    return launch(run, overrides, require=("model.path", "input.path", "output.dir"))


def run(config: RunConfig) -> int:
    """Run one checked job; returns the exit code.

    One process: in this one. Several processes, or a task of Slurm: in child processes; an interrupted Slurm task that can
    continue is requeued.
    """
    from batchspec.data.dataset.input_paths import check_exist  # imports pyarrow: a wrong key is refused without it
    from batchspec.job.supervise import slurm

    check_exist(config.input.path)
    task = slurm.this_task()
    if task is None:
        program_does("before the job was opened")  # in a sweep, again after each job
    if task is None and config.device != "cpu" and one_gpu():
        begin_context()
    with no_garbage_collection():  # it would traverse the modules again and again while they are imported
        from batchspec.cluster import workers
        from batchspec.cluster.devices import choose_ranks, devices_of

        if config.cluster.tensor_parallel == "auto":
            config = replace(config, cluster=replace(config.cluster, tensor_parallel=choose_ranks(config)))
        devices = devices_of(config)
    if task is None and len(devices) == 1:
        run_here(config)
        return 0
    code = workers.supervise(config, devices)
    if task is not None and code == Interrupted.exit_code:
        from batchspec.data.runstate.heartbeat_writer import mark_requeued

        assert config.output.dir is not None
        tell = partial(mark_requeued, config.output.dir)
        terminal.notice(slurm.requeue(task, config.cluster.max_restarts, tell=tell))
    return code


def run_here(
    config: RunConfig, group: Group | None = None, *, watchdog: Watchdog | None = None, parent: Channel | None = None
) -> None:
    """Run one checked job in this process. Torch is imported only here, after the checks of the configuration.

    group     the processes that compute the model together, which this one leads
    watchdog  watches this process already; None: one is made
    parent    channel on which the parent of a process without a group reads its liveness counter; None: no parent watches it
    Raises as `run_job` does.
    """
    from batchspec.data.runstate.heartbeat_writer import starting

    assert config.output.dir is not None
    with starting(config.output.dir) as heartbeat:
        _run_here(config, heartbeat, group, watchdog, parent)


def _run_here(
    config: RunConfig, heartbeat: HeartbeatWriter, group: Group | None, watchdog: Watchdog | None, parent: Channel | None
) -> None:
    if config.device != "cpu" and group is None:
        begin_context()
    with no_garbage_collection():
        import torch

        from batchspec.job.run_job import run_job
        from batchspec.job.supervise.watchdog import Watchdog, limit_s
    if parent is not None:  # not earlier: importing torch may hold the GIL for longer than the watchdog's limit
        parent.start_liveness_thread()
    if config.device != "cpu":
        begin_compiler_hash()
    gpu = config.device != "cpu" and torch.cuda.is_available()
    own = watchdog or Watchdog(limit_s(config.cluster.watchdog_s, gpu=gpu), has_parent=parent is not None)
    with imports_frozen(), nullcontext() if watchdog else own.watching():
        run_job(config, group=group, watchdog=own, heartbeat=heartbeat)


if __name__ == "__main__":
    from batchspec.cli import guarded
    from batchspec.process.program import begin_program, end_program

    begin_program()
    end_program(guarded(main, requeues=True))
