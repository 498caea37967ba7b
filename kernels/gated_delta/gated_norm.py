"""RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467) of each value head, times a gate.

    out = round(round(o / sqrt(mean(o^2) + eps)) * weight * silu(z)),   silu(z) = z / (1 + exp(-z))

fp32 inside (fp64 for fp64); the normed values are rounded before the weight, and their product too if the weight has the same
dtype, as RMSNormGated of transformers' models/qwen3_5 does. z is read from the product that holds q, k, v and z.
Bound by memory (bytes: 3 * T * HV * DV * itemsize), by launch latency at decode sizes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gated_delta.layout import DeltaColumns, wide

HEADS = 16  # of one program: two or more 16-byte loads of bf16 for each thread


@triton.jit(do_not_specialize=["num_heads"])
def gated_norm_kernel(
    o, x, weight, out, num_heads, x_stride,
    EPS: tl.constexpr, VALUE_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, Z: tl.constexpr,
    HEADS: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """HEADS of all tokens' heads, `num_heads`. Z: offset and stride of z's columns."""
    DTYPE: tl.constexpr = o.dtype.element_ty
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, LANES)[None, :]
    exists = (place < num_heads)[:, None] & (lane < DV)
    scale = tl.load(weight + lane, mask=lane < DV, other=0.0)
    head = place % VALUE_HEADS
    column = Z[0] + head // GROUP * Z[1] + head % GROUP * DV
    await_earlier(PDL)
    value = tl.load(o + place[:, None] * DV + lane, mask=exists, other=0.0).to(ACC)
    z = tl.load(x + (place // VALUE_HEADS * x_stride + column)[:, None] + lane, mask=exists, other=0.0).to(ACC)
    normed = (value * tl.rsqrt(tl.sum(value * value, 1) * (1.0 / DV) + EPS)[:, None]).to(DTYPE).to(ACC) * scale.to(ACC)
    if weight.dtype.element_ty == DTYPE:
        normed = normed.to(DTYPE).to(ACC)
    tl.store(out + place[:, None] * DV + lane, normed * (z / (1.0 + tl.exp(-z))), mask=exists)


def gated_norm(
    o: Tensor, x: Tensor, columns: DeltaColumns, weight: Tensor, eps: float, *, interpret: bool = False
) -> Tensor:
    """The normed and gated values of all heads.

    o        fp32, bf16, fp16 or fp64 [T, HV, DV]
    x        [T, N] of the same dtype  rows may be slices of wider ones; its columns `columns.z` are z
    weight   [DV] of the same dtype, or fp32

    Returns [T, HV * DV] of the same dtype. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, value_heads, value_dim = o.shape
    check("gated_norm: o", o, (num_tokens, value_heads, value_dim), *FLOATS)
    check("gated_norm: x", x, (num_tokens, x.shape[1]), o.dtype, rows=True)
    check("gated_norm: weight", weight, (value_dim,), o.dtype, wide(o.dtype))
    if not (o.is_cuda or interpret):
        return gated_norm_reference(o, x, columns, weight, eps)
    out = o.new_empty(num_tokens, value_heads * value_dim)
    if num_tokens:
        gated_norm_kernel[(triton.cdiv(num_tokens * value_heads, HEADS),)](
            o, x, weight, out, num_tokens * value_heads, x.stride(0), EPS=eps, VALUE_HEADS=value_heads,
            GROUP=value_heads // columns.key_heads, DV=value_dim, Z=(columns.z.offset, columns.z.stride), HEADS=HEADS,
            LANES=triton.next_power_of_2(value_dim), ACC=tl.float64 if o.dtype == torch.float64 else tl.float32, num_warps=4,
            **launch_args(o),
        )
    return out


def gated_norm_reference(o: Tensor, x: Tensor, columns: DeltaColumns, weight: Tensor, eps: float) -> Tensor:
    """The same in plain torch."""
    group = o.shape[1] // columns.key_heads
    z = x[:, columns.part(columns.z, group * o.shape[2], x.device)].view_as(o)
    values = o.to(wide(o.dtype))
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(o.dtype) * F.silu(z.to(values.dtype))).to(o.dtype).flatten(1)
