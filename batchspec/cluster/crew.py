"""The worker processes of one run: starts, watches, signals and ends them. `workers.py` decides about the run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import PIPE, STDOUT, Popen
from typing import IO

from batchspec import terminal
from batchspec.config.schema import RunConfig
from batchspec.config.typed import to_json
from batchspec.distributed.channel import Channel, make_memory, make_rendezvous, path_of
from batchspec.distributed.seat import Seat, ending
from batchspec.distributed.silent_ranks import SilentRanks
from batchspec.errors import Interrupted
from batchspec.runstate.output_folder import OutputFolder
from batchspec.runstate.overwrite import CREW
from batchspec.supervise.watchdog import limit_s
from batchspec.terminal import PREFIX, notice

PROGRAM = ("-m", "batchspec.cluster.worker")
LEADER_END_S, FOLLOWER_END_S, STACKS_S = 30.0, 3.0, 2.0
"""Seconds that the other processes of a group have to end by themselves after one has ended: the leader saves its work, followers
have nothing to save. Then SIGABRT makes them print their stacks, and SIGKILL ends them after the same time again."""


@dataclass(slots=True)
class Worker:
    number: int
    device: str | None
    process: Popen[str]
    code: int | None = None
    """Exit code as in Popen: negative for the signal that ended the worker."""
    rank: int = 0
    """Its rank in its group."""
    group: Channel | None = None
    """Its group; None: it computes the model alone."""
    ended_at: float = 0.0
    """Time when its end was noticed, by the monotonic clock."""
    abort_at: float | None = None
    """Time when the parent sent SIGABRT, because another rank of its group has ended and this one has not."""

    def name(self) -> str:
        rank = "" if self.group is None else f"rank {self.rank} of "
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
        if self._ranks == 1:
            yield self._start(number, devices[0])
            return
        handle, rendezvous = make_memory(), make_rendezvous()
        try:
            for rank in range(self._ranks):
                seat = Seat(rank, self._ranks, handle, path_of(rendezvous))
                worker = self._start(number, devices[rank], seat, devices, (handle, rendezvous))
                worker.group = Channel(handle, None, self._ranks)
                yield worker
            self._silent[number] = SilentRanks(Channel(handle, None, self._ranks), self._watchdog_s)
        finally:
            os.close(handle)
            os.close(rendezvous)

    def _start(
        self, number: int, device: str | None, seat: Seat | None = None, devices: Sequence[str | None] = (),
        handles: Sequence[int] = (),
    ) -> Worker:  # fmt: skip
        env = {**os.environ, CREW: self._name}
        if device is not None:  # ranks must see all GPUs of their group, each once: they read each other's memory
            env["CUDA_VISIBLE_DEVICES"] = device if seat is None else ",".join(dict.fromkeys(str(name) for name in devices))
        elif self._num > 1:
            env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self._num)))
        # A session of its own: Ctrl-C reaches the workers once, through the parent. A single worker has the parent's output.
        process = Popen(
            [sys.executable, *PROGRAM, str(number), str(self._num if device is None else 1), *(seat.words() if seat else ())],
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
        return Worker(number, device, process, rank=0 if seat is None else seat.rank)

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
            first = worker.group is not None and all(mate.code is None for mate in self._mates(worker))
            if first and worker.group is not None and (worker.rank > 0 or worker.code != 0):
                worker.group.lose(worker.rank)
            if worker.code in (0, Interrupted.exit_code) or worker.abort_at is not None or self.asked is not None:
                continue
            died = worker.code < 0
            left = sum(other.rank == 0 and other.number != worker.number for other in self.live())
            others = f"; {left} other{'s take' if left > 1 else ' takes'} its shards over" if left else ""
            if (self._num > 1 or died) and (worker.group is None or first):
                notice(f"{worker.name()} {ending(worker.code)}{'; its group ends' * first}{others}")

    def end_groups(self) -> None:
        """Kill ranks whose processes do not run at all (`SilentRanks`). Some time after a rank has ended, kill the other ranks of
        its group: they wait for it, or hang."""
        now, silent = time.monotonic(), {number: ranks.find() for number, ranks in self._silent.items()}
        for worker in self.live():
            if worker.abort_at is not None:
                if now - worker.abort_at > STACKS_S:
                    worker.process.kill()
                continue
            ended = [mate.ended_at for mate in self._mates(worker) if mate.code is not None]
            if worker.rank in silent.get(worker.number, ()):
                self._abort(worker, f"has not run for more than {self._watchdog_s:g} s (cluster.watchdog_s)")
            elif ended and now - min(ended) > (FOLLOWER_END_S if worker.rank else LEADER_END_S):
                self._abort(worker, "does not end")

    def _abort(self, worker: Worker, why: str) -> None:
        """Make the worker print its stacks; `end_groups` kills it STACKS_S seconds later."""
        assert worker.group is not None
        own, leader = worker.group.progress(worker.rank), worker.group.progress(0)
        notice(
            f"{worker.name()} {why}: it has begun {own.messages} of {leader.messages} steps and read "
            f"{own.results % (1 << 32)} results; killed"
        )
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
