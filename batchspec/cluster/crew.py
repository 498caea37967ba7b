"""The worker processes of one run: starts, watches, signals and ends them. `workers.py` decides about the run."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import IO

from batchspec.config.schema import RunConfig
from batchspec.config.typed import to_json
from batchspec.console import terminal
from batchspec.console.terminal import PREFIX, notice
from batchspec.distributed.channel import Channel, make_memory, make_rendezvous, path_of
from batchspec.distributed.seat import Seat, ending
from batchspec.distributed.silent_ranks import SilentRanks
from batchspec.errors import Interrupted
from batchspec.process.child_process import python_command
from batchspec.runstate.output_folder import OutputFolder
from batchspec.runstate.overwrite import CREW
from batchspec.supervise.watchdog import limit_s

PROGRAM = ("-m", "batchspec.cluster.worker")
LEADER_END_S, FOLLOWER_END_S, STACKS_S = 30.0, 3.0, 2.0
"""Seconds that the other processes of a group have to end by themselves after one has ended: the leader saves its work, followers
have nothing to save. Then SIGABRT makes them print their stacks, and SIGKILL ends them after the same time again."""
UNKILLABLE_S = 60.0
"""Seconds after SIGKILL until the run goes on without a process that has not ended. The system keeps it, for example while a disk
does not answer; it never runs again."""
STATES = {
    "R": "runs", "S": "waits", "D": "waits for a device or a file system", "T": "was stopped by a signal",
    "t": "was stopped by a debugger",
}  # fmt: skip


@dataclass(slots=True)
class Worker:
    number: int
    device: str | None
    process: Popen[str]
    group: Channel
    """The channel of its group; a worker that computes a model alone is a group of one."""
    rank: int
    """Its rank in its group."""
    code: int | None = None
    """Exit code as in Popen: negative for the signal that ended the worker."""
    ended_at: float = 0.0
    """Time when its end was noticed, by the monotonic clock."""
    abort_at: float | None = None
    """Time when the parent sent SIGABRT: the worker did not run, or it did not end after another rank of its group."""

    def name(self) -> str:
        rank = "" if self.group.ranks == 1 else f"rank {self.rank} of "
        return f"{rank}worker {self.number}" + ("" if self.device is None else f" (GPU {self.device})")


class Crew:
    """The workers of one run."""

    def __init__(self, config: RunConfig, devices: Sequence[str | None]) -> None:
        self._text, self._name = to_json(config), uuid.uuid4().hex
        assert config.output.dir is not None
        self._num, self._out, self._ranks = len(devices), OutputFolder(config.output.dir).path, config.cluster.tensor_parallel
        self._watchdog_s = limit_s(config.cluster.watchdog_s, gpu=devices[0] is not None)
        self._silent: dict[int, SilentRanks] = {}
        """One for each group of ranks, by worker number."""
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self.asked: int | None = None
        """The first signal that the parent received."""
        self.asked_at = 0.0
        groups = [devices[first : first + self._ranks] for first in range(0, len(devices), self._ranks)]
        self.workers = [worker for number, group in enumerate(groups) for worker in self._start_group(number, group)]
        self._readers = [self._follow(worker) for worker in self.workers if worker.process.stdout is not None]

    def _start_group(self, number: int, devices: Sequence[str | None]) -> Iterator[Worker]:
        """The processes that compute one model."""
        handle, rendezvous = make_memory(), make_rendezvous()
        try:
            channel, pids = Channel(handle, None, self._ranks), list[int]()
            for rank in range(self._ranks):
                seat = Seat(rank, self._ranks, handle, path_of(rendezvous))
                process = self._start(number, devices[rank], seat, devices, (handle, rendezvous))
                pids.append(process.pid)
                yield Worker(number, devices[rank], process, channel, rank)
            self._silent[number] = SilentRanks(channel, self._watchdog_s, pids)
        finally:
            os.close(handle)
            os.close(rendezvous)

    def _start(
        self, number: int, device: str | None, seat: Seat, devices: Sequence[str | None], handles: Sequence[int]
    ) -> Popen[str]:
        env = {**os.environ, CREW: self._name}
        if device is not None:  # ranks must see all GPUs of their group, each once: they read each other's memory
            env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(str(name) for name in devices))
        elif self._num > 1:
            env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self._num)))
        # A session of its own: Ctrl-C reaches the workers once, through the parent. A single worker has the parent's output.
        process = Popen(
            [*python_command(*PROGRAM), str(number), str(self._num if device is None else 1), *seat.words()],
            env=env,
            pass_fds=handles,
            stdin=PIPE,
            stdout=PIPE if self._num > 1 else None,
            stderr=STDOUT if self._num > 1 else None,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(self._text + "\n")
            process.stdin.flush()  # left open: when it closes, the worker knows that the parent is gone
        return process

    def _follow(self, worker: Worker) -> threading.Thread:
        assert worker.process.stdout is not None
        label = str(worker.number) if worker.rank == 0 else f"{worker.number}.{worker.rank}"
        thread = threading.Thread(target=self._print, args=(label, worker.process.stdout), daemon=True)
        thread.start()
        return thread

    def _print(self, number: str, lines: IO[str]) -> None:
        """Print a worker's lines with its number. Errors that all workers have, and the closing advice, are printed once."""
        done = False
        for line in lines:
            with self._lock:
                done = done or line.startswith(f"{self._out}: ")
                if done or (line.startswith(PREFIX) and self.asked is None):
                    if line in self._said:
                        continue
                    self._said.add(line)
                terminal.say(f"[{number}] {line.rstrip()}")

    def live(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.code is None]

    def send(self, number: int) -> None:
        """Send a signal to the workers whose exit codes count."""
        for worker in self.live():
            if worker.rank == 0:
                worker.process.send_signal(number)

    def reap(self) -> None:
        """Note which workers have ended, and report those that were not asked to end."""
        ended = [(worker, code) for worker in self.live() if (code := worker.process.poll()) is not None]
        # Killed workers first: other ranks of their group end because of them, often before the next call of this function.
        for worker, code in sorted(ended, key=lambda one: one[1] >= 0):
            worker.code, worker.ended_at = code, time.monotonic()
            first = all(mate.code is None for mate in self._mates(worker))
            if first and (worker.rank > 0 or worker.code != 0):
                worker.group.lose(worker.rank)
            if worker.code in (0, Interrupted.exit_code) or worker.abort_at is not None or self.asked is not None:
                continue
            if (self._num > 1 or worker.code < 0) and first:
                group = "; its group ends" if self._ranks > 1 else ""
                notice(f"{worker.name()} {ending(worker.code)}{group}{self._takeover(worker)}")

    def _takeover(self, worker: Worker) -> str:
        """The end of the message about a lost worker: how many other workers take over its shards."""
        left = sum(other.rank == 0 and other.number != worker.number for other in self.live())
        return f"; {left} other{'s take' if left > 1 else ' takes'} its shards over" if left else ""

    def end_hanging(self) -> None:
        """Kill workers whose processes do not run at all (`SilentRanks`). Some time after a rank has ended, kill the other ranks
        of its group: they wait for it, or hang."""
        now, silent = time.monotonic(), {number: ranks.find() for number, ranks in self._silent.items()}
        for worker in self.live():
            if worker.abort_at is not None:
                if now - worker.abort_at > STACKS_S:
                    worker.process.kill()
                if now - worker.abort_at > STACKS_S + UNKILLABLE_S:
                    worker.code, worker.ended_at = -signal.SIGKILL, now
                    what = f"process {worker.process.pid} {state_of(worker.process.pid)}"
                    notice(f"{worker.name()} cannot be killed: {what}; the run goes on without it")
                continue
            ended = [mate.ended_at for mate in self._mates(worker) if mate.code is not None]
            if worker.rank in silent.get(worker.number, ()):
                why = f"has not run for more than {self._watchdog_s:g} s (cluster.watchdog_s)"
                self._abort(worker, why, self._takeover(worker))
            elif ended and now - min(ended) > (FOLLOWER_END_S if worker.rank else LEADER_END_S):
                self._abort(worker, "does not end")

    def _abort(self, worker: Worker, why: str, takeover: str = "") -> None:
        """Make the worker print its stacks; `end_hanging` kills it STACKS_S seconds later."""
        own, leader = worker.group.progress(worker.rank), worker.group.progress(0)
        known = f"process {worker.process.pid} {state_of(worker.process.pid)}"
        if worker.group.ranks > 1:
            known += f", has begun {own.messages} of {leader.messages} steps and read {own.results % (1 << 32)} results"
        notice(f"{worker.name()} {why}: {known}; killed{takeover}")
        worker.abort_at = time.monotonic()
        for number in (signal.SIGABRT, signal.SIGCONT):  # a stopped process handles SIGABRT only after SIGCONT
            worker.process.send_signal(number)

    def _mates(self, worker: Worker) -> list[Worker]:
        """The other workers of its group."""
        return [other for other in self.workers if other.number == worker.number and other is not worker]

    def close(self) -> None:
        for worker in self.workers:
            if worker.code is None:
                worker.process.kill()
                worker.code = worker.process.wait()
            if worker.process.stdin is not None:
                with suppress(BrokenPipeError):
                    worker.process.stdin.close()
        for reader in self._readers:
            reader.join(5)


def state_of(pid: int) -> str:
    """What a process is doing, in words, by the letter of its state in /proc/PID/stat."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        letter = "?"
    return STATES.get(letter, f"is in state {letter}")
