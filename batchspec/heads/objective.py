"""The training objective of a draft head: the target's distribution over the draft vocabulary, at many positions.

N positions, V' draft vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchspec.heads.teacher import Distributions
from batchspec.kernels.train.soft_cross_entropy import soft_cross_entropy

_CHUNK, _LOGITS = 16384, 2**29
"""Number of positions whose logits are in memory at once, and of these logits, whichever is reached first."""


def positions_at_once(vocab_size: int) -> int:
    """Number of positions whose logits over so many tokens are in memory at once."""
    return max(1, min(_CHUNK, _LOGITS // vocab_size))


class ChosenPositions:
    """The distributions at some of the trained positions."""

    def __init__(self, probs: Distributions, at: Tensor) -> None:
        """at  int64 [n] indices of trained positions"""
        self._probs, self._at = probs, at

    def __getitem__(self, part: slice) -> Tensor:
        assert isinstance(self._probs, Tensor), "the distributions of heads with an lm_head are stored"
        return self._probs.index_select(0, self._at[part])


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over positions of weight * cross entropy(probs, softmax(hidden @ head.T)), and the positions at which argmaxes agree.

    hidden [N, H] and head [V', H] of one dtype; probs [N, V'], rows of sum 1; best_ids int64 [N], the argmax of each row of
    probs; weights [N]. Returns the scalar loss, and [N] the weight if the head's argmax is best_ids, else 0; fp32 or fp64.
    share, out_distance  the distance of the distributions has this share of the loss, as in the kernel, and is written to [N]
    The forward pass computes the gradient chunk by chunk, so that no logits are stored; that of `head` only if it is trained.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, probs: Distributions, best_ids: Tensor, weights: Tensor, share: float = 0.0,
        out_distance: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        nats, hits = torch.empty(2, len(hidden), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        at_once = positions_at_once(len(head))
        for at in range(0, len(hidden), at_once):
            part = slice(at, at + at_once)
            grad = hidden[part] @ head.t()
            soft_cross_entropy(
                grad, probs[part], weights[part], best_ids[part], out_loss=nats[part], out_hits=hits[part], share=share,
                out_distance=None if out_distance is None else out_distance[part],
            )
            torch.mm(grad, head, out=grad_hidden[part])
            if grad_head is not None:
                grad_head += grad.t() @ hidden[part]
        ctx.save_for_backward(grad_hidden, None if grad_head is None else grad_head.to(head.dtype))
        ctx.mark_non_differentiable(hits)
        return nats.sum(), hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        of_head = None if grad_head is None else grad_head * grads[0].to(grad_head.dtype)
        return grad_hidden * grads[0].to(grad_hidden.dtype), of_head, None, None, None, None, None
