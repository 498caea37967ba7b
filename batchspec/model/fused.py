"""The elementwise operations of a decoder layer: the one place where a GPU's fused kernels take over from torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.cache.layout import LayerKV
from batchspec.distributed.collectives import Collectives
from batchspec.kernels.gemm import activation
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens, quantise_activation
from batchspec.kernels.moe import combine
from batchspec.kernels.moe.combine_fp8 import combine_fp8
from batchspec.kernels.norm_rope import norm
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8
from batchspec.kernels.norm_rope.rope_write import rotate_queries
from batchspec.model.layers.attention.rope import Rope
from batchspec.tuning.policy import has_fast_experts


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden [..., H] / sqrt(mean(hidden^2) + eps) * weight [H] over the last dimension, same dtype out.

    Normalised in fp32 (fp64 for fp64), rounded, then multiplied by the weight, as in transformers' Llama; a weight in fp32 is
    multiplied before rounding, as in its Gemma. On a CPU it works in place if it can: up to 5x faster than F.rms_norm at hundreds
    of tokens, where fresh memory costs more than the arithmetic.
    """
    if hidden.is_cuda:
        out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        norm.rms_norm(hidden.reshape(-1, hidden.shape[-1]), weight, eps, out=out.view(-1, hidden.shape[-1]))
        return out
    normed = _normed(hidden, eps)
    return normed.to(hidden.dtype).mul_(weight) if weight.dtype is hidden.dtype else normed.mul_(weight).to(hidden.dtype)


def _normed(hidden: Tensor, eps: float) -> Tensor:
    """hidden / sqrt(mean(hidden^2) + eps) over the last dimension, in fp32 or wider."""
    wide = hidden.float() if hidden.dtype in (torch.bfloat16, torch.float16) else hidden
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().mul_(1 / hidden.shape[-1]).add_(eps).rsqrt_()
    return wide * scale if wide is hidden else wide.mul_(scale)


def add_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, out_aux: Tensor | None = None, out: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Add hidden [T, H] to residual [T, H] in place, copy the sum to out_aux if given, and return its rms_norm [T, H].

    out     where the norm goes, or None for a new tensor
    factor  [1]: the sum is multiplied by it; None: 1
    """
    if hidden.is_cuda:
        out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if out is None else out
        norm.add_norm(hidden, residual, weight, eps, out=out, out_aux=out_aux, factor=factor)
        return out
    residual.add_(hidden)
    if factor is not None:
        residual.mul_(factor)
    if out_aux is not None:
        out_aux.copy_(residual)
    normed = rms_norm(residual, weight, eps)
    return normed if out is None else out.copy_(normed)


def norm_quantised(
    hidden: Tensor | None, residual: Tensor, weight: Tensor, eps: float, form: Fp8Form, out_aux: Tensor | None = None,
    factor: Tensor | None = None,
) -> Fp8Tokens:
    """`add_norm` of hidden, or if that is None the `rms_norm` of residual, quantised in the form that a product reads; bf16 or
    fp32.

    out_aux [T, H] gets the sum, or None.
    """
    interpret = not residual.is_cuda
    if hidden is not None:
        return norm_fp8(hidden, residual, weight, eps, form, out_aux=out_aux, factor=factor, interpret=interpret)
    if out_aux is not None:
        out_aux.copy_(residual)
    return norm_fp8(residual, None, weight, eps, form, interpret=interpret)


def combine_quantised(
    values: Tensor, weights: Tensor, residual: Tensor, weight: Tensor, eps: float, form: Fp8Form, out_aux: Tensor | None
) -> Fp8Tokens:
    """`combine_norm`, quantised in the form that a product reads; in bf16 or fp32."""
    return combine_fp8(values, weights, residual, weight, eps, form, out_aux=out_aux, interpret=not values.is_cuda)


def activation_quantised(gate_up: Tensor, form: Fp8Form, *, gelu: bool) -> Fp8Tokens:
    """`silu_and_mul` or `gelu_tanh_and_mul`, quantised in the form that a product reads; in bf16 or fp32."""
    return quantise_activation(gate_up, form, gelu=gelu, interpret=not gate_up.is_cuda)


def reduce_norm(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, ranks: Collectives, out_aux: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`add_norm` of the sum of `partial` [T, H] over all ranks."""
    if partial.is_cuda:
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) if out is None else out
        ranks.add_norm(partial, residual, weight, eps, out=out, out_aux=out_aux)
        return out
    return add_norm(ranks.sum(partial), residual, weight, eps, out_aux, out)


def combine_norm(
    values: Tensor, weights: Tensor, residual: Tensor, weight: Tensor, eps: float, out_aux: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`add_norm` of the `combine` of all pairs' outputs: values [T * k, H] with weights [T, k]."""
    if values.is_cuda or has_fast_experts(values.device, values.dtype):
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) if out is None else out
        interpret = not values.is_cuda
        combine.combine_norm(values, weights, residual, weight, eps, out=out, out_aux=out_aux, interpret=interpret)
        return out
    return add_norm(combine.combine_reference(values, weights).to(residual.dtype), residual, weight, eps, out_aux, out)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half: [T, 2 * I] -> [T, I]."""
    if gate_up.is_cuda:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        activation.silu_and_mul(gate_up, out=out)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def clamped_swiglu(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """g sigmoid(alpha g) (u + 1) with g = min(first half, limit), u = clamp(second half, -limit, limit): [T, 2 * I] -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * alpha).sigmoid_().mul_(gate).mul_(up.clamp(-limit, limit).add_(1))


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu_tanh(first half) * second half: [T, 2 * I] -> [T, I]."""
    if gate_up.is_cuda:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        activation.gelu_tanh_and_mul(gate_up, out=out)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def sigmoid_gated(values: Tensor, gate: Tensor) -> Tensor:
    """values * sigmoid(gate), the sigmoid rounded to the dtype of the values. gate: of their shape, or [T, 1].

    In place, but not in training, where gradients of what computed the values may need them.
    """
    factor = gate.sigmoid().to(values.dtype)
    return values * factor if values.requires_grad else values.mul_(factor)


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
            qkv, at.positions, at.freqs, slot_mapping, attention_factor=at.attention_factor, interleaved=at.interleaved,
            q_norm=q_norm, k_norm=k_norm, eps=eps, v_norm=v_norm, shared_v=shared_v,
        )
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    qk, v = heads if shared_v else heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    num_heads = qk.shape[1] - num_kv_heads
    if v_norm:
        v = _normed(v, eps).to(v.dtype)
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
            q, at.positions, at.freqs, attention_factor=at.attention_factor, out_q=out, interleaved=at.interleaved,
            q_norm=q_norm, eps=eps,
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
