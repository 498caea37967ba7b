"""Exchanges between the ranks that compute one model together. Every result has the same bits on all ranks.

The ranks call the same methods in the same order, with tensors of the same shapes and dtypes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from batchspec.errors import RankLost
from batchspec.kernels.distributed.exchange import best_of_ranks_reference
from batchspec.kernels.distributed.head_norms import head_norms_reference, mean_squares
from batchspec.kernels.distributed.reduce_norm import reduce_reference
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens
from batchspec.kernels.norm_rope.norm import add_norm
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8


class Collectives(ABC):
    """One process's end of the exchanges. A process that computes a model alone has none."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """x of every rank, [ranks, *x.shape], in the order of ranks."""

    def broadcast(self, x: Tensor) -> None:
        """Write rank 0's x, which is contiguous, to that of every other rank."""
        x.copy_(self.gather(x)[0])

    def sum(self, x: Tensor) -> Tensor:
        """x of all ranks added up in the order of ranks, in fp32 (fp64 for fp64), rounded once to the dtype of x.

        A communication library adds up in an order that depends on the tensor's size and on the place in it. With its sum, the
        bits of a token would depend on the other tokens of the batch.
        """
        return reduce_reference(self.gather(x))

    def add_norm(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, out_aux: Tensor | None
    ) -> None:
        """Add the sum of `partial` [T, H] to residual in place, copy that to out_aux where given, and write its norm to out.

        As `batchspec.kernels.norm_rope.norm.add_norm` of `sum`, with the same bits.
        """
        add_norm(self.sum(partial), residual, weight, eps, out=out, out_aux=out_aux)

    def add_norm_fp8(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, form: Fp8Form, *, out_aux: Tensor | None
    ) -> Fp8Tokens:
        """`add_norm`, its result quantised as a product wants it.

        As `batchspec.kernels.norm_rope.norm_fp8.norm_fp8` of `sum`, with the same bits.
        """
        return norm_fp8(self.sum(partial), residual, weight, eps, form, out_aux=out_aux, interpret=not partial.is_cuda)

    def norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> None:
        """Norm q and k of each token in place, each over the heads of all ranks.

        As `batchspec.kernels.distributed.head_norms.head_norms`: qkv [T, (NH + 2 * KVH) * D], q_norm [NH * D], k_norm [KVH * D],
        all of this rank's heads. Ranks have equal numbers of heads.
        """
        means = self.sum(mean_squares(qkv, len(q_norm), len(k_norm))) / self.ranks
        head_norms_reference(qkv, q_norm, k_norm, eps, means)

    def best(self, scores: Tensor, ids: Tensor, *, flag_nonfinite: bool = False) -> Tensor:
        """int32 [T]: the id of the largest score of all ranks, the lowest id of equals.

        scores [T] without NaN, ids int32 [T]: of this rank
        flag_nonfinite  NO_TOKEN where the largest score is not finite
        """
        return best_of_ranks_reference(self.gather(scores), self.gather(ids), flag_nonfinite=flag_nonfinite)

    def reserve(self, round_bytes: int) -> None:
        """Prepare for exchanges of rounds of at most so many bytes, the same number on all ranks; before rounds are captured."""
        return

    def prefilling(self) -> AbstractContextManager[None]:
        """Exchanges within this block are those of a prefill pass: larger than those of rounds, and in no graph."""
        return nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """Within this block the rank waits for the others in a call of a library; its parent may ask for that."""
        return nullcontext()

    def check(self) -> None:
        """Raises RankLost if an exchange on the GPU has failed: called after the host has read results, before it uses them."""
        return


class GlooCollectives(Collectives):
    """Over gloo, for tensors on the CPU. A process has one; ranks of a machine need GLOO_SOCKET_IFNAME=lo, because gloo otherwise
    looks for an interface that the machine's name resolves to.

    Raises RankLost when a rank is gone or does not come within the time limit.
    """

    def __init__(
        self, rank: int, ranks: int, rendezvous: Path, *, limit_s: float,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        rendezvous  the file in which the ranks find each other, on a local disk or in memory
        limit_s     seconds that an exchange may take
        waiting     tells the parent of the ranks that this one waits, within its block
        """
        super().__init__(rank, ranks)
        self._waiting, limit = waiting, timedelta(seconds=limit_s)
        with _reported(rank), waiting():
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous.absolute()}", rank=rank, world_size=ranks, timeout=limit
            )

    def gather(self, x: Tensor) -> Tensor:
        found = x.new_empty((self.ranks, *x.shape))
        if x.numel():
            with _reported(self.rank), self.waiting():
                dist.all_gather(list(found.unbind(0)), x.contiguous())
        return found

    def broadcast(self, x: Tensor) -> None:
        if x.numel():
            with _reported(self.rank), self.waiting():
                dist.broadcast(x, src=0)

    def waiting(self) -> AbstractContextManager[None]:
        return self._waiting()


@contextmanager
def _reported(rank: int) -> Iterator[None]:
    """Within this block an error of the library is one about the other ranks."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError among them
        said = " ".join(str(error).split())[:200]
        raise RankLost(
            f"rank {rank}: an exchange with the other ranks of its group failed ({said}); run the same command again to go on"
        ) from None
