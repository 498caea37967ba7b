"""One worker process: `python -m batchspec.cluster.worker SEAT NUMBER`, started by crew.py.

SEAT is the process's rank in the group that computes the model, and how it reaches the other ranks (`distributed/seat.py`). A
group may have one process. NUMBER is for readers of `ps`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from batchspec.cli import guarded
from batchspec.config.compose import reported
from batchspec.config.typed import from_json
from batchspec.distributed.seat import Seat
from batchspec.errors import Interrupted, RankLost
from batchspec.job.runner.rank import run_rank, take_seat
from batchspec.process.first_signals import SIGNALS
from batchspec.process.program import begin_program, end_program
from batchspec.run import run_here

if TYPE_CHECKING:
    from batchspec.config.schema import RunConfig

ORPHAN_S = 60.0
"""Seconds after which a follower ends whose parent is gone; its leader saves its work in this time."""


def main() -> int:
    """Run the job whose configuration is the first line of standard input; returns the exit code."""
    begin_program()
    config, (seat, _) = from_json(sys.stdin.readline()), Seat.of(sys.argv[1:])
    if seat.rank:  # the leader ends when it is asked to, and then ends its group
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    take_seat(config, seat, _follower_ends if seat.rank else _save_and_end)
    if seat.ranks == 1:
        return reported(lambda: run_here(config, parent=seat.channel()))
    return reported(lambda: run(config, seat))


def run(config: RunConfig, seat: Seat) -> int:
    """Lead or follow; returns the exit code."""
    try:
        run_rank(config, seat, lambda group, watchdog: run_here(config, group, watchdog=watchdog))
    except RankLost:
        if seat.rank == 0 or not seat.channel().is_lost():
            raise
        return Interrupted.exit_code  # the parent says which rank is gone
    return 0


def _save_and_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _follower_ends() -> None:
    time.sleep(ORPHAN_S)
    os._exit(Interrupted.exit_code)


if __name__ == "__main__":
    end_program(guarded(main))
