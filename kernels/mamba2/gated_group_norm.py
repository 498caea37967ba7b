"""RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467) of each group of channels, after a gate; or the gate alone.

    v = y * silu(z);   out = v / sqrt(mean over the group of v^2 + eps) * weight     without a weight: out = v

fp32 inside (fp64 for fp64), rounded once. z may be a slice of the wider output of in_proj.
Bound by memory (bytes: 3 * T * channels * itemsize), by launch latency at decode sizes.
Source: models/nemotron_h of transformers 5.24 (NemotronHRMSNormGated), which rounds before it multiplies with the weight where
another part of the layer computed y in bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gated_delta.layout import wide


@triton.jit
def gated_group_norm_kernel(
    y, z, weight, out, z_stride, NORMS: tl.constexpr, EPS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    LANES: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """Program (token, group), whose channels are SIZE."""
    token, group = tl.program_id(0).to(tl.int64) // GROUPS, tl.program_id(0) % GROUPS
    lane = tl.arange(0, LANES)
    channel = group * SIZE + lane
    if NORMS:
        scale = tl.load(weight + channel, mask=lane < SIZE, other=0.0).to(ACC)
    await_earlier(PDL)
    gate = tl.load(z + token * z_stride + channel, mask=lane < SIZE, other=0.0).to(ACC)
    value = tl.load(y + token * (GROUPS * SIZE) + channel, mask=lane < SIZE, other=0.0).to(ACC) * (gate / (1.0 + tl.exp(-gate)))
    if NORMS:
        value = value * tl.rsqrt(tl.sum(value * value, 0) * (1.0 / SIZE) + EPS) * scale
    tl.store(out + token * (GROUPS * SIZE) + channel, value.to(out.dtype.element_ty), mask=lane < SIZE)


def gated_group_norm(
    y: Tensor, z: Tensor, weight: Tensor | None, groups: int, eps: float, *, interpret: bool = False
) -> Tensor:
    """The gated and normed values of all groups.

    y       fp32, bf16, fp16 or fp64 [T, channels], contiguous
    z       [T, channels] of the same dtype  rows may be slices of wider ones
    weight  [channels] of the same dtype, or fp32; None: they are gated alone
    groups  of neighbouring channels, a divisor of their number

    Returns a new tensor [T, channels] of the same dtype. Does not synchronise on a GPU. Raises ValueError for other shapes,
    dtypes or strides.
    """
    num_tokens, channels = y.shape
    check("gated_group_norm: y", y, (num_tokens, channels), *FLOATS)
    check("gated_group_norm: z", z, (num_tokens, channels), y.dtype, rows=True)
    if weight is not None:
        check("gated_group_norm: weight", weight, (channels,), y.dtype, wide(y.dtype))
    if channels % groups:
        raise ValueError(f"gated_group_norm: {channels} channels are no multiple of {groups} groups")
    if not (y.is_cuda or interpret):
        return gated_group_norm_reference(y, z, weight, groups, eps)
    out = torch.empty_like(y)
    lanes = triton.next_power_of_2(channels // groups)
    if num_tokens:
        gated_group_norm_kernel[(num_tokens * groups,)](
            y, z, y if weight is None else weight, out, z.stride(0), NORMS=weight is not None, EPS=eps, GROUPS=groups,
            SIZE=channels // groups, LANES=lanes, ACC=tl.float64 if y.dtype == torch.float64 else tl.float32,
            num_warps=min(8, max(1, lanes // 256)), **launch_args(y),
        )
    return out


def gated_group_norm_reference(y: Tensor, z: Tensor, weight: Tensor | None, groups: int, eps: float) -> Tensor:
    """The same in plain torch."""
    acc = wide(y.dtype)
    gated: Tensor = y.to(acc) * F.silu(z.to(acc))
    if weight is None:
        return gated.to(y.dtype)
    values = gated.unflatten(1, (groups, -1))
    normed: Tensor = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(1) * weight.to(acc)).to(y.dtype)
