"""The elementwise operations of a decoder layer: the one place where a GPU's fused kernels take over from torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.distributed.collectives import Collectives
from batchspec.kernels.gemm import activation
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens, quantise_activation
from batchspec.kernels.moe import combine
from batchspec.kernels.moe.combine_fp8 import combine_fp8
from batchspec.kernels.norm_rope import norm
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8
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
    wide = normed(hidden, eps)
    return wide.to(hidden.dtype).mul_(weight) if weight.dtype is hidden.dtype else wide.mul_(weight).to(hidden.dtype)


def normed(hidden: Tensor, eps: float) -> Tensor:
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


def relu_squared(up: Tensor) -> Tensor:
    """relu(up)^2, of the same shape. In place, but not in training."""
    return F.relu(up).square() if up.requires_grad else activation.relu_squared_(up)


def sigmoid_gated(values: Tensor, gate: Tensor) -> Tensor:
    """values * sigmoid(gate), the sigmoid rounded to the dtype of the values. gate: of their shape, or [T, 1].

    In place, but not in training, where gradients of what computed the values may need them.
    """
    factor = gate.sigmoid().to(values.dtype)
    return values * factor if values.requires_grad else values.mul_(factor)
