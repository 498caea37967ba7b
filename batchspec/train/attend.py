"""Attention of the later draft steps: all keys of the first step up to the place, and of each later step its own place's alone.

The first part is plain causal attention, the second J single keys a query, merged by log-sum-exp:

    out = a * causal + sum_j p_j v_j      p_j = exp(q k_j / sqrt(D) - lse)      a = exp(lse of the causal part - lse)

No scores of pairs are kept: the way back of causal attention, given the merged output and its lse, makes its keys' gradients
under the whole softmax, as in ring attention (Liu et al. 2023, arXiv 2310.01889).
B rows, NH heads, L places, D head_dim, J later steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_aten = torch.ops.aten
_NARROW = (torch.bfloat16, torch.float16)


def attend(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
    """q, k, v [B, NH, L, D] of one dtype; own_k, own_v [J, B, NH, L, D] -> [B, NH, L, D].

    A GPU has the fast way for bf16 and fp16 alone, and for head sizes that are multiples of 8; the rest is plain products.
    """
    if q.is_cuda and (q.dtype not in _NARROW or q.shape[-1] % 8):
        # Scores of all pairs are made again on the way back: kept, those of all steps would fill the memory.
        out: Tensor = checkpoint(attend_reference, q, k, v, own_k, own_v, use_reentrant=False)
        return out
    merged: Tensor = _Merged.apply(q, k, v, own_k, own_v)  # type: ignore[no-untyped-call]
    return merged


def attend_reference(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
    """The same by its definition: scores of all pairs."""
    length, wide = q.shape[2], torch.promote_types(q.dtype, torch.float32)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    scores = (q @ k.transpose(-1, -2)).masked_fill(later, -torch.inf)
    own = (q * own_k).sum(-1).movedim(0, -1)
    weights = (torch.cat([scores, own], -1).to(wide) * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    out: Tensor = weights[..., :length] @ v + (weights[..., length:].movedim(-1, 0).unsqueeze(-1) * own_v).sum(0)
    return out


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        causal, lse, seeds = _causal(q, k, v)
        scores = _scores(q, own_k)
        merged = torch.logaddexp(lse.to(scores.dtype), scores.logsumexp(0))
        weights = (scores - merged).exp().unsqueeze(-1)
        share = (lse.to(scores.dtype) - merged).exp().unsqueeze(-1)
        out = (share * causal + (weights * own_v).sum(0)).to(q.dtype)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, merged.to(lse.dtype), *seeds)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, own_k, own_v, out, lse, *seeds = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_q, grad_k, grad_v = _causal_backward(grad, q, k, v, out, lse, seeds)
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = (_scores(q, own_k) - lse).exp()
        drift = (grad.to(wide) * out).sum(-1)
        grad_scores = (weights * ((grad.to(wide) * own_v).sum(-1) - drift) * q.shape[-1] ** -0.5).unsqueeze(-1)
        grad_q = grad_q + (grad_scores * own_k).sum(0).to(q.dtype)
        return grad_q, grad_k, grad_v, (grad_scores * q).to(q.dtype), (weights.unsqueeze(-1) * grad).to(q.dtype)


def _scores(q: Tensor, own_k: Tensor) -> Tensor:
    """[J, B, NH, L], fp32 at least."""
    scores: Tensor = (q.to(torch.promote_types(q.dtype, torch.float32)) * own_k).sum(-1) * q.shape[-1] ** -0.5
    return scores


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, lse [B, NH, L], and what the way back asks for beside them. torch's own kernels: the public call gives no lse."""
    if q.is_cuda:
        out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        return out, lse, (seed, offset)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return out, lse, ()


def _causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seeds: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    length = q.shape[2]
    if q.is_cuda:
        found = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, length, length, 0.0, True, *seeds
        )
    else:
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    return found[0], found[1], found[2]
