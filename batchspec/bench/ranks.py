"""`batchspec bench --tensor-parallel N`: this process leads the N processes that compute the model, and starts the others.

The others run the same command line (`follower.py`). When one of them ends early, the command ends with one line; they end
when this process does, however it ends, because each reads a pipe whose other end this process holds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import torch

from batchspec.config.compose import reported
from batchspec.console import terminal
from batchspec.distributed.channel import Channel, make_memory
from batchspec.distributed.group import Group, joined
from batchspec.distributed.seat import Seat, ending
from batchspec.errors import ConfigError, Interrupted, RankLost
from batchspec.process.child_process import python_command
from batchspec.supervise.leave import leave

PROGRAM = ("-m", "batchspec.bench.follower")
EXCHANGE_S = 1800.0
"""Time limit of an exchange: a rank may read its weights, or compile kernels, while another one waits."""
POLL_S, GRACE_S, END_S = 0.1, 3.0, 10.0
"""Seconds between two polls of the followers; for the leader to notice a dead follower itself; for all to end."""


def lead(ranks: int, argv: Sequence[str], device: torch.device, measure: Callable[[Group], None]) -> NoReturn:
    """Call `measure` with the group of this process and the followers that it starts, report errors, and end the process."""
    with TemporaryDirectory(prefix="batchspec-") as folder:
        code = _lead(Seat(0, ranks, make_memory(), Path(folder) / "rendezvous"), argv, device, measure)
    leave(code)  # tearing NCCL and the shared memory of the GPUs down may hang


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
        self._channel = Channel(seat.handle, None, seat.ranks)
        self._folder, self._over = seat.rendezvous.parent, threading.Event()
        seats = [Seat(rank, seat.ranks, seat.handle, seat.rendezvous) for rank in range(1, seat.ranks)]
        # In sessions of their own: Ctrl-C reaches the leader alone, which ends them.
        self._processes = [
            subprocess.Popen(
                [*python_command(*PROGRAM), *each.words(), *argv],
                pass_fds=(each.handle,),
                stdin=subprocess.PIPE,  # never written to; when it closes, the follower knows that the leader is gone
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            for each in seats
        ]
        threading.Thread(target=self._watch, daemon=True, name="followers").start()

    def wait(self) -> None:
        """Wait until all have ended, as they do once everything is measured. How they end no longer matters."""
        self._over.set()
        until = time.monotonic() + END_S
        while any(process.poll() is None for process in self._processes) and time.monotonic() < until:
            time.sleep(POLL_S / 10)

    def lost(self, error: RankLost) -> str:
        """Which rank is gone and how it ended; if none has ended, the leader's error."""
        until = time.monotonic() + GRACE_S
        while not (ended := self._ended()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return _how(ended, len(self._processes)) if ended else str(error)

    def kill(self) -> None:
        self._over.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _ended(self) -> list[tuple[int, int]]:
        """Rank and exit code of those that ended too early."""
        codes = [(rank, process.poll()) for rank, process in enumerate(self._processes, 1)]
        return [(rank, code) for rank, code in codes if code]

    def _watch(self) -> None:
        """Report to the group that a rank is gone. If the leader cannot notice, because it is in an exchange, end the command
        here."""
        while not self._over.wait(POLL_S):
            if ended := self._ended():
                self._channel.lose(ended[0][0])
                if self._over.wait(GRACE_S):
                    return
                terminal.fail(_how(self._ended(), len(self._processes)))
                self.kill()
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(RankLost.exit_code)


def _how(ended: Sequence[tuple[int, int]], followers: int) -> str:
    """How the first rank ended; others end because of it, with the exit code of RankLost."""
    rank, code = min(ended, key=lambda one: (one[1] > 0, one[1] == RankLost.exit_code, one[0]))
    how = ending(code) if code < 0 else f"{ending(code)}, see its message above"
    return f"--tensor-parallel {followers + 1}: rank {rank} {how}; nothing was written, run the same command again"
