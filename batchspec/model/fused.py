"""The elementwise operations of a decoder layer: the one place where a GPU's fused kernels take over from torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden / sqrt(mean(hidden^2) + eps) * weight over the last dimension, same dtype out.

    Normalised in fp32 (fp64 for fp64), rounded, then multiplied by the weight, as transformers' Llama does. In place where it can
    be: up to 5x faster than F.rms_norm at hundreds of tokens on a CPU, where fresh memory costs more than the arithmetic.
    """
    wide = hidden.float() if hidden.dtype in (torch.bfloat16, torch.float16) else hidden
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().mul_(1 / weight.shape[0]).add_(eps).rsqrt_()
    normed = wide * scale if wide is hidden else wide.mul_(scale)
    return normed.to(hidden.dtype).mul_(weight)


def add_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add hidden [T, H] to residual [T, H] in place and return the sum's rms_norm [T, H]."""
    residual.add_(hidden)
    return rms_norm(residual, weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half: [T, 2 * I] -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of heads [T, N, D] with cos and sin [T, 1, D] (`rope_angles`: the first half of sin is negated)."""
    swapped = torch.roll(heads, heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, sin)
