"""Several processes for one job, one per GPU, from one command. They share its shards by claims, as tasks of an array do.

With cluster.tensor_parallel a worker is a group of processes that compute one model together. Its leader, rank 0, does all that a
single worker process does: it claims, writes and gets the signals. When one process of a group ends, the group ends.

The parent computes nothing and does not need torch: it starts the workers, passes signals on, reports a worker that died, kills
one whose process does not run any more, and ends with one exit code. In a Slurm task it also runs with a single worker, so that
it can report whatever kills the worker and requeue the task.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from batchspec.cluster.crew import Crew
from batchspec.config.schema import RunConfig
from batchspec.console.terminal import notice
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.distributed.rank_processes import RankProcess, RankProcesses
from batchspec.errors import BatchspecError, ConfigError, DivergedError, Interrupted, StorageError, TooManyErrors
from batchspec.process.signals import EndSignals

POLL_S = 0.1
SAVING = 0.75
"""Workers are killed after this share of cluster.signal_s if a signal has not ended them."""
DIED_CODES = (ConfigError.exit_code, DivergedError.exit_code, StorageError.exit_code, 1, Interrupted.exit_code)
"""Exit codes of the parent if no worker completed the job, the most severe first."""


def supervise(config: RunConfig, devices: Sequence[str | None]) -> int:
    """Run the job in one process per device until all have ended; returns the exit code (see errors.py).

    0 if the job is complete, even if workers died, or if other runs work on what is missing. 75 if a worker was killed and the
    job is not complete: the same command resumes it.
    """
    with crew_of(config, devices) as crew:
        while crew.live():
            time.sleep(POLL_S)
            crew.reap()
            crew.end_hanging()
            codes = {worker.code for group in crew.groups for worker in group.members}
            if TooManyErrors.exit_code in codes and crew.asked is None:
                _ask(crew, signal.SIGTERM)
            if crew.asked is not None and time.monotonic() - crew.asked_at > SAVING * config.cluster.signal_s:
                for worker in crew.live():
                    notice(f"{worker.name} did not end within {SAVING * config.cluster.signal_s:g} s of a signal: killed")
                    worker.kill()
        if crew.asked is not None:
            notice(f"{signal.Signals(crew.asked).name}: ended {time.monotonic() - crew.asked_at:.1f} s later")
    code = exit_code([_code(deciding(group), crew.asked) for group in crew.groups], config)
    if code == Interrupted.exit_code and crew.asked is None and all((deciding(group).code or 0) < 0 for group in crew.groups):
        notice(f"{config.output.dir}: no process was left to say what is saved; run the same command again to go on")
    return code


def deciding(group: RankProcesses) -> RankProcess:
    """The worker whose exit code counts: the leader of the group, or the follower whose failure ended it."""
    leader, *followers = group.members
    grave = [worker for worker in followers if (worker.code or 0) > 0 and worker.code != Interrupted.exit_code]
    return grave[0] if grave and leader.code == Interrupted.exit_code else leader


@contextmanager
def crew_of(config: RunConfig, devices: Sequence[str | None]) -> Iterator[Crew]:
    """The workers, to which this process passes signals on; none of them outlives the block."""
    waiting: list[int] = []
    crew: Crew | None = None

    def handle(number: int) -> None:
        if crew is None:
            waiting.append(number)
        else:
            _ask(crew, number)

    with EndSignals() as signals:
        signals.pass_to(handle)
        crew = Crew(config, devices)
        with closing(crew):
            for early in waiting:
                _ask(crew, early)
            yield crew


def _ask(crew: Crew, number: int) -> None:
    if crew.asked is None:
        crew.asked, crew.asked_at = number, time.monotonic()
    crew.send(number)


def _code(worker: RankProcess, asked: int | None) -> int:
    """A worker's exit code; 75 if a signal ended it, whoever sent it."""
    assert worker.code is not None
    if worker.code >= 0:
        return worker.code
    if asked == -worker.code:
        notice(f"{worker.name}: {signal.Signals(asked).name} before anything was computed; run the same command again")
    return Interrupted.exit_code


def exit_code(codes: Sequence[int], config: RunConfig) -> int:
    """One code for all workers."""
    if TooManyErrors.exit_code in codes:
        return TooManyErrors.exit_code
    if set(codes) == {0}:
        return 0
    if 0 in codes and _complete(config):
        return 0
    worst = next((code for code in DIED_CODES if code in codes), 1)
    if 0 in codes:
        notice(f"{config.output.dir}: the job is not complete, and no worker is left; run the same command again")
    return worst


def _complete(config: RunConfig) -> bool:
    assert config.output.dir is not None
    try:
        output = OutputFolder(config.output.dir)
        return output.is_job() and not output.missing() and output.has_card()
    except BatchspecError:
        return False
