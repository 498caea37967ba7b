"""`batchspec bench --tensor-parallel N`: this process leads the N processes that compute the model, and starts the others.

The others run the same command line (`follower.py`). When one of them ends early, the command ends with one line; they end
when this process does, however it ends, because each reads a pipe whose other end this process holds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from subprocess import DEVNULL
from typing import NoReturn

import torch

from batchspec.config.compose import reported
from batchspec.console import terminal
from batchspec.distributed.group import Group, joined
from batchspec.distributed.rank_ends import culprit, ending
from batchspec.distributed.rank_processes import RankProcesses, RankProgram
from batchspec.distributed.seat import Seat, new_group
from batchspec.errors import ConfigError, Interrupted, RankLost
from batchspec.process.program import end_program
from batchspec.process.threads import start_thread

PROGRAM = ("-m", "batchspec.bench.follower")
EXCHANGE_S = 1800.0
"""Time limit of an exchange: a rank may read its weights, or compile kernels, while another one waits."""
POLL_S, GRACE_S, END_S = 0.1, 3.0, 10.0
"""Seconds between two polls of the followers; for the leader to notice a dead follower itself; for all to end."""


def lead(ranks: int, argv: Sequence[str], device: torch.device, measure: Callable[[Group], None]) -> NoReturn:
    """Call `measure` with the group of this process and the followers that it starts, report errors, and end the process."""
    with new_group(ranks) as seat:
        end_program(_lead(seat, argv, device, measure))  # tearing NCCL and the shared memory of the GPUs down may hang


def _lead(seat: Seat, argv: Sequence[str], device: torch.device, measure: Callable[[Group], None]) -> int:
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = threads = str(max(1, (os.cpu_count() or 1) // seat.ranks))
        torch.set_num_threads(int(threads))
    followers = Followers(seat, argv)

    def run() -> None:
        try:
            with joined(seat, gpu=device.type == "cuda", limit_s=EXCHANGE_S, nccl_s=EXCHANGE_S) as group:
                measure(group)
            followers.wait()
        except RankLost as error:
            raise RankLost(followers.lost(error)) from None
        except ConfigError as error:  # of a job, which has a key for it
            raise ConfigError(str(error).replace("cluster.tensor_parallel", "--tensor-parallel")) from None

    try:
        return reported(run)
    except KeyboardInterrupt:
        terminal.fail("interrupted; nothing was written")
        return Interrupted.exit_code
    finally:
        followers.kill()


class Followers:
    """The processes of the other ranks."""

    def __init__(self, seat: Seat, argv: Sequence[str]) -> None:
        self._over = threading.Event()
        program = RankProgram(program=PROGRAM, words=argv, environment=os.environ, output={"stdout": DEVNULL})
        self._group = RankProcesses(program, seat, [f"rank {rank}" for rank in range(1, seat.ranks)])
        start_thread(self._watch, "followers")

    def wait(self) -> None:
        """Wait until all have ended, as they do once everything is measured. How they end no longer matters."""
        self._over.set()
        until = time.monotonic() + END_S
        while len(self._codes()) < len(self._group.members) and time.monotonic() < until:
            time.sleep(POLL_S / 10)

    def lost(self, error: RankLost) -> str:
        """Which rank is gone and how it ended; if none has ended, the leader's error."""
        until = time.monotonic() + GRACE_S
        while not (failed := self._failed()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return self._how(failed) if failed else str(error)

    def kill(self) -> None:
        self._over.set()
        self._group.close()

    def _codes(self) -> dict[int, int]:
        """Exit codes of those that have ended, by rank."""
        codes = {member.rank: member.process.poll() for member in self._group.members}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _failed(self) -> dict[int, int]:
        return {rank: code for rank, code in self._codes().items() if code}

    def _watch(self) -> None:
        """Report to the group that a rank is gone. If the leader cannot notice, because it is in an exchange, end the command
        here."""
        while not self._over.wait(POLL_S):
            if failed := self._failed():
                self._group.channel.lose(min(failed))
                if self._over.wait(GRACE_S):
                    return
                terminal.fail(self._how(self._failed()))
                self.kill()
                os._exit(RankLost.exit_code)

    def _how(self, failed: dict[int, int]) -> str:
        rank = culprit(failed, waited=[rank for rank in failed if self._group.channel.waits(rank)])
        how = ending(failed[rank]) + ("" if failed[rank] < 0 else ", see its message above")
        ranks = self._group.channel.ranks
        return f"--tensor-parallel {ranks}: rank {rank} {how}; nothing was written, run the same command again"
