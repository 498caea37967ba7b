"""What comes between the product of q, k and v and the scores: norms of heads, rotation, and the write of K and V. T tokens, NH
query heads and KVH K/V heads of D numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.kernels.norm_rope import norm
from batchspec.kernels.norm_rope.rope_write import rotate_queries
from batchspec.model.fused import normed, rms_norm
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.rope import Rope


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """RoPE of the first R values of heads [T, N, D].

    cos, sin     [T, 1, R] of `rope_angles`: the first half of sin is negated
    interleaved  value 2j is rotated with 2j + 1; otherwise j with j + R/2
    """
    width = cos.shape[-1]
    turning = heads[..., :width]
    if interleaved:
        turning = turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    turned = torch.addcmul(turning * cos, torch.roll(turning, width // 2, -1), sin)
    if interleaved:
        turned = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return turned if width == heads.shape[-1] else torch.cat((turned, heads[..., width:]), -1)


def rope_write(
    qkv: Tensor, at: Rope, kv: LayerKV, slot_mapping: Tensor, *, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    v_norm: bool = False, shared_v: bool = False,
) -> Tensor:
    """q normed and rotated, from the fused product; K, treated the same, and V are written to their pages.

    qkv             [T, (NH + 2 * KVH) * D], with shared_v [T, (NH + KVH) * D]
    kv              this layer's, written at the slots int64 [T]
    q_norm, k_norm  weights of the norm of each head [D], or of all heads at once [NH * D] and [KVH * D]; or None
    v_norm          each head of V is normed, without a weight
    shared_v        V is what K is before its norm and rotation
    Returns q [T, NH, D].
    """
    num_kv_heads, head_dim = kv.layout.num_kv_heads, kv.layout.head_dim
    if q_norm is not None and k_norm is not None and q_norm.shape[0] != head_dim:
        _norm_rows(qkv, q_norm, k_norm, eps)
        q_norm = k_norm = None
    if at.angles is None:
        return kv.rope_write(
            qkv, at.positions, at.freqs, slot_mapping, axes=at.axes, attention_factor=at.attention_factor,
            interleaved=at.interleaved, q_norm=q_norm, k_norm=k_norm, eps=eps, v_norm=v_norm, shared_v=shared_v,
        )
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    qk, v = heads if shared_v else heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    num_heads = qk.shape[1] - num_kv_heads
    if v_norm:
        v = normed(v, eps).to(v.dtype)
    if q_norm is not None and k_norm is not None:
        qk = torch.cat((rms_norm(qk[:, :num_heads], q_norm, eps), rms_norm(qk[:, num_heads:], k_norm, eps)), 1)
    qk = rotate(qk, *at.angles, interleaved=at.interleaved)
    kv.write(qk[:, num_heads:], v, slot_mapping)
    return qk[:, :num_heads]


def rotated_queries(q: Tensor, at: Rope, *, head_dim: int, q_norm: Tensor | None, eps: float) -> Tensor:
    """q [T, NH * D] -> [T, NH, D], normed and rotated, of a layer that keeps no K and V. q_norm [D] of each head, or None."""
    heads = q.view(q.shape[0], -1, head_dim)
    if at.angles is None:
        out = torch.empty_like(heads)
        rotate_queries(
            q, at.positions, at.freqs, attention_factor=at.attention_factor, out_q=out, axes=at.axes,
            interleaved=at.interleaved, q_norm=q_norm, eps=eps,
        )
        return out
    return rotate(heads if q_norm is None else rms_norm(heads, q_norm, eps), *at.angles, interleaved=at.interleaved)


def _norm_rows(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> None:
    """Norm q and k of each token in place, over all of their heads. Two launches on a GPU."""
    q, k, _ = qkv.split((q_norm.shape[0], k_norm.shape[0], k_norm.shape[0]), 1)
    for part, weight in ((q, q_norm), (k, k_norm)):
        if part.is_cuda:
            norm.rms_norm(part, weight, eps, out=part)
        else:
            part.copy_(rms_norm(part, weight, eps))
