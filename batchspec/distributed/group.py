"""The group of processes that compute one model together: how a process joins it, and what the group's members share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations

import torch

from batchspec.distributed.channel import Channel
from batchspec.distributed.collectives import Collectives, GlooCollectives
from batchspec.distributed.peer import PeerCollectives
from batchspec.distributed.seat import Seat
from batchspec.errors import ConfigError, RankLost

EXCHANGE_S = 7 * 24 * 3600.0
"""Time limit of an exchange between the ranks of a job: practically none, because ranks of a warm engine idle between calls. The
watchdog, which knows whether there is work, ends hanging ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A group, as one of its ranks sees it."""

    channel: Channel
    collectives: Collectives
    rank: int
    ranks: int

    def least(self, number: int) -> int:
        """The smallest of the numbers that all ranks pass, such as free memory."""
        return int(self.collectives.gather(torch.tensor([number])).min())


def check_reach(gpus: Iterable[int]) -> None:
    """Raises ConfigError unless these GPUs, by index, can read each other's memory, as exchanges between them do."""
    for gpu, other in permutations(gpus, 2):
        if not torch.cuda.can_device_access_peer(gpu, other):
            raise ConfigError(
                f"GPU {gpu} cannot read the memory of GPU {other}, and a model is cut over GPUs that can; choose others by "
                "CUDA_VISIBLE_DEVICES or set cluster.tensor_parallel=1"
            )


@contextmanager
def joined(seat: Seat, *, gpu: bool, limit_s: float = EXCHANGE_S, nccl_s: float) -> Iterator[Group]:
    """The group of this process. Waits until all ranks are there.

    gpu      the model is on GPUs; this rank's becomes the current one
    limit_s  seconds that an exchange over gloo may take
    nccl_s   seconds that an exchange over NCCL may take; infinite: EXCHANGE_S
    Raises RankLost; ConfigError for an unsupported number of ranks on GPUs, or GPUs that cannot exchange.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    channel = seat.channel()
    collectives: Collectives = GlooCollectives(
        seat.rank, seat.ranks, seat.rendezvous_file, limit_s=limit_s, waiting=channel.waiting
    )
    if gpu:
        check_reach(range(min(seat.ranks, torch.cuda.device_count())))
        torch.cuda.set_device(seat.rank % torch.cuda.device_count())  # in tests ranks may share one
        device = torch.device("cuda", torch.cuda.current_device())
        collectives = PeerCollectives(collectives, device, nccl_s=min(nccl_s, EXCHANGE_S))
    try:
        yield Group(channel, collectives, seat.rank, seat.ranks)
    except RankLost:  # also where the host does not see the wait, as in a kernel
        channel.tell_waiting(True)
        raise
