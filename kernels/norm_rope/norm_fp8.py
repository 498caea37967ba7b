"""RMS norm of rows, quantised to e4m3 in the same launch for a product with FP8 weights, alone or after the residual sum.

The norm is that of `norm.py`, rounded to the tensors' dtype, and the quantisation that of `batchspec.kernels.moe.quantise`, with
the bits of both launches. One program holds a row in registers. Bound by memory at prefill sizes (itemsize + 1 bytes a value,
with the residual sum 3 * itemsize + 1), by launch latency at decode sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import launch_args
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens, check_form, empty_tokens, quantise_tokens
from batchspec.kernels.moe.quantise import GROUP, store_quantised
from batchspec.kernels.norm_rope.norm import VALUES_PER_THREAD, add_norm_reference, normed_row, rms_norm_reference


@triton.jit(do_not_specialize=["num_rows"])
def norm_fp8_kernel(
    hidden, residual, weight, factor, out, out_scales, out_aux, given, num_rows, hidden_stride, residual_stride, aux_stride,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """num_rows: rows of out. given: one scale for all rows, or None."""
    row = tl.program_id(0).to(tl.int64)
    y = normed_row(
        hidden, residual, weight, factor, out_aux, row, hidden_stride, residual_stride, aux_stride, EPS, WIDTH, BLOCK,
        tl.float32, PDL,
    )
    y = y.to(hidden.dtype.element_ty).to(tl.float32)
    store_quantised(y, out, out_scales, given, row, WIDTH, num_rows, WIDTH, BLOCK, WHOLE, GROUP, INTERPRETED)


def norm_fp8(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: Fp8Form, *, out_aux: Tensor | None = None,
    factor: Tensor | None = None, interpret: bool = False,
) -> Fp8Tokens:
    """Quantise the RMS norm of each row of hidden, or with a residual add hidden to it in place and quantise the norm of the sum.

    hidden    bf16 or fp32 [T, H]; on a CPU any float dtype  rows may be slices of wider ones
    residual  [T, H] of the same dtype, or None  rows may be slices of wider ones
    weight    [H] of the same dtype, or fp32: then the norm is rounded once
    out_aux   [T, H] of the same dtype or None: a copy of the sum, which needs a residual; rows may be slices of wider ones
    factor    [1] of the same dtype or None: residual becomes the sum times this number

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, width = hidden.shape
    if not (hidden.is_cuda or interpret):
        return norm_fp8_reference(hidden, residual, weight, eps, form, out_aux=out_aux, factor=factor)
    check("norm_fp8: hidden", hidden, (num_tokens, width), torch.bfloat16, torch.float32, rows=True)
    check("norm_fp8: weight", weight, (width,), hidden.dtype, torch.float32)
    check_form("norm_fp8", form)
    for name, tensor in (("residual", residual), ("out_aux", out_aux)):
        if tensor is not None:
            check(f"norm_fp8: {name}", tensor, (num_tokens, width), hidden.dtype, rows=True)
    if factor is not None:
        check("norm_fp8: factor", factor, (1,), hidden.dtype)
    if residual is None and (out_aux is not None or factor is not None):
        raise ValueError("norm_fp8: out_aux and factor are of the sum with a residual; pass a residual, or None for both")
    out, block = empty_tokens(hidden, width, form), max(GROUP, triton.next_power_of_2(width))
    if num_tokens:
        norm_fp8_kernel[(num_tokens,)](
            hidden, residual, weight, factor, *out.rows, out_aux, form.scale, len(out.rows.values), hidden.stride(0),
            0 if residual is None else residual.stride(0), 0 if out_aux is None else out_aux.stride(0),
            EPS=eps, WIDTH=width, BLOCK=block, WHOLE=form.whole, GROUP=GROUP, INTERPRETED=not hidden.is_cuda,
            num_warps=min(16, max(1, block // (32 * VALUES_PER_THREAD))), **launch_args(hidden),
        )
    return out


def norm_fp8_reference(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: Fp8Form, *, out_aux: Tensor | None = None,
    factor: Tensor | None = None,
) -> Fp8Tokens:
    """`norm_fp8` in plain torch."""
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if residual is None:
        rms_norm_reference(hidden, weight, eps, out=out)
    else:
        add_norm_reference(hidden, residual, weight, eps, out=out, out_aux=out_aux, factor=factor)
    return quantise_tokens(out, form)
