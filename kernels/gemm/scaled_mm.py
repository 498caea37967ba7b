"""The library's products of FP8 rows and FP8 weights (cuBLAS, through torch), faster than ours for many tokens.

It requires more than our kernel does: the number of rows is a multiple of 4; with block scales N and K are multiples of 128, with
row scales of 16; block scales of the weight are padded with zeros to a multiple of 4 blocks of K, their columns contiguous.
Sums are kept in fp32 (`use_fast_accum=False`). The library divides a product by the number of rows, so bits depend on it.
Source: torch.nn.functional.scaled_mm; the checks in aten/src/ATen/native/cuda/ScaledBlas.cpp; pytorch issue 166752.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.gemm.fp8_tokens import ROW_MULTIPLE, Fp8Tokens
from batchspec.kernels.moe.quantise import GROUP, Fp8Rows

ALIGNMENT, BLOCKS = 16, 4


def library_scales(scales: Tensor, rows: int, k: int) -> Tensor | None:
    """A copy of the scales of a weight [rows, k] as the library reads them; None if it cannot multiply the weight.

    scales  fp32 [ceil(rows / 128), ceil(k / 128)] of blocks -> [rows / 128, k / 128 rounded up to a multiple of 4], or [rows] of
            rows -> [1, rows]
    """
    if scales.dim() == 1:
        return scales.view(1, rows).clone() if rows % ALIGNMENT == 0 and k % ALIGNMENT == 0 else None
    if rows % GROUP or k % GROUP:
        return None
    return F.pad(scales, (0, -scales.shape[1] % BLOCKS))


def scaled_mm(x: Fp8Tokens, weight: Tensor, scales: Tensor, *, blocked: bool) -> Tensor:
    """x @ weight.T in bf16 [T, N].

    x       R rows, a multiple of 4: one scale per 128 values if blocked, else one per row
    weight  e4m3 [N, K], contiguous, at an address that is a multiple of 16
    scales  from `library_scales`, of blocks if blocked, else of rows

    Does not synchronise. Raises ValueError for other numbers of rows; torch raises for other shapes.
    """
    rows = x.rows
    if len(rows.values) % ROW_MULTIPLE:
        raise ValueError(f"scaled_mm: {len(rows.values)} rows of x; must be a multiple of {ROW_MULTIPLE}: use quantise_tokens")
    if not x.num_tokens:
        return rows.values.new_empty(0, len(weight), dtype=torch.bfloat16)
    if blocked:
        out = F.scaled_mm(
            rows.values, weight.T, rows.scales.T, ScalingType.BlockWise1x128, scales.T, ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16, use_fast_accum=False,
        )
    else:
        x_scales = rows.scales.view(-1, 1)
        out = torch._scaled_mm(rows.values, weight.T, x_scales, scales, out_dtype=torch.bfloat16, use_fast_accum=False)
    return out[: x.num_tokens]


def is_right(device: torch.device, *, blocked: bool) -> bool:
    """Whether the library can compute a small product here, and it is right: not before CUDA 12.9, and only on some GPUs.

    Synchronises.
    """
    num_rows, n, k = ROW_MULTIPLE, 2 * GROUP, 5 * GROUP
    steps = torch.arange(5, device=device).float() + 1
    x_scales = steps[:, None].expand(5, num_rows).contiguous() if blocked else torch.ones(1, num_rows, device=device)
    x = Fp8Tokens(Fp8Rows(torch.ones(num_rows, k, device=device).to(E4M3), x_scales), num_rows)
    scales = library_scales(torch.stack((steps, 2 * steps)) if blocked else torch.arange(n, device=device).float() + 1, n, k)
    assert scales is not None
    try:
        found = scaled_mm(x, torch.ones(n, k, device=device).to(E4M3), scales, blocked=blocked).float()
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    wanted = torch.tensor((55.0, 110.0), device=device).repeat_interleave(GROUP) * GROUP if blocked else scales[0] * k
    return bool(((found - wanted).abs() <= 2**-8 * wanted).all())
