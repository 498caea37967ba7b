"""RoPE of heads in place, with given cosines and sines: value j of a head is turned with value j + D/2.

For the queries and keys of a vision encoder, whose angles come from rows and columns of an image and are the same in all layers.
fp32 inside (fp64 for fp64), rounded once. Bound by memory: heads are read and written once. One program a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args


@triton.jit
def rotate_heads_kernel(
    heads, cos, sin, stride, COUNT: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr, PDL: tl.constexpr,
):
    """Program: a token, BLOCK heads at a time."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, LANES)
    of_angle = j < HALF
    await_earlier(PDL)
    c = tl.load(cos + token * HALF + j, mask=of_angle, other=0.0).to(ACC)[None, :]
    s = tl.load(sin + token * HALF + j, mask=of_angle, other=0.0).to(ACC)[None, :]
    for first_head in range(0, COUNT, BLOCK):
        head = first_head + tl.arange(0, BLOCK)
        at = heads + token * stride + head[:, None] * (2 * HALF) + j[None, :]
        exists = (head < COUNT)[:, None] & of_angle[None, :]
        first, second = tl.load(at, mask=exists, other=0.0).to(ACC), tl.load(at + HALF, mask=exists, other=0.0).to(ACC)
        tl.store(at, first * c - second * s, mask=exists)
        tl.store(at + HALF, second * c + first * s, mask=exists)


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor, *, interpret: bool = False) -> None:
    """Rotate the heads of each token in place.

    heads     fp32, bf16, fp16 or fp64 [N, M, D]  D even, heads side by side; tokens may be slices of wider rows
    cos, sin  fp32 [N, D/2]

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, count, dim = heads.shape
    check("rotate_heads: heads", heads, (num_tokens, count, dim // 2 * 2), *FLOATS, rows=True)
    if heads.stride(1) != dim:
        raise ValueError(f"rotate_heads: heads of {dim} values have a stride of {heads.stride(1)}; must be side by side")
    check("rotate_heads: cos", cos, (num_tokens, dim // 2), torch.float32)
    check("rotate_heads: sin", sin, (num_tokens, dim // 2), torch.float32)
    if not (heads.is_cuda or interpret):
        heads.copy_(rotated(heads, cos, sin))
    elif num_tokens:
        lanes = triton.next_power_of_2(dim // 2)
        rotate_heads_kernel[(num_tokens,)](
            heads, cos, sin, heads.stride(0), COUNT=count, HALF=dim // 2, LANES=lanes,
            BLOCK=min(triton.next_power_of_2(count), max(1, 2048 // lanes)),
            ACC=tl.float64 if heads.dtype == torch.float64 else tl.float32, num_warps=4, **launch_args(heads),
        )


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in plain torch, as a new tensor."""
    first, second = heads.to(torch.promote_types(heads.dtype, torch.float32)).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)
