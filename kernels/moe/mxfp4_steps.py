"""What a program of the products with MXFP4 weights loads and unpacks in each step of the loop over K (`experts_mxfp4.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.moe.blocks import load_tokens
from batchspec.kernels.moe.mxfp4 import unpack


@triton.jit
def load_words(w, turn):
    """Words of a block of 64 rows and 128 columns, two in each number: int32 [upper or lower 8 rows, warp, lane; 4].

    w: where they begin. turn: 2 if a warp reads those of the warp that is two further, else 0
    """
    row = tl.arange(0, 256)
    own = (row % 128 // 32 + turn) % 4 * 256 + row // 128 * 128 + row % 32 * 4
    return tl.load(w + (own[:, None] + tl.arange(0, 4)[None, :]), eviction_policy="evict_first")


@triton.jit
def load_scales(w_scales):
    """Scales of both blocks of a pair, four in each number: int32 [warp, lane; block, upper or lower 8 rows]."""
    thread = tl.arange(0, 128)
    return tl.load(w_scales + ((thread // 4 * 4)[:, None] + tl.arange(0, 4)[None, :]))


@triton.jit
def scales_of_blocks(scales):
    """The scales of each block, from `load_scales`: two of int32 [256], as the rows of its words."""
    return tl.split(scales.reshape(128, 2, 2).permute(2, 0, 1).reshape(256, 2))


@triton.jit
def unpack_block(twos, scales, INTERPRETED: tl.constexpr):
    """The 128 values of each row of a block: [64, 128]. No value moves between threads or registers.

    twos, scales: from `load_words` and `scales_of_blocks`
    """
    words = tl.join(twos.to(tl.int16), (twos >> 16).to(tl.int16)).reshape(256, 8)
    zero = unpack(words, scales, 0, INTERPRETED)
    one = unpack(words, scales, 1, INTERPRETED)
    two = unpack(words, scales, 2, INTERPRETED)
    three = unpack(words, scales, 3, INTERPRETED)
    parts = tl.join(tl.join(zero, two), tl.join(one, three)).reshape(2, 4, 8, 4, 2, 2, 2, 2, 2)
    # [half, warp, lane // 4, lane % 4, h, b, e, two bits of the part: high, low] -> rows; columns as part, h, b, lane % 4, e
    return parts.permute(1, 0, 2, 7, 8, 4, 5, 3, 6).reshape(64, 128)


@triton.jit
def load_columns(
    x, begin, count, at, num_rows, k, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr
):
    """A block of columns of x, transposed: [BLOCK_K, BLOCK_T]."""
    tokens = tl.trans(load_tokens(x, begin, count, at, num_rows, k, BLOCK_T, BLOCK_K, TMA))
    return tokens.to(tl.float32) if INTERPRETED else tokens
