"""A process of a group that computes one model: it takes its seat, then leads or follows. Only `run_rank` imports torch."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from batchspec.errors import RankLost
from batchspec.job.supervise.watchdog import Watchdog, limit_s, nccl_s
from batchspec.process.child_process import act_when_parent_ends

if TYPE_CHECKING:
    from batchspec.config.schema import RunConfig
    from batchspec.distributed.group import Group
    from batchspec.distributed.seat import Seat


def take_seat(config: RunConfig, seat: Seat, when_parent_ends: Callable[[], object]) -> None:
    """What a rank does first: SIGABRT prints its stacks, and `when_parent_ends` is called then.

    Without packing.memory_gb it takes its share of the main memory.
    """
    faulthandler.enable()
    act_when_parent_ends(when_parent_ends)
    if seat.sharing > 1 and config.packing.memory_gb is None:
        from batchspec.packing.device_memory import host_share

        config.packing.memory_gb = host_share() / seat.sharing / 1e9


def run_rank(
    config: RunConfig, seat: Seat, lead: Callable[[Group, Watchdog], None] | None = None, *,
    advice: str = "run the same command again to go on",
) -> None:
    """Join the group, which rank 0 leads; the other ranks execute what it sends until it is done.

    lead    what rank 0 does; the others need none
    advice  the end of the watchdog's last message
    Raises RankLost; in rank 0 what `lead` raises; in the others CapacityError, and what opening the model raises.
    """
    import torch

    from batchspec.distributed.group import joined
    from batchspec.engine.ranks.lead import Lead
    from batchspec.engine.ranks.messages import End
    from batchspec.job.runner.follower import run_follower

    gpu, channel = config.device != "cpu" and torch.cuda.is_available(), seat.channel()
    # Not earlier: importing torch may hold the GIL for longer than the watchdog's limit.
    channel.start_liveness_thread()
    watchdog_s = limit_s(config.cluster.watchdog_s, gpu=gpu)
    watchdog = Watchdog(watchdog_s, lost=channel.is_lost, loads=channel, has_parent=True, advice=advice)
    watchdog.begin_loading()  # the ranks wait for each other without a limit of their own
    with watchdog.watching(), joined(seat, gpu=gpu, nccl_s=nccl_s(watchdog_s)) as group:
        if seat.rank:
            run_follower(config, group, watchdog)
            return
        assert lead is not None
        try:
            lead(group, watchdog)
        finally:
            with suppress(RankLost):
                Lead(group.channel).send(End())
