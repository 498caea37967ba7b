"""Exchanges between GPUs of one machine, which can be captured in a CUDA graph: kernels that read the other GPUs' memory.

Rounds have buffers that their graphs read; prefill passes have larger ones of their own. What is larger than the buffers
goes through NCCL, and between ranks that share one GPU, which NCCL refuses, through main memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from batchspec.distributed.collectives import Collectives
from batchspec.errors import ConfigError, RankLost
from batchspec.kernels.distributed import exchange
from batchspec.kernels.distributed.head_norms import head_norms
from batchspec.kernels.distributed.peer_memory import PeerMemory, connect
from batchspec.kernels.distributed.reduce_norm import reduce, reduce_norm, reduce_norm_fp8, reduce_reference
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens
from batchspec.kernels.norm_rope.norm import add_norm
from batchspec.tuning.exchange import LIBRARY_BYTES, takes_two_shots

WAIT_S = 300.0
"""Seconds, about, that a kernel waits for another rank, which may compile kernels meanwhile. The parent ends a group whose rank
died long before."""
NARROW = 256
"""Rows of fewer columns are added up as one long vector."""
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


@dataclass(slots=True, eq=False)
class Lane:
    """What exchanges of one stream use."""

    peers: PeerMemory | None = None
    """None: not reserved yet."""
    group: dist.ProcessGroup | None = None
    """Of NCCL; None: the ranks share a GPU."""


class PeerCollectives(Collectives):
    """Exchanges between ranks whose tensors are on GPUs. Those of tensors on the CPU, and those that no buffer is reserved for,
    go through NCCL or main memory.

    Made by all ranks after their rendezvous over gloo, which is the default process group.
    """

    def __init__(self, host: Collectives, device: torch.device, *, wait_s: float = WAIT_S, nccl_s: float) -> None:
        """
        host    the same ranks' exchanges of tensors on the CPU
        device  this rank's GPU, with its index
        wait_s  seconds, about, after which a kernel gives up waiting for another rank
        nccl_s  seconds that an exchange over NCCL may take from its launch; then torch aborts the process (SIGABRT)
        Raises ConfigError unless there are 2, 4 or 8 ranks.
        """
        super().__init__(host.rank, host.ranks)
        if host.ranks not in LIBRARY_BYTES:
            raise ConfigError(f"cluster.tensor_parallel={host.ranks} on GPUs: must be one of {sorted(LIBRARY_BYTES)}")
        os.environ.update(NO_MULTICAST)
        self._host, self._device, self._wait_s = host, device, wait_s
        self._interpret = device.type != "cuda"  # in tests alone
        shared = self._interpret or int(host.gather(torch.tensor([device.index])).unique().numel()) < host.ranks
        if shared:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self._rounds, self._passes = (
            Lane(group=None if shared else dist.new_group(backend="nccl", timeout=timedelta(seconds=nccl_s))) for _ in range(2)
        )
        self._lane = self._rounds

    def reserve(self, round_bytes: int) -> None:
        """Make buffers for exchanges of rounds of at most so many bytes a rank, and for those of prefill.

        All ranks call it with the same number, before any graph is captured: later calls with more make the graphs invalid.
        Takes 4 * round_bytes of the GPU's memory, and 64 or 128 MiB for prefill.
        """
        for lane, num_bytes in ((self._rounds, round_bytes), (self._passes, LIBRARY_BYTES[self.ranks])):
            if lane.peers is None or lane.peers.num_bytes < num_bytes:
                lane.peers = self._connect(num_bytes)

    def _connect(self, num_bytes: int) -> PeerMemory:
        group = dist.group.WORLD
        assert group is not None
        with self._host.waiting():
            return connect(num_bytes, self._device, group, limit_s=self._wait_s)

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        before, self._lane = self._lane, self._passes
        try:
            yield
        finally:
            self._lane = before

    def check(self) -> None:
        for lane in (self._rounds, self._passes):
            if lane.peers is not None and (lost := lane.peers.lost()) is not None:
                raise RankLost(
                    f"rank {self.rank}: rank {lost} of its group did not come to an exchange within {self._wait_s:.0f} s; "
                    "run the same command again to go on"
                )

    def gather(self, x: Tensor) -> Tensor:
        if x.device.type != self._device.type:
            return self._host.gather(x)
        x = x.contiguous()
        found = x.new_empty((self.ranks, *x.shape))
        peers = self._peers(x)
        if peers is not None:
            exchange.gather(x, peers, out=found, interpret=self._interpret)
        elif self._lane.group is not None:
            dist.all_gather_into_tensor(found.view(-1), x.view(-1), group=self._lane.group)
        else:
            found.copy_(self._host.gather(x.cpu()))
        return found

    def broadcast(self, x: Tensor) -> None:
        if x.device.type != self._device.type:
            self._host.broadcast(x)
        elif self._lane.group is not None:
            dist.broadcast(x, src=0, group=self._lane.group)
        else:
            given = x.cpu()
            self._host.broadcast(given)
            x.copy_(given)

    def sum(self, x: Tensor) -> Tensor:
        if x.device.type != self._device.type:
            return self._host.sum(x)
        peers = self._peers(x)
        if peers is None:
            return self._library_sum(x.contiguous())
        if x.dim() == 2 and x.shape[1] >= NARROW and x.stride(1) == 1:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            reduce(x, peers, out=out, two_shot=self._two_shot(x), interpret=self._interpret)
            return out
        x = x.contiguous()
        out = torch.empty_like(x)
        exchange.sum_of_ranks(x, peers, out=out, interpret=self._interpret)
        return out

    def add_norm(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, out_aux: Tensor | None
    ) -> None:
        peers = self._peers(partial)
        if peers is None:
            add_norm(self.sum(partial), residual, weight, eps, out=out, out_aux=out_aux)
        else:
            reduce_norm(
                partial, residual, weight, eps, peers, out=out, out_aux=out_aux, two_shot=self._two_shot(partial),
                interpret=self._interpret,
            )

    def add_norm_fp8(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, form: Fp8Form, *, out_aux: Tensor | None
    ) -> Fp8Tokens:
        peers = self._peers(partial)
        if peers is None:
            return super().add_norm_fp8(partial, residual, weight, eps, form, out_aux=out_aux)
        return reduce_norm_fp8(
            partial, residual, weight, eps, form, peers, out_aux=out_aux, two_shot=self._two_shot(partial),
            interpret=self._interpret,
        )

    def norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> None:
        peers = self._peers(qkv[:, :2], max(4, qkv.element_size()))
        if peers is None:
            super().norm_heads(qkv, q_norm, k_norm, eps)
        else:
            head_norms(qkv, q_norm, k_norm, eps, peers, interpret=self._interpret)

    def best(self, scores: Tensor, ids: Tensor, *, flag_nonfinite: bool = False) -> Tensor:
        peers = self._peers(scores, max(4, scores.element_size()))
        if peers is None:
            return super().best(scores, ids, flag_nonfinite=flag_nonfinite)
        out = torch.empty_like(ids)
        exchange.best_of_ranks(
            scores.contiguous(), ids.contiguous(), peers, out_ids=out, flag_nonfinite=flag_nonfinite, interpret=self._interpret
        )
        return out

    def _peers(self, x: Tensor, value_bytes: int | None = None) -> PeerMemory | None:
        """The buffers that an exchange of x uses; None: x is on the CPU, or larger than the buffers.

        value_bytes  size of a value as it is exchanged, if it is not that of x
        """
        peers = self._lane.peers
        size = x.numel() * (value_bytes or x.element_size())
        return peers if peers is not None and x.device.type == self._device.type and size <= peers.num_bytes else None

    def _two_shot(self, x: Tensor) -> bool:
        return takes_two_shots(self.ranks, x.numel() * x.element_size())

    def _library_sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks by NCCL or Gloo, for any size, with the same bits as the kernels' sum."""
        group = self._lane.group
        if group is None:
            return super().sum(x)
        if self.ranks == 2:  # a + b rounded once is b + a: the library has no other order
            total = x.clone()
            dist.all_reduce(total, group=group)
            return total
        # With more ranks NCCL adds up each part of the tensor in another order. So each rank adds up one part of all tensors.
        width = -(-x.numel() // self.ranks)
        padded = torch.nn.functional.pad(x.view(-1), (0, width * self.ranks - x.numel()))
        parts = torch.empty_like(padded)
        dist.all_to_all_single(parts, padded, group=group)
        dist.all_gather_into_tensor(padded, reduce_reference(parts.view(self.ranks, width)), group=group)
        return padded[: x.numel()].view(x.shape)
