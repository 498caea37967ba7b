"""Peer memory of all ranks in one process, for kernels that Triton interprets, and what the ranks lay down there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.kernels.distributed.barrier import FLAG_BYTES, PROGRAMS, STAGES
from batchspec.kernels.distributed.peer_memory import PeerMemory, buffer_bytes, peer_memory


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """A group whose ranks run one after the other: what a rank is to wait for, others must have laid down before."""

    ends: list[PeerMemory]
    buffers: Tensor
    """uint8 [ranks, bytes]: the symmetric buffers"""

    @classmethod
    def make(cls, ranks: int, num_bytes: int, *, buffers: Tensor | None = None, limit_s: float = 1e-4) -> Peers:
        """limit_s is short: whoever would wait for long waits in vain here."""
        if buffers is None:
            buffers = torch.zeros(ranks, buffer_bytes(ranks, num_bytes), dtype=torch.uint8)
        addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
        return cls(
            [peer_memory(rank, ranks, num_bytes, addresses, limit_s=limit_s, buffer=buffers) for rank in range(ranks)], buffers
        )

    def flags(self, rank: int) -> Tensor:
        """int64 [stages, PROGRAMS, ranks] of a rank's buffer, a view."""
        ranks = len(self.ends)
        return self.buffers[rank, : ranks * FLAG_BYTES].view(torch.int64).view(STAGES, PROGRAMS, ranks)

    def data(self, rank: int, number: int, stage: int, like: Tensor) -> Tensor:
        """What a rank gives to exchange `number` in a stage, as a tensor like another, a view."""
        ranks, size = len(self.ends), self.ends[0].num_bytes
        begin = ranks * FLAG_BYTES + ((number & 1) * 2 + stage) * size
        return self.buffers[rank, begin : begin + like.nbytes].view(like.dtype).view(like.shape)

    def expect(self, number: int) -> None:
        """All ranks have reached exchange `number`, in both stages."""
        for rank in range(len(self.ends)):
            self.flags(rank).fill_(number)
