"""The workers of one run, each a group of ranks: starts, watches, signals and ends them. `workers.py` decides about the run."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from subprocess import PIPE, STDOUT
from typing import IO

from batchspec.config.schema import RunConfig
from batchspec.config.typed import to_json
from batchspec.console import terminal
from batchspec.console.terminal import PREFIX, notice
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.overwrite import CREW
from batchspec.distributed.rank_ends import ending
from batchspec.distributed.rank_processes import Hang, Hanging, RankProcess, RankProcesses, RankProgram, environment_of
from batchspec.distributed.seat import new_group
from batchspec.errors import Interrupted
from batchspec.job.supervise.watchdog import limit_s
from batchspec.process.threads import start_thread

PROGRAM = ("-m", "batchspec.cluster.worker")
LEADER_END_S = 30.0
"""Seconds that the leader of a group has to save its work and end after another process of the group has ended."""


class Crew:
    """The workers of one run."""

    def __init__(self, config: RunConfig, devices: Sequence[str | None]) -> None:
        self._name = os.environ.get(CREW) or uuid.uuid4().hex
        assert config.output.dir is not None
        self._num, self._out, self._ranks = len(devices), OutputFolder(config.output.dir).path, config.cluster.tensor_parallel
        # A worker sees its own GPU alone, and shares the CPUs with the others.
        self._text = to_json(replace(config, cluster=replace(config.cluster, workers=max(1, self._num // self._ranks))))
        self._watchdog_s = limit_s(config.cluster.watchdog_s, gpu=devices[0] is not None)
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self.asked: int | None = None
        """The first signal that the parent received."""
        self.asked_at = 0.0
        self.groups: list[RankProcesses] = []
        """By worker number."""
        try:
            for first in range(0, len(devices), self._ranks):
                self.groups.append(self._start_group(len(self.groups), devices[first : first + self._ranks]))
        except BaseException:
            self._kill()
            raise
        self._readers = [
            self._follow(str(number) if worker.rank == 0 else f"{number}.{worker.rank}", worker.process.stdout)
            for number, group in enumerate(self.groups)
            for worker in group.members
            if worker.process.stdout is not None
        ]

    def _start_group(self, number: int, devices: Sequence[str | None]) -> RankProcesses:
        """The processes that compute one model."""
        sharing = self._num if devices[0] is None else 1
        program = RankProgram(
            program=PROGRAM, words=[str(number)], line=self._text,
            environment={**environment_of(devices, sharing), CREW: self._name},
            output={"stdout": PIPE, "stderr": STDOUT} if self._num > 1 else {},  # a single worker has the parent's output
        )
        names = [f"worker {number}" + ("" if device is None else f" (GPU {device})") for device in devices]
        if self._ranks > 1:
            names = [f"rank {rank} of {name}" for rank, name in enumerate(names)]
        with new_group(self._ranks, sharing=sharing) as seat:
            return RankProcesses(program, seat, names, watchdog_s=self._watchdog_s, leader_end_s=LEADER_END_S)

    def _follow(self, label: str, lines: IO[str]) -> threading.Thread:
        return start_thread(lambda: self._print(label, lines), f"output of {label}")

    def _print(self, label: str, lines: IO[str]) -> None:
        """Print a worker's lines with its number. Errors that all workers have, and the closing advice, are printed once."""
        done = False
        for line in lines:
            with self._lock:
                done = done or line.startswith(f"{self._out}: ")
                if done or (line.startswith(PREFIX) and self.asked is None):
                    if line in self._said:
                        continue
                    self._said.add(line)
                terminal.say(f"[{label}] {line.rstrip()}")

    def live(self) -> list[RankProcess]:
        return [worker for group in self.groups for worker in group.live()]

    def send(self, number: int) -> None:
        """Send a signal to the workers whose exit codes count."""
        for worker in self.live():
            if worker.rank == 0:
                worker.process.send_signal(number)

    def reap(self) -> None:
        """Note which workers have ended, and report those that were not asked to end."""
        for group in self.groups:
            for worker in group.reap():
                code = worker.code
                assert code is not None
                if code in (0, Interrupted.exit_code) or worker.abort_at is not None or self.asked is not None:
                    continue
                if (self._num > 1 or code < 0) and worker.is_first:
                    ends = "; its group ends" if self._ranks > 1 else ""
                    notice(f"{worker.name} {ending(code)}{ends}{self._takeover(group)}")

    def _takeover(self, lost: RankProcesses) -> str:
        """The end of the message about a lost worker: how many other workers take over its shards."""
        left = sum(worker.rank == 0 for group in self.groups if group is not lost for worker in group.live())
        return f"; {left} other{'s take' if left > 1 else ' takes'} its shards over" if left else ""

    def end_hanging(self) -> None:
        """Kill workers that do not run at all, and ranks that do not end after another one; say so."""
        for group in self.groups:
            for found in group.end_hanging():
                self._report(found, group)

    def _report(self, found: Hanging, group: RankProcesses) -> None:
        name, state, takeover = found.member.name, found.state, ""
        if found.why is Hang.UNKILLABLE:
            notice(f"{name} cannot be killed: {state}; the run goes on without it")
            return
        why = "does not end"
        if found.why is Hang.SILENT:
            why, takeover = f"has not run for more than {self._watchdog_s:g} s (cluster.watchdog_s)", self._takeover(group)
        if self._ranks > 1:
            own, leader = group.channel.progress(found.member.rank), group.channel.progress(0)
            state += f", has begun {own.messages} of {leader.messages} steps and read {own.results % (1 << 32)} results"
        notice(f"{name} {why}: {state}; killed{takeover}")

    def close(self) -> None:
        self._kill()
        for reader in self._readers:
            reader.join(5)

    def _kill(self) -> None:
        for group in self.groups:
            group.close()
