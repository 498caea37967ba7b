"""The training objective of a draft head: the target's distribution over the draft vocabulary, at each draft step.

loss = sum over steps k of decay^k * mean over positions of cross entropy(target's distribution, head's at step k): Li et al.
2025, arXiv 2503.01840 (training-time test). Positions at which the target's likeliest token is not in the draft vocabulary are
left out, as SpecForge does. A round discards the drafts after a wrong one, so positions after a wrong draft can have a lower
weight: a small head then learns more of what can be accepted (Hu et al. 2025, GRIFFIN, arXiv 2502.11018, leaves these positions
out). N trained positions, V' draft vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchspec.heads.draft_network import DraftNetwork
from batchspec.heads.teacher import Distributions, TrainingBatch
from batchspec.kernels.train.soft_cross_entropy import soft_cross_entropy

_CHUNK, _LOGITS = 16384, 2**29
"""Number of positions whose logits are in memory at once, and of these logits, whichever is reached first."""


def positions_at_once(vocab_size: int) -> int:
    """Number of positions whose logits over so many tokens are in memory at once."""
    return max(1, min(_CHUNK, _LOGITS // vocab_size))


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over positions of weight * cross entropy(probs, softmax(hidden @ head.T)), and the positions at which argmaxes agree.

    hidden [N, H] and head [V', H] of one dtype; probs [N, V'], rows of sum 1; best_ids int64 [N], the argmax of each row of
    probs; weights [N]. Returns the scalar loss, and [N] the weight if the head's argmax is best_ids, else 0; fp32 or fp64.
    The forward pass computes the gradient chunk by chunk, so that no logits are stored; that of `head` only if it is trained.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, probs: Distributions, best_ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        nats, hits = torch.empty(2, len(hidden), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        at_once = positions_at_once(len(head))
        for at in range(0, len(hidden), at_once):
            part = slice(at, at + at_once)
            grad = hidden[part] @ head.t()
            soft_cross_entropy(grad, probs[part], weights[part], best_ids[part], out_loss=nats[part], out_hits=hits[part])
            torch.mm(grad, head, out=grad_hidden[part])
            if grad_head is not None:
                grad_head += grad.t() @ hidden[part]
        ctx.save_for_backward(grad_hidden, None if grad_head is None else grad_head.to(head.dtype))
        ctx.mark_non_differentiable(hits)
        return nats.sum(), hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        of_head = None if grad_head is None else grad_head * grads[0].to(grad_head.dtype)
        return grad_hidden * grads[0].to(grad_hidden.dtype), of_head, None, None, None


def draft_loss(
    network: DraftNetwork, batch: TrainingBatch, *, ahead: int, decay: float, missed: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The scalar loss, and fp32 [ahead] the share of positions at which each draft step agrees with the target on the likeliest
    token.

    missed  weight of a position after an earlier step of the same draft whose likeliest token was wrong; below 1 such positions
            do not count as agreement

    The target position u is predicted by step k at position u-1-k, which has read the tokens up to u (in a parallel head, mask
    tokens in place of the last k). Does not synchronise.
    """
    loss = batch.known.new_zeros(())
    matches = []
    count, length = batch.embedded.shape[:2]
    # Whether all drafts so far were right, by position of the head. The last entry is for positions before the row's start.
    right = batch.known.new_ones(count * length + 1)
    for k, hidden in enumerate(network(batch.embedded, batch.features, ahead)):
        positions = batch.positions - 1 - k
        known = batch.known * (positions >= 0)
        at = torch.where(positions >= 0, batch.rows * length + positions, count * length)
        reached = right.index_select(0, at)
        total = known.sum().clamp_min(1.0)
        learnt = hidden.flatten(0, 1).index_select(0, at.clamp_max(count * length - 1))
        head = network.output_matrix.to(learnt.dtype)
        nats, hits = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
            learnt, head, batch.probs, batch.best_ids, known * (missed + (1 - missed) * reached)
        )
        loss = loss + decay**k * nats / total
        agrees = (hits > 0) * reached
        if missed < 1:
            right = right.index_copy(0, at, agrees.to(right.dtype))
        matches.append(agrees.sum() / total)
    return loss, torch.stack(matches).detach()
