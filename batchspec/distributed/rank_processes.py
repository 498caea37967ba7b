"""The processes of one group of ranks, as their parent has them: it starts them, finds which have ended or hang, and ends them.

The workers of a job (`cluster/crew.py`), the ranks of a warm engine (`warm/ranks.py`) and those of `bench` (`bench/ranks.py`) are
such groups; a worker that computes a model alone is a group of one. Their parents decide what the end of a rank means for the
run. No rank outlives its parent (`act_when_parent_ends` of `process/child_process.py`).
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from subprocess import PIPE, Popen
from typing import Any

from batchspec.distributed.channel import Channel
from batchspec.distributed.rank_ends import culprit, state_of
from batchspec.distributed.seat import Seat
from batchspec.distributed.silent_ranks import SilentRanks
from batchspec.process.child_process import python_command

POLL_S = 0.05
END_S, STACKS_S = 3.0, 2.0
"""Seconds that the other processes of a group have to end by themselves after one has ended. Then SIGABRT makes them print their
stacks, and SIGKILL ends them after STACKS_S."""
UNKILLABLE_S = 60.0
"""Seconds after SIGKILL until the parent goes on without a process that has not ended. The system keeps it, for example while a
disk does not answer; it never runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """What the ranks of a group run."""

    program: tuple[str, str]
    """-m and the name of a module, or -c and the text of a program."""
    words: Sequence[str] = ()
    """Of the command line, after those of the seat."""
    line: str = ""
    """First line of the standard input."""
    environment: Mapping[str, str]
    output: Mapping[str, Any] = field(default_factory=dict)
    """Where the output goes, as arguments of Popen."""
    pipe: int | None = None
    """A file descriptor that rank 0 alone gets, as the last word of its command line."""

    def start(self, seat: Seat) -> Popen[str]:
        """Start the process of this seat, in a session of its own: Ctrl-C reaches its parent alone.

        Its standard input stays open: when it closes, the process knows that its parent is gone.
        """
        pipes = [self.pipe] if self.pipe is not None and seat.rank == 0 else []
        process = Popen(
            [*python_command(*self.program), *seat.words(), *self.words, *map(str, pipes)],
            env=self.environment,
            pass_fds=[seat.handle, seat.rendezvous, *pipes],
            stdin=PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            **self.output,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(self.line + "\n")
            process.stdin.flush()
        return process


@dataclass(slots=True)
class RankProcess:
    """The process of one rank."""

    rank: int
    name: str
    """For people."""
    process: Popen[str]
    code: int | None = None
    """Exit code as in Popen: negative for the signal that ended the process."""
    is_first: bool = False
    """Whether it ended before the other ranks of its group did."""
    abort_at: float | None = None
    """Time of SIGABRT by the monotonic clock: the process did not run, or it did not end after another rank of its group."""
    silent: bool = False
    """Whether no thread of it ran before SIGABRT: the others waited for it, or had not learned of its loss."""

    def abort(self) -> None:
        """Make it print its stacks; `RankProcesses.end_hanging` kills it STACKS_S seconds later."""
        self.abort_at = time.monotonic()
        for number in (signal.SIGABRT, signal.SIGCONT):  # a stopped process handles SIGABRT only after SIGCONT
            self.process.send_signal(number)

    def kill(self) -> None:
        """Returns when it has ended."""
        self.process.kill()
        self.code = self.process.wait()


class Hang(Enum):
    """What is wrong with a process that does not end by itself."""

    SILENT = auto()
    """It does not run at all."""
    LATE = auto()
    """It does not end after another rank of its group."""
    UNKILLABLE = auto()
    """SIGKILL did not end it. It counts as ended."""


@dataclass(frozen=True, slots=True)
class Hanging:
    """A process that was found to hang."""

    member: RankProcess
    why: Hang
    state: str
    """What it was doing, for people."""


class RankProcesses:
    """The processes of one group, by rank."""

    def __init__(
        self, program: RankProgram, seat: Seat, names: Sequence[str], *, watchdog_s: float = 0.0, leader_end_s: float = END_S
    ) -> None:
        """
        seat          of rank 0, from `new_group`
        names         of the ranks that are started, the last ones of the group: the others are this process
        watchdog_s    limit of the ranks' watchdogs; 0: none, and no rank is taken for silent
        leader_end_s  seconds that rank 0 has to end by itself after another one; followers, which save nothing, have END_S
        """
        self.channel = Channel(seat.handle, None, seat.ranks)
        self.members: list[RankProcess] = []
        self._leader_end_s, self._over_at = leader_end_s, math.inf
        try:
            for rank, name in enumerate(names, seat.ranks - len(names)):
                self.members.append(RankProcess(rank, name, program.start(replace(seat, rank=rank))))
            self.silent = SilentRanks(self.channel, watchdog_s, [member.process.pid for member in self.members])
        except BaseException:
            self.close()
            raise

    def live(self) -> list[RankProcess]:
        return [member for member in self.members if member.code is None]

    def reap(self) -> list[RankProcess]:
        """Those that have ended since the last call. Ranks that wait for one that the group has lost learn of it."""
        ended = [(member, code) for member in self.live() if (code := member.process.poll()) is not None]
        # Killed ones first: others end because of them, often before the next call of this function.
        ended.sort(key=lambda one: one[1] >= 0)
        for member, code in ended:
            member.is_first = len(self.live()) == len(self.members)
            member.code = code
            self._over_at = min(self._over_at, time.monotonic())
            if member.is_first and (member.rank > 0 or code != 0):
                self.channel.lose(member.rank)
        return [member for member, _ in ended]

    def end_hanging(self) -> list[Hanging]:
        """Kill processes that do not run at all (`SilentRanks`), and the other ranks some time after one has ended: they wait for
        it, or hang. SIGABRT makes them print their stacks before.

        Call it several times a second. Returns those that got SIGABRT in this call, or that SIGKILL did not end.
        """
        now, silent, found = time.monotonic(), self.silent.find(), list[Hanging]()
        for member in self.live():
            why = None
            if member.abort_at is not None:
                why = _kill_later(member, now - member.abort_at)
            elif member.rank in silent:
                why, member.silent = Hang.SILENT, True
            elif now - self._over_at > (END_S if member.rank else self._leader_end_s):
                why = Hang.LATE
                member.silent = self.silent.is_still(member.rank) and not any(each.silent for each in self.members)
            if why is not None:
                pid = member.process.pid
                found.append(Hanging(member, why, f"process {pid} {state_of(pid)}"))
                if why is not Hang.UNKILLABLE:
                    member.abort()
        return found

    def end(self) -> None:
        """End all of them. Those that wait for the group end by themselves, the others as `end_hanging` says."""
        self.channel.lose(0)
        self._over_at = min(self._over_at, time.monotonic())
        while self.live():
            time.sleep(POLL_S)
            self.reap()
            self.end_hanging()

    def culprit(self) -> RankProcess:
        """The one that made the others end, once all have ended."""
        rank = culprit(
            {member.rank: member.code if member.abort_at is None else None for member in self.members},
            silent=[member.rank for member in self.members if member.silent],
            waited=[member.rank for member in self.members if self.channel.waits(member.rank)],
        )
        return next(member for member in self.members if member.rank == rank)

    def close(self) -> None:
        """Kill those that have not ended; returns when all have, and their memory is free."""
        for member in self.live():
            member.process.kill()
        for member in self.members:
            if member.code is None:
                member.kill()
            assert member.process.stdin is not None
            with suppress(BrokenPipeError):
                member.process.stdin.close()


def _kill_later(member: RankProcess, passed_s: float) -> Hang | None:
    """passed_s: seconds since SIGABRT"""
    if passed_s > STACKS_S:
        member.process.kill()
    if passed_s <= STACKS_S + UNKILLABLE_S:
        return None
    member.code = -signal.SIGKILL
    return Hang.UNKILLABLE


def environment_of(devices: Sequence[str | None], sharing: int) -> dict[str, str]:
    """The environment of the ranks of one group.

    devices  of the group, as CUDA_VISIBLE_DEVICES names them; None: it computes on the CPU
    sharing  number of processes that share the machine's cores
    """
    named = [name for name in devices if name is not None]
    if named:  # ranks must see all GPUs of their group, each once: they read each other's memory
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(named))}
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // sharing))} if sharing > 1 else {}
    return {**threads, **os.environ}
