"""`combine_norm` (`combine.py`), quantised to e4m3 in the same launch for a product with FP8 weights.

The bits are those of `combine_norm` and then `quantise_tokens`. A program computes one token. Bound by memory at prefill sizes
(bytes: T * H * (k * itemsize + 2 * itemsize + 1)), by launch latency at decode sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import launch_args
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens, check_form, empty_tokens, quantise_tokens
from batchspec.kernels.moe.combine import combine_norm_reference, combined_row, warps_of
from batchspec.kernels.moe.quantise import GROUP, store_quantised


@triton.jit(do_not_specialize=["num_rows"])
def combine_fp8_kernel(
    y, weights, residual, norm, out, out_scales, out_aux, given, num_rows, residual_stride, aux_stride,
    EPS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """num_rows: rows of out. given: one scale for all rows, or None."""
    DTYPE: tl.constexpr = residual.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    x = combined_row(
        y, weights, residual, norm, out_aux, token, residual_stride, aux_stride, DTYPE, EPS, TOP_K, WIDTH,
        BLOCK, tl.float32, PDL,
    )
    x = x.to(DTYPE).to(tl.float32)
    store_quantised(x, out, out_scales, given, token, WIDTH, num_rows, WIDTH, BLOCK, WHOLE, GROUP, INTERPRETED)


def combine_fp8(
    y: Tensor, weights: Tensor, residual: Tensor, weight: Tensor, eps: float, form: Fp8Form, *, out_aux: Tensor | None = None,
    interpret: bool = False,
) -> Fp8Tokens:
    """Add the weighted sum of each token's pairs to `residual` in place, and quantise the norm of the new residual.

    y         bf16 or fp32 [T * k, H], contiguous, in pair order; on a CPU any float dtype
    weights   fp32 [T, k]
    residual  [T, H] of the same dtype  rows may be slices of wider rows
    weight, out_aux   as in `combine_norm`
    form      how many scales a row has, or the given scale

    Returns the quantised rows [T, H] and their scales. Does not synchronise on a GPU. Raises ValueError for other shapes,
    dtypes or strides.
    """
    num_tokens, width = residual.shape
    if not (y.is_cuda or interpret):
        return combine_fp8_reference(y, weights, residual, weight, eps, form, out_aux=out_aux)
    check("combine_fp8: residual", residual, (num_tokens, width), torch.bfloat16, torch.float32, rows=True)
    check("combine_fp8: weights", weights, (num_tokens, weights.shape[1]), torch.float32)
    check("combine_fp8: y", y, (weights.numel(), width), residual.dtype)
    check("combine_fp8: weight", weight, (width,), residual.dtype, torch.float32)
    check_form("combine_fp8", form)
    if out_aux is not None:
        check("combine_fp8: out_aux", out_aux, (num_tokens, width), residual.dtype, rows=True)
    out, block = empty_tokens(residual, width, form), max(GROUP, triton.next_power_of_2(width))
    if num_tokens:
        combine_fp8_kernel[(num_tokens,)](
            y, weights, residual, weight, *out.rows, out_aux, form.scale, len(out.rows.values),
            residual.stride(0), 0 if out_aux is None else out_aux.stride(0),
            EPS=eps, TOP_K=weights.shape[1], WIDTH=width, BLOCK=block, WHOLE=form.whole, GROUP=GROUP, INTERPRETED=not y.is_cuda,
            num_warps=warps_of(block), **launch_args(y),
        )
    return out


def combine_fp8_reference(
    y: Tensor, weights: Tensor, residual: Tensor, weight: Tensor, eps: float, form: Fp8Form, *, out_aux: Tensor | None = None
) -> Fp8Tokens:
    """`combine_fp8` in plain torch."""
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    combine_norm_reference(y, weights, residual, weight, eps, out=out, out_aux=out_aux)
    return quantise_tokens(out, form)
