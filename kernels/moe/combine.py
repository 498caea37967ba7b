"""The weighted sum of the outputs of each token's experts; with the residual sum and the next norm in the same launch.

    hidden[t] = sum over slots s, in order, of weights[t, s] * y[t * k + s]      in fp32, rounded once
    combine:        out = hidden
    combine_norm:   residual += hidden, out = rms_norm(residual) * weight

T tokens, k slots (experts) per token; y holds the output of one expert per pair (token, slot), see `units.py`. Rows of y whose
weight is 0 are not read: the products do not write the rows of dead tokens, whose sum is 0.
The norm rounds as `batchspec.kernels.norm_rope.norm` does. Each program computes one token. Bound by memory at prefill sizes
(bytes: T * H * (k + 3) * itemsize), by launch latency at decode sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.norm_rope.norm import add_norm_reference

VALUES_PER_THREAD = 8  # a 16-byte load of bf16


@triton.jit
def combined_row(
    y, weights, residual, norm, out_aux, token, residual_stride, aux_stride, DTYPE: tl.constexpr,
    EPS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """In ACC, to be rounded to DTYPE: the sum of a token's pairs; with a residual, which it is added to, the norm of both."""
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    if residual is not None:
        gain = tl.load(norm + lane, mask=inside, other=0.0).to(ACC)
    await_earlier(PDL)
    if residual is not None:
        at = residual + token * residual_stride + lane
        before = tl.load(at, mask=inside, other=0.0).to(ACC)
    x = tl.zeros([BLOCK], ACC)
    for slot in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + slot).to(ACC)
        width = tl.where(weight == 0.0, 0, WIDTH)
        x += weight * tl.load(y + (token * TOP_K + slot) * WIDTH + lane, mask=lane < width, other=0.0).to(ACC)
    if residual is not None:
        x = (before + x.to(DTYPE).to(ACC)).to(DTYPE)
        tl.store(at, x, mask=inside)
        if out_aux is not None:
            tl.store(out_aux + token * aux_stride + lane, x, mask=inside)
        x = x.to(ACC)
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) * (1.0 / WIDTH) + EPS))
        if norm.dtype.element_ty == DTYPE:
            x = x.to(DTYPE).to(ACC)
        x = x * gain
    return x


@triton.jit
def combine_kernel(
    y, weights, residual, norm, out, out_aux, residual_stride, out_stride, aux_stride,
    EPS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
    PDL: tl.constexpr,
):
    """The kernel of `combine` if `residual` is None, else that of `combine_norm`; `out_aux` may be None in both."""
    token = tl.program_id(0).to(tl.int64)
    x = combined_row(
        y, weights, residual, norm, out_aux, token, residual_stride, aux_stride, out.dtype.element_ty, EPS,
        TOP_K, WIDTH, BLOCK, ACC, PDL,
    )
    lane = tl.arange(0, BLOCK)
    tl.store(out + token * out_stride + lane, x, mask=lane < WIDTH)


def combine(y: Tensor, weights: Tensor, *, out: Tensor, interpret: bool = False) -> None:
    """Write the weighted sum of each token's pairs.

    y        bf16, fp32, fp16 or fp64 [T * k, H] contiguous, in pair order
    weights  [T, k], fp32; fp64 if y is fp64
    out      bf16, fp32, fp16 or fp64 [T, H]  rows may be slices of wider rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    _check(y, weights, out)
    if y.is_cuda or interpret:
        _launch(y, weights, None, None, 0.0, out, None)
    else:
        out.copy_(combine_reference(y, weights))


def combine_norm(
    y: Tensor, weights: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, out_aux: Tensor | None = None,
    interpret: bool = False,
) -> None:
    """Add the weighted sum to `residual` in place and write the norm of the new residual to `out`; see `combine`.

    residual, out  [T, H] of the model's dtype  rows may be slices of wider rows
    weight         [H] of the same dtype, or fp32: the normed value is then rounded once, after the multiplication by `weight`
    out_aux        [T, H] that gets a copy of the new residual, for a drafter; or None
    """
    _check(y, weights, out)
    check("combine_norm: residual", residual, tuple(out.shape), out.dtype, rows=True)
    check("combine_norm: weight", weight, (out.shape[1],), out.dtype, torch.promote_types(out.dtype, torch.float32))
    if out_aux is not None:
        check("combine_norm: out_aux", out_aux, tuple(out.shape), out.dtype, rows=True)
    if y.is_cuda or interpret:
        _launch(y, weights, residual, weight, eps, out, out_aux)
    else:
        combine_norm_reference(y, weights, residual, weight, eps, out=out, out_aux=out_aux)


def _check(y: Tensor, weights: Tensor, out: Tensor) -> None:
    (num_tokens, top_k), width = weights.shape, y.shape[1]
    wide = torch.promote_types(y.dtype, torch.float32)
    check("combine: y", y, (num_tokens * top_k, width), *FLOATS)
    check("combine: weights", weights, (num_tokens, top_k), wide)
    check("combine: out", out, (num_tokens, width), *FLOATS, rows=True)


def _launch(
    y: Tensor, weights: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, out: Tensor, out_aux: Tensor | None
) -> None:
    num_tokens, width = out.shape
    block = max(16, triton.next_power_of_2(width))
    if num_tokens:
        combine_kernel[(num_tokens,)](
            y, weights, residual, weight, out, out_aux, 0 if residual is None else residual.stride(0), out.stride(0),
            0 if out_aux is None else out_aux.stride(0),
            EPS=eps, TOP_K=weights.shape[1], WIDTH=width, BLOCK=block, ACC=tl.float64 if y.dtype == torch.float64 else tl.float32,
            num_warps=warps_of(block), **launch_args(y),
        )


def warps_of(block: int) -> int:
    return min(16, max(1, block // (32 * VALUES_PER_THREAD)))


def combine_reference(y: Tensor, weights: Tensor) -> Tensor:
    """`combine` in plain torch, slot by slot: [T, H] in the dtype of `weights`."""
    num_tokens, top_k = weights.shape
    pairs = y.view(num_tokens, top_k, y.shape[1]).to(weights.dtype)
    pairs = pairs.masked_fill(weights[..., None] == 0, 0.0)
    total = weights[:, :1] * pairs[:, 0]
    for slot in range(1, top_k):
        total += weights[:, slot : slot + 1] * pairs[:, slot]
    return total


def combine_norm_reference(
    y: Tensor, weights: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, out_aux: Tensor | None = None
) -> None:
    """`combine_norm` in plain torch."""
    add_norm_reference(combine_reference(y, weights).to(out.dtype), residual, weight, eps, out=out, out_aux=out_aux)
