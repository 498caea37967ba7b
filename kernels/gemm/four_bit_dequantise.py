"""Weights of four bits to bf16, rounded once (`dequantise` of `common/four_bit.py`). For products of many tokens, by the library.

INT4 weights are those that `four_bit_linear.py` multiplies; NVFP4 weights it does not round. Bound by memory: 4.5 bits are read
and 16 written for each number.
`multiply_dequantised` is the product in pieces that stay in the L2 cache, so that no weight is written to memory in bf16.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.four_bit import BLOCK, ROWS, WORDS, FourBitWeight, dequantise, pairs_of
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.four_bit_linear import check_weight
from batchspec.kernels.gemm.four_bit_steps import SIZE, load_parts, load_words, unpack_block

BLOCK_N = 64
PIECE = 1 << 24
"""Maximum number of weights that `multiply_dequantised` dequantises at once: 32 MB in bf16, less than an H200's L2 cache."""


@triton.jit
def four_bit_dequantise_kernel(
    w, scales, shifts, row_scales, out, n, w_rows, k, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    k_blocks = tl.cdiv(k, 128)
    program = tl.program_id(0)
    block, first = program % k_blocks, program // k_blocks * BLOCK_N
    await_earlier(PDL)
    last = tl.cdiv(n, 16) * 8 - 1
    s = load_parts(scales, block, w_rows // 2, first, n, last, GROUP, False, BLOCK_N)
    z = (None, None, None, None)
    if shifts is not None:
        z = load_parts(shifts, block, w_rows // 2, first, n, last, GROUP, False, BLOCK_N)
    words = load_words(w, block, first, n, w_rows, False, BLOCK_N, False)
    values = unpack_block(words, s, z, GROUP, BLOCK_N, INTERPRETED).to(tl.float32) * SIZE
    row = first + tl.arange(0, BLOCK_N)
    if row_scales is not None:
        values *= tl.load(row_scales + tl.minimum(row, n - 1))[:, None]
    column = block * 128 + tl.arange(0, 128)
    places = out + row.to(tl.int64)[:, None] * k + column[None, :]
    tl.store(places, values.to(out.dtype.element_ty), mask=(row < n)[:, None] & (column < k)[None, :])


def four_bit_dequantise(weight: FourBitWeight, *, out: Tensor | None = None, interpret: bool = False) -> Tensor:
    """The weight as bf16 [N, K], columns in the order of memory (`FourBitWeight.columns`).

    weight  as for `four_bit_linear`
    out     bf16 [N, K], contiguous; None: a new tensor

    Does not synchronise. Raises ValueError for other shapes or dtypes.
    """
    shape = weight.num_rows, weight.k
    out = torch.empty(shape, dtype=torch.bfloat16, device=weight.words.device) if out is None else out
    check("four_bit_dequantise: out", out, shape, torch.bfloat16)
    if not (out.is_cuda or interpret):
        matrix = dequantise(weight, torch.bfloat16)
        return out.copy_(matrix if weight.columns is None else matrix.index_select(1, weight.columns))
    launch(weight, out)
    return out


def launch(weight: FourBitWeight, out: Tensor, *, compile_only: bool = False) -> None:
    """Check the weight and start the kernel, unless `compile_only`."""
    group = check_weight("four_bit_dequantise", weight)
    grid = (triton.cdiv(weight.num_rows, BLOCK_N) * triton.cdiv(weight.k, BLOCK),)
    start = partial(four_bit_dequantise_kernel.warmup, grid=grid) if compile_only else four_bit_dequantise_kernel[grid]
    start(
        weight.words, pairs_of(weight.scales), pairs_of(weight.shifts), weight.row_scales, out, weight.num_rows,
        weight.words.stride(0) // WORDS, weight.k, GROUP=group, BLOCK_N=BLOCK_N, INTERPRETED=not out.is_cuda, num_warps=4,
        **launch_args(out),
    )


def multiply_dequantised(x: Tensor, weight: FourBitWeight, bias: Tensor | None = None, *, interpret: bool = False) -> Tensor:
    """x @ W.T + bias by the library, in x's dtype: bf16. Arguments as for `four_bit_linear`. Does not synchronise on a GPU."""
    step = max(1, PIECE // weight.k // ROWS) * ROWS
    if step >= weight.num_rows:
        return F.linear(x, four_bit_dequantise(weight, interpret=interpret), bias)
    out = x.new_empty(len(x), weight.num_rows)
    for first in range(0, weight.num_rows, step):
        own = slice(first, min(first + step, weight.num_rows))
        matrix = four_bit_dequantise(weight.rows(own), interpret=interpret).t()
        if bias is None:
            torch.mm(x, matrix, out=out[:, own])
        else:
            torch.addmm(bias[own], x, matrix, out=out[:, own])
    return out
