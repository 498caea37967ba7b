"""RMS norm of rows, alone or fused with the residual sum before it, one launch each (Zhang and Sennrich 2019, arXiv 1910.07467).

    rms_norm: out = round(x / sqrt(mean(x^2) + eps)) * weight          add_norm: residual += hidden, then the norm of the sum

fp32 inside (fp64 for fp64); rounded to the tensors' dtype where the torch path rounds: the sum, the normed value, the product.
A weight in fp32 over narrower tensors multiplies the normed value before it is rounded, once (Gemma, OLMo 2).
Bound by memory at prefill sizes (bytes a value: 2 * itemsize, with the residual sum 4, with out_aux 5), by launch latency at
decode sizes. One program holds a row in registers, so the row is read once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args

Call = Callable[..., None]
VALUES_PER_THREAD = 16  # two 16-byte loads of bf16


@triton.jit
def normed_row(
    hidden, residual, weight, factor, out_aux, row, hidden_stride, residual_stride, aux_stride,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """The norm of a row, to be rounded to hidden's dtype. With `residual` None: rms_norm; else add_norm, which stores the sum,
    or with a factor the rounded sum times it."""
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    exists = lane < WIDTH
    scale = tl.load(weight + lane, mask=exists, other=0.0)
    await_earlier(PDL)
    x = tl.load(hidden + row * hidden_stride + lane, mask=exists, other=0.0).to(ACC)
    if residual is not None:
        at = residual + row * residual_stride + lane
        x = (x + tl.load(at, mask=exists, other=0.0).to(ACC)).to(DTYPE)
        if factor is not None:
            x = (x.to(ACC) * tl.load(factor).to(ACC)).to(DTYPE)
        tl.store(at, x, mask=exists)
        if out_aux is not None:
            tl.store(out_aux + row * aux_stride + lane, x, mask=exists)
        x = x.to(ACC)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) * (1.0 / WIDTH) + EPS))
    if weight.dtype.element_ty == DTYPE:
        normed = normed.to(DTYPE).to(ACC)
    return normed * scale.to(ACC)


@triton.jit
def norm_kernel(
    hidden, residual, weight, factor, out, out_aux, hidden_stride, residual_stride, out_stride, aux_stride,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """With `residual` None: rms_norm; else add_norm, where `factor` and `out_aux` may be None."""
    row = tl.program_id(0).to(tl.int64)
    y = normed_row(
        hidden, residual, weight, factor, out_aux, row, hidden_stride, residual_stride, aux_stride, EPS, WIDTH, BLOCK, ACC, PDL
    )
    lane = tl.arange(0, BLOCK)
    tl.store(out + row * out_stride + lane, y, mask=lane < WIDTH)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, *, out: Tensor, interpret: bool = False) -> None:
    """Write the RMS norm of each row.

    hidden  fp32, bf16, fp16 or fp64 [T, H]  rows may be slices of wider ones
    weight  [H] of the same dtype, or fp32: then the result is rounded once
    out     [T, H] of the same dtype  rows may be slices of wider ones; may be `hidden`

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, width = hidden.shape
    check("rms_norm: hidden", hidden, (num_tokens, width), *FLOATS, rows=True)
    check("rms_norm: weight", weight, (width,), hidden.dtype, torch.promote_types(hidden.dtype, torch.float32))
    check("rms_norm: out", out, (num_tokens, width), hidden.dtype, rows=True)
    if not (hidden.is_cuda or interpret):
        rms_norm_reference(hidden, weight, eps, out=out)
    else:
        _launch(hidden, None, weight, eps, None, out, None)


def add_norm(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor,
    out_aux: Tensor | None = None,
    factor: Tensor | None = None,
    interpret: bool = False,
) -> None:
    """Add hidden to residual in place and write the RMS norm of the sum.

    hidden    fp32, bf16, fp16 or fp64 [T, H]  rows may be slices of wider ones
    residual  [T, H] of the same dtype  rows may be slices of wider ones
    weight    [H] of the same dtype, or fp32: then the norm is rounded once
    out       [T, H] of the same dtype  rows may be slices of wider ones
    out_aux   [T, H] of the same dtype or None: a copy of the sum, a drafter's aux hidden state; rows may be slices of wider ones
    factor    [1] of the same dtype or None: residual becomes the sum times this number

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, width = hidden.shape
    check("add_norm: hidden", hidden, (num_tokens, width), *FLOATS, rows=True)
    check("add_norm: residual", residual, (num_tokens, width), hidden.dtype, rows=True)
    check("add_norm: weight", weight, (width,), hidden.dtype, torch.promote_types(hidden.dtype, torch.float32))
    check("add_norm: out", out, (num_tokens, width), hidden.dtype, rows=True)
    if out_aux is not None:
        check("add_norm: out_aux", out_aux, (num_tokens, width), hidden.dtype, rows=True)
    if factor is not None:
        check("add_norm: factor", factor, (1,), hidden.dtype)
    if not (hidden.is_cuda or interpret):
        add_norm_reference(hidden, residual, weight, eps, out=out, out_aux=out_aux, factor=factor)
    else:
        _launch(hidden, residual, weight, eps, factor, out, out_aux)


def _launch(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float, factor: Tensor | None, out: Tensor,
    out_aux: Tensor | None,
) -> None:
    num_tokens, width = hidden.shape
    block = max(16, triton.next_power_of_2(width))
    if num_tokens:
        norm_kernel[(num_tokens,)](
            hidden, residual, weight, factor, out, out_aux,
            hidden.stride(0), 0 if residual is None else residual.stride(0), out.stride(0),
            0 if out_aux is None else out_aux.stride(0),
            EPS=eps, WIDTH=width, BLOCK=block, ACC=tl.float64 if hidden.dtype == torch.float64 else tl.float32,
            num_warps=min(16, max(1, block // (32 * VALUES_PER_THREAD))), **launch_args(hidden),
        )


def rms_norm_reference(hidden: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
    """The same in plain torch."""
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    normed = wide * (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    if weight.dtype == hidden.dtype:
        torch.mul(normed.to(hidden.dtype), weight, out=out)
    else:
        out.copy_(normed * weight)


def add_norm_reference(
    hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, out_aux: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    residual.add_(hidden)
    if factor is not None:
        residual.mul_(factor)
    if out_aux is not None:
        out_aux.copy_(residual)
    rms_norm_reference(residual, weight, eps, out=out)
