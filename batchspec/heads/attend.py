"""Attention of draft steps: a query attends to all keys of the first step up to its position, and to one key of each later step,
that of its own position.

The first part is plain causal attention; the kernel `draft_step_attention` merges the keys of later steps into it. The score
matrix is never stored: the backward pass of causal attention, given the merged output and log-sum-exp, gives the gradients under
the whole softmax, as in ring attention (Liu et al. 2023, arXiv 2310.01889).
B rows, L positions, H query heads, KVH key heads, D head_dim, J later steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from batchspec.kernels.train.draft_step_attention import draft_step_attention, draft_step_attention_backward

_aten = torch.ops.aten
_NARROW = (torch.bfloat16, torch.float16)


class Keys:
    """Keys and values of one layer in the draft steps so far."""

    def __init__(self) -> None:
        self.first: tuple[Tensor, Tensor] | None = None
        self.later: list[tuple[Tensor, Tensor]] = []
        """[B, L, KVH, D] each"""
        self._side_by_side: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, steps: int) -> None:
        """Add k and v of the next step, out of `steps`: [B, L, KVH, D], or [1, L, KVH, D] if all rows have the same."""
        if self.first is None:
            self.first = (k, v)
            return
        count = self.first[0].shape[0]
        k, v = (part.expand(count, *part.shape[1:]) for part in (k, v))
        if self._side_by_side is None:
            self._side_by_side = k.new_empty(2, steps - 1, *k.shape)
        for part, place in zip((k, v), self._side_by_side[:, len(self.later)], strict=True):
            place.copy_(part.detach())
        self.later.append((k, v))

    @property
    def own(self) -> Tensor:
        """Keys and values of the later steps [2, J, B, L, KVH, D], without gradients. Later additions do not change it."""
        assert self.first is not None
        if self._side_by_side is None:
            k = self.first[0]
            return k.new_empty(2, 0, *k.shape)
        return self._side_by_side[:, : len(self.later)]


def attend(q: Tensor, keys: Keys) -> Tensor:
    """Attention of q [B, L, H, D] of the step whose keys were added last -> [B, L, H, D].

    On a GPU the fast path needs bf16 or fp16 and a head size that is a multiple of 8; otherwise the reference is used.
    """
    assert keys.first is not None
    later = [part for pair in keys.later for part in pair]
    if q.is_cuda and (q.dtype not in _NARROW or q.shape[-1] % 8):
        # The backward pass recomputes the scores: stored, those of all steps would fill the memory.
        out: Tensor = checkpoint(attend_reference, q, *keys.first, *later, use_reentrant=False)
        return out
    merged: Tensor = _Merged.apply(keys.own, q, *keys.first, *later)  # type: ignore[no-untyped-call]
    return merged


def attend_reference(q: Tensor, k: Tensor, v: Tensor, *later: Tensor) -> Tensor:
    """`attend` by definition, with the whole score matrix. k and v are [B, L, KVH, D], of the first step; `later` is k and v
    of each later step, alternating."""
    length, repeats, wide = q.shape[1], q.shape[2] // k.shape[2], torch.promote_types(q.dtype, torch.float32)
    k, v, *later_heads = (part.repeat_interleave(repeats, 2) for part in (k, v, *later))
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    scores = torch.einsum("blhd,bmhd->bhlm", q, k).masked_fill(hidden, -torch.inf)
    own = [(q * part).sum(-1).transpose(1, 2).unsqueeze(-1) for part in later_heads[::2]]
    weights = (torch.cat([scores, *own], -1).to(wide) * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    out = torch.einsum("bhlm,bmhd->blhd", weights[..., :length], v)
    for step, part in enumerate(later_heads[1::2]):
        out = out + weights[..., length + step].transpose(1, 2).unsqueeze(-1) * part
    return out


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, q: Tensor, k: Tensor, v: Tensor, *later: Tensor) -> Tensor:
        out, lse, seeds = _causal(q, k, v)
        if own.shape[1]:
            draft_step_attention(q, out, lse, own, scale=q.shape[-1] ** -0.5, out=out, out_lse=lse)
        ctx.own = own  # not saved for autograd: later steps write to the same buffer, but not to this part
        ctx.save_for_backward(q, k, v, out, lse, *seeds)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *seeds = ctx.saved_tensors
        grad, own = grads[0].contiguous(), ctx.own
        grad_q, grad_k, grad_v = _causal_backward(grad, q, k, v, out, lse, seeds)
        if not own.shape[1]:
            return None, grad_q, grad_k, grad_v
        grad_own = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)
        draft_step_attention_backward(q, grad, out, lse, own, scale=q.shape[-1] ** -0.5, grad_q=grad_q, grad_step_kv=grad_own)
        return None, grad_q, grad_k, grad_v, *(grad_own[part, step] for step in range(own.shape[1]) for part in range(2))


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, lse [B, H, L], and the random state that the backward pass needs. Internal torch operators, because the public
    function does not return lse."""
    length = q.shape[1]
    if q.is_cuda:
        out, lse, *seeds, _ = _aten._flash_attention_forward(q, k, v, None, None, length, length, 0.0, True, False)
        return out, lse, tuple(seeds)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*_by_head(q, k, v), 0.0, True)
    return out.transpose(1, 2).contiguous(), lse.contiguous(), ()


def _causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seeds: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    length = q.shape[1]
    if q.is_cuda:
        found = _aten._flash_attention_backward(grad, q, k, v, out, lse, None, None, length, length, 0.0, True, *seeds)
        return found[0], found[1], found[2]
    by_head = _by_head(q, k, v)
    found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.transpose(1, 2), *by_head, out.transpose(1, 2), lse, 0.0, True
    )
    grad_q, grad_k, grad_v = (part.transpose(1, 2) for part in found)
    return grad_q.contiguous(), *(part.unflatten(2, (k.shape[2], -1)).sum(3) for part in (grad_k, grad_v))


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """q, k and v as [B, H, L, D], each key head repeated for all of its query heads."""
    return [part.repeat_interleave(q.shape[2] // part.shape[2], 2).transpose(1, 2) for part in (q, k, v)]
