"""What a draft head is taught: at each draft step the target's distribution over the draft vocabulary.

loss = sum over steps k of decay^k * mean over places of cross entropy(target's distribution, head's at step k): Li et al. 2025,
arXiv 2503.01840 (training-time test). Places whose likeliest token the head cannot draft are left out, as SpecForge does.
N places, V' draft vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.distil import distil
from batchspec.train.network import HeadNetwork
from batchspec.train.teacher import Lesson

_CHUNK = 16384
"""Places whose logits are in memory at once."""


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over places of weight * cross entropy(probs, softmax(hidden @ head.T)), and how many weighted argmaxes agree.

    hidden [N, H], head [V', H] of one dtype; probs [N, V'] rows of sum 1; best_ids int64 [N] their likeliest columns; weights
    [N].
    Returns two scalars, fp32 at least. The gradient is made chunk by chunk on the way forward, so that no logits are kept.
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
            distil(grad, probs[part], weights[part], best_ids[part], out_nats=nats[part], out_hits=hits[part])
            torch.mm(grad, head, out=grad_hidden[part])
            grad_head += grad.t() @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        total = hits.sum()
        ctx.mark_non_differentiable(total)
        return nats.sum(), total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grads[0].to(grad_hidden.dtype), grad_head * grads[0].to(grad_head.dtype), None, None, None


def draft_loss(network: HeadNetwork, lesson: Lesson, *, ahead: int, decay: float) -> tuple[Tensor, Tensor]:
    """The loss (a scalar), and per draft step the share of places where head and target agree on the likeliest, fp32 [ahead].

    Place u is learnt by step k at place u-1-k, which has read the tokens up to u (masks for the last k of them, in a parallel
    head). Does not synchronise.
    """
    loss = lesson.known.new_zeros(())
    matches = []
    length = lesson.embedded.shape[1]
    for k, hidden in enumerate(network(lesson.embedded, lesson.features, ahead)):
        places = lesson.places - 1 - k
        weights = lesson.known * (places >= 0)
        total = weights.sum().clamp_min(1.0)
        learnt = hidden.flatten(0, 1).index_select(0, lesson.rows * length + places.clamp_min(0))
        head = network.lm_head.weight.to(learnt.dtype)
        nats, hits = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
            learnt, head, lesson.probs, lesson.best_ids, weights
        )
        loss = loss + decay**k * nats / total
        matches.append(hits / total)
    return loss, torch.stack(matches).detach()
