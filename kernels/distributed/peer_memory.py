"""The memory of an exchange between GPUs: symmetric buffers of all ranks, counters, and the record of a lost rank.

The buffers are torch's symmetric memory: each rank allocates one and maps those of the others. `barrier.py` describes their
contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from batchspec.kernels.distributed.barrier import FLAG_BYTES, PROGRAMS, STAGES

ALIGNED = 256
POLLS_PER_S = 1_000_000
"""Approximate. A poll is an atomic operation in the rank's own L2 cache and a vote of the program's threads."""


@dataclass(frozen=True, slots=True, eq=False)
class PeerMemory:
    """The memory of one rank. The launches that use it run one after the other; others, which may overlap, need another."""

    rank: int
    ranks: int
    num_bytes: int
    """Maximum number of bytes that a rank contributes to one exchange."""
    addresses: Tensor
    """int64 [ranks]: the addresses of all ranks' symmetric buffers in this process."""
    epochs: Tensor
    """int64 [PROGRAMS]: number of exchanges so far, the same for every program."""
    failed: Tensor
    """int64 [1]: 0, or 1 + the rank that did not arrive."""
    report: Tensor
    """The same in host memory, which the host reads without waiting for the GPU."""
    spins: int
    """Polls after which a program gives up."""
    buffer: Any = None
    """A reference that keeps the symmetric buffers alive."""

    def lost(self) -> int | None:
        """The rank that did not arrive at an exchange in time, or None. After a lost rank all outputs are undefined.

        Read it after a synchronisation with the launches whose outputs are to be used.
        """
        return int(self.report[0]) - 1 if self.report[0] else None


def buffer_bytes(ranks: int, num_bytes: int) -> int:
    """Size of a symmetric buffer: flags, and for exchanges with even and with odd numbers a region for every stage."""
    return ranks * FLAG_BYTES + 2 * STAGES * num_bytes


def peer_memory(rank: int, ranks: int, num_bytes: int, addresses: Tensor, *, limit_s: float, buffer: Any = None) -> PeerMemory:
    """Counters for existing buffers: `addresses` of zeroed memory of `buffer_bytes`, on the device that is to use it."""
    if ranks < 2 or ranks & (ranks - 1):
        raise ValueError(f"exchanges are between 2, 4, 8 .. ranks, not {ranks}")
    if num_bytes % 16:
        raise ValueError(f"num_bytes {num_bytes} must be a multiple of 16")
    device = addresses.device
    report = torch.zeros(1, dtype=torch.int64)
    return PeerMemory(
        rank=rank,
        ranks=ranks,
        num_bytes=num_bytes,
        addresses=addresses,
        epochs=torch.zeros(PROGRAMS, dtype=torch.int64, device=device),
        failed=torch.zeros(1, dtype=torch.int64, device=device),
        report=report.pin_memory() if device.type == "cuda" else report,
        spins=max(1, int(limit_s * POLLS_PER_S)),
        buffer=buffer,
    )


def connect(num_bytes: int, device: torch.device, group: dist.ProcessGroup, *, limit_s: float) -> PeerMemory:
    """Allocate symmetric buffers; every rank of the group calls it with the same size.

    num_bytes  maximum that a rank contributes to one exchange; rounded up
    group      of any backend: what is exchanged here is on the host
    limit_s    approximate number of seconds that a rank waits for the others in an exchange

    Takes 4 * num_bytes of the GPU's memory. Raises RuntimeError if GPUs cannot read each other's memory, or a rank has ended.
    Two ranks on one GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1; they run in turns, which only tests do.
    """
    import torch.distributed._symmetric_memory as symmetric  # takes a while to import, and is not in every build of torch

    num_bytes = -(-num_bytes // ALIGNED) * ALIGNED
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    buffer = symmetric.empty(buffer_bytes(ranks, num_bytes), dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(buffer, group)
    buffer.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)  # a flag that another rank sends before the zeros would be lost
    inside = buffer.data_ptr() - handle.buffer_ptrs[rank]
    addresses = torch.tensor([address + inside for address in handle.buffer_ptrs], dtype=torch.int64, device=device)
    return peer_memory(rank, ranks, num_bytes, addresses, limit_s=limit_s, buffer=(buffer, handle))
