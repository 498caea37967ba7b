"""Attention of blocks of drafts in training: a query attends to the context before its block's anchor, and to the block.

The context is the first keys of the block's row: a varlen attention with a prefix length a block (`prefix_attention`), whose
output the few scores within the block are merged into. No score matrix is stored but that within blocks.
M blocks of S queries, sorted by row and anchor; B rows of L positions; NH / KVH heads of D numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchspec.heads.layer import Angles, TrainedAttention
from batchspec.kernels.train.prefix_attention import prefix_attention, prefix_attention_backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Where blocks are. A block begins at its anchor, the newest token of a round."""

    size: int
    """S"""
    starts: Tensor
    """int32 [B + 1] the first query of each row, and M * S"""
    prefix_len: Tensor
    """int32 [M * S] number of positions before the anchor of each query's block"""
    most: int
    """No row has more queries."""
    positions: Tensor
    """int64 [M * S]"""


def blocks_at(rows: Tensor, anchors: Tensor, size: int, *, num_rows: int, length: int) -> Blocks:
    """rows, anchors  int64 [M] row and position of each anchor, sorted by both; none twice. Does not synchronise."""
    starts = torch.searchsorted(rows, torch.arange(num_rows + 1, device=rows.device)) * size
    positions = anchors.unsqueeze(1) + torch.arange(size, device=rows.device)
    return Blocks(
        size=size, starts=starts.int(), prefix_len=anchors.int().repeat_interleave(size), most=min(length, len(rows)) * size,
        positions=positions.flatten(),
    )


class BlockAttention(TrainedAttention):
    """StoreKV and Attend of the queries of blocks."""

    def __init__(
        self, blocks: Blocks, context: tuple[Tensor, Tensor], angles: Angles, head_dim: int, *, causal: bool, wide: bool
    ) -> None:
        """
        context  K and V [B, L, KVH, D] of the context, normed and rotated
        angles   those of positions 0, 1 ..
        causal   a query attends to no later one of its block
        """
        super().__init__(head_dim, wide=wide)
        self._blocks, self._context, self._causal = blocks, context, causal
        cos, sin = angles
        self._own = cos[blocks.positions], sin[blocks.positions]

    @property
    def _angles(self) -> Angles:
        return self._own

    def _placed(self, heads: Tensor) -> Tensor:
        return heads.unsqueeze(0)

    def _store(self, k: Tensor, v: Tensor) -> None:
        self._kv = k.squeeze(0), v.squeeze(0)

    def _attend(self, q: Tensor, scale: float) -> Tensor:
        k, v = self._kv
        prefix: Tensor
        prefix_lse: Tensor
        prefix, prefix_lse = _Prefix.apply(q, *self._context, self._blocks, scale)  # type: ignore[no-untyped-call]
        size, key_heads, wide = self._blocks.size, k.shape[1], torch.promote_types(q.dtype, torch.float32)

        def by_key_head(x: Tensor) -> Tensor:
            """[M * S, heads, ..] -> [M, KVH, (heads / KVH) * S, ..]"""
            by_block: Tensor = x.unflatten(1, (key_heads, -1)).unflatten(0, (-1, size))
            return by_block.permute(0, 2, 3, 1, *range(4, by_block.dim())).flatten(2, 3)

        queries, keys, values = (by_key_head(x) for x in (q, k, v))
        scores = (queries @ keys.transpose(2, 3)).to(wide) * scale
        if self._causal:
            later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
            scores = scores.masked_fill(later.repeat(scores.shape[2] // size, 1), -torch.inf)
        before = by_key_head(prefix_lse)
        lse = torch.logaddexp(scores.logsumexp(3), before)
        out = ((scores - lse.unsqueeze(3)).exp().to(q.dtype) @ values).to(wide)
        out = out + (before - lse).exp().unsqueeze(3) * by_key_head(prefix)
        by_token: Tensor = out.unflatten(2, (-1, size)).permute(0, 3, 1, 2, 4)  # [M, S, KVH, NH / KVH, D]
        return by_token.to(q.dtype).reshape(len(q), -1)


class _Prefix(torch.autograd.Function):
    """Attention of q [M * S, NH, D] to the first keys of each row; the output, and its log-sum-exp [M * S, NH]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        prefix_attention(q, k, v, blocks.starts, blocks.prefix_len, most=blocks.most, scale=scale, out=out, out_lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad, blocks = grads[0].contiguous(), ctx.blocks
        # A query without context has an lse of -inf, and no gradient of it.
        delta = (grad.to(lse.dtype) * out).sum(-1) - torch.where(lse.isfinite(), grads[1], 0)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        prefix_attention_backward(
            q, k, v, blocks.starts, blocks.prefix_len, most=blocks.most, scale=ctx.scale, grad=grad, lse=lse, delta=delta,
            grad_q=grad_q, grad_k=grad_k, grad_v=grad_v,
        )
        return grad_q, grad_k, grad_v, None, None
