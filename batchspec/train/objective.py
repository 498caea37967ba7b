"""What a draft head is taught: at each draft step the target's distribution over the draft vocabulary.

loss = sum over steps k of decay^k * mean over places of cross entropy(target's distribution, head's at step k): Li et al. 2025,
arXiv 2503.01840 (training-time test). Places whose likeliest token the head cannot draft are left out, as SpecForge does. What
follows a wrong draft is thrown away by a round, so it can count less: a small head then learns what can be accepted (Hu et al.
2025, GRIFFIN, arXiv 2502.11018, which leaves such places out).
N places, V' draft vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.train.soft_cross_entropy import soft_cross_entropy
from batchspec.train.network import HeadNetwork
from batchspec.train.teacher import Lesson

_CHUNK = 16384
"""Places whose logits are in memory at once."""


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over places of weight * cross entropy(probs, softmax(hidden @ head.T)), and where weighted argmaxes agree.

    hidden [N, H], head [V', H] of one dtype; probs [N, V'] rows of sum 1; best_ids int64 [N] their likeliest columns; weights
    [N]. Returns a scalar and [N] the weight where the head's likeliest column is best_ids, else 0; fp32 at least.
    The gradient is made chunk by chunk on the way forward, so that no logits are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, probs: Tensor, best_ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        nats, hits = torch.empty(2, len(hidden), dtype=wide, device=hidden.device)
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=wide)
        for at in range(0, len(hidden), _CHUNK):
            part = slice(at, at + _CHUNK)
            grad = hidden[part] @ head.t()
            soft_cross_entropy(grad, probs[part], weights[part], best_ids[part], out_loss=nats[part], out_hits=hits[part])
            torch.mm(grad, head, out=grad_hidden[part])
            grad_head += grad.t() @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        ctx.mark_non_differentiable(hits)
        return nats.sum(), hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grads[0].to(grad_hidden.dtype), grad_head * grads[0].to(grad_head.dtype), None, None, None


def draft_loss(network: HeadNetwork, lesson: Lesson, *, ahead: int, decay: float, missed: float = 1.0) -> tuple[Tensor, Tensor]:
    """The loss (a scalar), and fp32 [ahead] the share of places where a draft step and the target agree on the likeliest token.

    missed  what a place counts after an earlier step, from the same place, whose likeliest token was wrong;
            below 1 such places are no agreement

    Place u is learnt by step k at place u-1-k, which has read the tokens up to u (masks for the last k of them, in a parallel
    head). Does not synchronise.
    """
    loss = lesson.known.new_zeros(())
    matches = []
    count, length = lesson.embedded.shape[:2]
    right = lesson.known.new_ones(count * length + 1)  # so far, by where a step stands; the last stands for all before a row
    for k, hidden in enumerate(network(lesson.embedded, lesson.features, ahead)):
        places = lesson.places - 1 - k
        known = lesson.known * (places >= 0)
        at = torch.where(places >= 0, lesson.rows * length + places, count * length)
        reached = right.index_select(0, at)
        total = known.sum().clamp_min(1.0)
        learnt = hidden.flatten(0, 1).index_select(0, at.clamp_max(count * length - 1))
        head = network.lm_head.weight.to(learnt.dtype)
        nats, hits = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
            learnt, head, lesson.probs, lesson.best_ids, known * (missed + (1 - missed) * reached)
        )
        loss = loss + decay**k * nats / total
        agrees = (hits > 0) * reached
        if missed < 1:
            right = right.index_copy(0, at, agrees.to(right.dtype))
        matches.append(agrees.sum() / total)
    return loss, torch.stack(matches).detach()
