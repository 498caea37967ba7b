"""One worker process: `python -m batchspec.cluster.worker NUMBER SHARING SEAT`, started by crew.py.

NUMBER is for readers of `ps`; SHARING is the number of processes whose K/V pages share the main memory (1 on GPUs). SEAT, four
arguments, is the process's rank in the group that computes the model, and how it reaches the other ranks (`distributed/seat.py`).
A group may have one process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from batchspec.cli import guarded
from batchspec.config.compose import reported
from batchspec.config.typed import from_json
from batchspec.distributed.channel import Channel
from batchspec.distributed.seat import Seat
from batchspec.errors import Interrupted, RankLost
from batchspec.run import run_here
from batchspec.supervise.leave import leave
from batchspec.supervise.signals import SIGNALS
from batchspec.supervise.watchdog import Watchdog, limit_s, nccl_s

if TYPE_CHECKING:
    from batchspec.config.schema import RunConfig

ORPHAN_S = 60.0
"""Seconds after which a follower ends whose parent is gone; its leader saves its work in this time."""


def main() -> int:
    """Run the job whose configuration is the first line of standard input; returns the exit code."""
    config = from_json(sys.stdin.readline())
    sharing, seat = int(sys.argv[2]), Seat.of(sys.argv[3:])
    if sharing > 1 and config.packing.memory_gb is None:
        from batchspec.packing.planner import host_share

        config.packing.memory_gb = host_share() / sharing / 1e9
    follows = seat.rank > 0
    faulthandler.enable()  # SIGABRT prints the stacks
    if follows:  # the leader ends when it is asked to, and then ends its group
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(follows,), daemon=True).start()
    if seat.ranks == 1:
        return reported(lambda: run_here(config, parent=Channel.of(seat)))
    return reported(lambda: run_rank(config, seat))


def run_rank(config: RunConfig, seat: Seat) -> int:
    """Lead or follow; returns the exit code."""
    import torch

    from batchspec.distributed.group import joined
    from batchspec.engine.ranks.lead import Lead
    from batchspec.engine.ranks.messages import End
    from batchspec.runner.follower import run_follower

    gpu, channel = config.device != "cpu" and torch.cuda.is_available(), Channel.of(seat)
    # Not earlier: importing torch may hold the GIL for longer than the watchdog's limit.
    channel.start_liveness_thread()
    watchdog_s = limit_s(config.cluster.watchdog_s, gpu=gpu)
    watchdog = Watchdog(watchdog_s, lost=channel.is_lost, loads=channel, has_parent=True)
    watchdog.begin_loading()  # the ranks wait for each other without a limit of their own
    try:
        with watchdog.watching(), joined(seat, gpu=gpu, nccl_s=nccl_s(watchdog_s)) as group:
            if seat.rank:
                run_follower(config, group, watchdog)
                return 0
            try:
                run_here(config, group, watchdog=watchdog)
            finally:
                with suppress(RankLost):
                    Lead(group.channel).send(End())
    except RankLost:
        if seat.rank == 0:
            raise
        return Interrupted.exit_code  # the parent says which rank is gone
    return 0


def _watch(follows: bool) -> None:
    """Save the work and end when the parent is gone: it keeps the other end of standard input open while it lives."""
    while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    if follows:
        time.sleep(ORPHAN_S)
        os._exit(Interrupted.exit_code)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    leave(guarded(main))
