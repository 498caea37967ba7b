"""What the products with weights that are unpacked in registers share: MXFP4 (`experts_mxfp4.py`), INT4 and NVFP4
(`experts_four_bit.py`).

A program unpacks a tile of W once, for up to two tiles of rows of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.moe.blocks import add_bias_and_gate, store_rows

# The heights of a tile; rows of the first and the second block of each, and the next lower height where JOINED are used.
HEIGHT_OF = tl.constexpr((16, 32, 48, 64, 80, 96, 128, 256))
FIRST_ROWS = tl.constexpr((16, 32, 32, 64, 64, 64, 128, 256))
MORE_ROWS = tl.constexpr((0, 0, 16, 0, 16, 32, 0, 0))
JOINED_BELOW = tl.constexpr((0, 16, 32, 48, 64, 80, 96, 128))


def in_two(block_n: int, warps: int, *, gated: bool) -> bool:
    """Whether a tile of block_n rows, and if gated of as many of up, is computed as two products: if each has 64 rows for each
    four warps."""
    return block_n >= (16 if gated else 32) * warps


@triton.jit
def wait_for(acc):
    """acc unchanged, but only once its wgmma has finished.

    If a wgmma were still running at the end of the loop's body, ptxas would wait after every single wgmma (its warning C7515).
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def whole_tile(
    acc, up, row_scales, expert, first, n, GATED: tl.constexpr, TWO: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Sums of BLOCK_N rows of W, and of as many of up if GATED, otherwise anything of that shape.

    TWO: acc and up are those of the gate and of up, or of the first and the second half of the rows. Otherwise acc has all.
    row_scales: fp32 [experts, rows], by which the sums are multiplied, or None
    """
    if TWO and not GATED:
        acc = tl.join(acc, up).permute(2, 0, 1).reshape(BLOCK_N, BLOCK_T)
        up = acc
    elif GATED and not TWO:
        acc, up = tl.split(acc.reshape(2, BLOCK_N, BLOCK_T).permute(1, 2, 0))
    if row_scales is not None:
        own = row_scales + expert * (2 * n if GATED else n) + tl.minimum(first + tl.arange(0, BLOCK_N), n - 1)
        acc *= tl.load(own)[:, None]
        if GATED:
            up *= tl.load(own + n)[:, None]
    return acc, up


@triton.jit
def store_sums(
    acc, up, row_scales, bias, out, pairs, expert, begin, count, first, n, SCATTER: tl.constexpr, GATED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, TWO: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Add bias, apply the gate and store. acc, up, row_scales: see `whole_tile`."""
    acc, up = whole_tile(acc, up, row_scales, expert, first, n, GATED, TWO, BLOCK_T, BLOCK_N)
    acc = add_bias_and_gate(acc, up, bias, expert, first, n, GATED, LIMIT, ALPHA, BLOCK_N)
    store_rows(acc, out, pairs, begin, count, first, n, SCATTER, BLOCK_T, BLOCK_N)
