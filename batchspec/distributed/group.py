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
from batchspec.process.out_of_memory import within_memory

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
        return min(self.numbers(number))

    def numbers(self, own: int) -> list[int]:
        """The numbers that all ranks pass, by rank."""
        return self.collectives.gather(torch.tensor([own])).flatten().tolist()


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
    Raises RankLost; CapacityError if memory runs out, as on a GPU that other programs fill; ConfigError for an unsupported number
    of ranks on GPUs, or GPUs that cannot exchange.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    channel = seat.channel()
    try:
        channel.meet()
        with within_memory(f"rank {seat.rank} joined its group", "free memory of its GPU and run the same command again"):
            collectives = _collectives(seat, channel, gpu=gpu, limit_s=limit_s, nccl_s=nccl_s)
        yield Group(channel, collectives, seat.rank, seat.ranks)
    except RankLost:
        channel.tell_waiting(True)  # also where the host does not see the wait, as in a kernel
        channel.check_soon()  # says which rank is gone; what failed because of that says less
        raise


def _collectives(seat: Seat, channel: Channel, *, gpu: bool, limit_s: float, nccl_s: float) -> Collectives:
    host = GlooCollectives(seat.rank, seat.ranks, seat.rendezvous_file, limit_s=limit_s, waiting=channel.waiting)
    if not gpu:
        return host
    check_reach(range(min(seat.ranks, torch.cuda.device_count())))
    torch.cuda.set_device(seat.rank % torch.cuda.device_count())  # in tests ranks may share one
    device = torch.device("cuda", torch.cuda.current_device())
    return PeerCollectives(host, device, nccl_s=min(nccl_s, EXCHANGE_S))
