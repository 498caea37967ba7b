"""RoPE of heads in place, with given cosines and sines: value j of a head is turned with value j + D/2. The RMS norm of each
head may come before it, or alone.

For the heads of a vision encoder, whose angles come from rows and columns of an image and are the same in all layers.
fp32 inside (fp64 for fp64), rounded once; the norm and its product with the weight are rounded as in `norm.py`. Bound by memory:
heads are read and written once. One program a token, where `norm.py` would need one for each of its heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.norm_rope.norm import rms_norm_reference


@triton.jit
def rotate_heads_kernel(
    heads, cos, sin, weight, stride, EPS: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """Program: a token, BLOCK heads at a time. With `weight` None heads are not normed; with `cos` None not rotated."""
    DTYPE: tl.constexpr = heads.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, LANES)
    of_angle = j < HALF
    await_earlier(PDL)
    if cos is not None:
        c = tl.load(cos + token * HALF + j, mask=of_angle, other=0.0).to(ACC)[None, :]
        s = tl.load(sin + token * HALF + j, mask=of_angle, other=0.0).to(ACC)[None, :]
    if weight is not None:
        of_first = tl.load(weight + j, mask=of_angle, other=0.0).to(ACC)[None, :]
        of_second = tl.load(weight + HALF + j, mask=of_angle, other=0.0).to(ACC)[None, :]
    for first_head in range(0, COUNT, BLOCK):
        head = first_head + tl.arange(0, BLOCK)
        at = heads + token * stride + head[:, None] * (2 * HALF) + j[None, :]
        exists = (head < COUNT)[:, None] & of_angle[None, :]
        first, second = tl.load(at, mask=exists, other=0.0).to(ACC), tl.load(at + HALF, mask=exists, other=0.0).to(ACC)
        if weight is not None:
            factor = (1.0 / tl.sqrt(tl.sum(first * first + second * second, 1) * (0.5 / HALF) + EPS))[:, None]
            first, second = first * factor, second * factor
            if weight.dtype.element_ty == DTYPE:
                first, second = first.to(DTYPE).to(ACC), second.to(DTYPE).to(ACC)
            first, second = (first * of_first).to(DTYPE).to(ACC), (second * of_second).to(DTYPE).to(ACC)
        if cos is not None:
            first, second = first * c - second * s, second * c + first * s
        tl.store(at, first, mask=exists)
        tl.store(at + HALF, second, mask=exists)


def rotate_heads(
    heads: Tensor, cos: Tensor, sin: Tensor, *, weight: Tensor | None = None, eps: float = 0.0, interpret: bool = False
) -> None:
    """Rotate the heads of each token in place, after their norms if they have any.

    heads     fp32, bf16, fp16 or fp64 [N, M, D]  D even, heads side by side; tokens may be slices of wider rows
    cos, sin  fp32 [N, D/2]
    weight    of the norm, [D] of the heads' dtype, or fp32: then the normed value is rounded once; None: no norm

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, _, dim = heads.shape
    _check("rotate_heads", heads, weight)
    check("rotate_heads: cos", cos, (num_tokens, dim // 2), torch.float32)
    check("rotate_heads: sin", sin, (num_tokens, dim // 2), torch.float32)
    if heads.is_cuda or interpret:
        _launch(heads, cos, sin, weight, eps)
    else:
        heads.copy_(rotated(heads if weight is None else _normed(heads, weight, eps), cos, sin))


def norm_heads(heads: Tensor, weight: Tensor, eps: float, *, interpret: bool = False) -> None:
    """Norm the heads of each token in place. Arguments and errors as those of `rotate_heads`."""
    _check("norm_heads", heads, weight)
    if heads.is_cuda or interpret:
        _launch(heads, None, None, weight, eps)
    else:
        heads.copy_(_normed(heads, weight, eps))


def _check(name: str, heads: Tensor, weight: Tensor | None) -> None:
    num_tokens, count, dim = heads.shape
    check(f"{name}: heads", heads, (num_tokens, count, dim // 2 * 2), *FLOATS, rows=True)
    if heads.stride(1) != dim:
        raise ValueError(f"{name}: heads of {dim} values have a stride of {heads.stride(1)}; must be side by side")
    if weight is not None:
        check(f"{name}: weight", weight, (dim,), heads.dtype, torch.promote_types(heads.dtype, torch.float32))


def _launch(heads: Tensor, cos: Tensor | None, sin: Tensor | None, weight: Tensor | None, eps: float) -> None:
    num_tokens, count, dim = heads.shape
    if num_tokens:
        lanes = triton.next_power_of_2(dim // 2)
        rotate_heads_kernel[(num_tokens,)](
            heads, cos, sin, weight, heads.stride(0), EPS=eps, COUNT=count, HALF=dim // 2, LANES=lanes,
            BLOCK=min(triton.next_power_of_2(count), max(1, 2048 // lanes)),
            ACC=tl.float64 if heads.dtype == torch.float64 else tl.float32, num_warps=4, **launch_args(heads),
        )


def _normed(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norms in plain torch, as a new tensor."""
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    rms_norm_reference(heads.reshape(-1, heads.shape[-1]), weight, eps, out=out.view(-1, heads.shape[-1]))
    return out


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in plain torch, as a new tensor."""
    first, second = heads.to(torch.promote_types(heads.dtype, torch.float32)).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)
