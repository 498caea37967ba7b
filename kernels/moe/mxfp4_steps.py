"""What a program of the products with MXFP4 weights loads and unpacks in each step of the loop over K (`experts_mxfp4.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.moe.blocks import load_tokens
from batchspec.kernels.moe.mxfp4 import unpack


@triton.jit
def load_words(w, second, turn, THREADS: tl.constexpr):
    """Words of both blocks of a pair, 64 rows and 128 columns each, two in each number: two of int32 [upper or lower 8 rows,
    warp, lane; 4]. With eight warps the first four hold the first block, the others the second, and both tensors are the same.

    w: where the first block begins; second: how much later the second does. turn: 2 if a warp reads those rows of the second
    block that the warp two further has, else 0
    """
    row = tl.arange(0, 2 * THREADS)
    warp = row % THREADS // 32
    place = row // THREADS * 128 + row % 32 * 4
    if THREADS == 128:
        first = load_fours(w, warp * 256 + place)
        last = load_fours(w + second, (warp + turn) % 4 * 256 + place)
    else:
        first = load_fours(w, tl.where(warp < 4, warp, (warp + turn) % 4) * 256 + warp // 4 * second + place)
        last = first
    return first, last


@triton.jit
def load_fours(w, places):
    return tl.load(w + (places[:, None] + tl.arange(0, 4)[None, :]), eviction_policy="evict_first")


@triton.jit
def load_scales(w_scales, THREADS: tl.constexpr):
    """Scales of a pair, four in each number: int32 [warp, lane; block, upper or lower 8 rows]; with eight warps only those of a
    warp's own block."""
    thread = tl.arange(0, THREADS)
    if THREADS == 128:
        own = (thread // 4 * 4)[:, None] + tl.arange(0, 4)[None, :]
    else:
        own = (thread % 128 // 4 * 4 + thread // 128 * 2)[:, None] + tl.arange(0, 2)[None, :]
    return tl.load(w_scales + own)


@triton.jit
def scales_of_blocks(scales, THREADS: tl.constexpr):
    """The scales of both blocks, from `load_scales`, as the rows of their words from `load_words`."""
    if THREADS == 128:
        first, last = tl.split(scales.reshape(128, 2, 2).permute(2, 0, 1).reshape(256, 2))
    else:
        first = scales.permute(1, 0).reshape(512)
        last = first
    return first, last


@triton.jit
def unpack_block(twos, scales, INTERPRETED: tl.constexpr):
    """The 128 values of each row of a block, with eight warps of both: [64 or 128, 128]. No value moves between threads or
    registers.

    twos, scales: from `load_words` and `scales_of_blocks`
    """
    words = tl.join(twos.to(tl.int16), (twos >> 16).to(tl.int16)).reshape(twos.shape[0], 8)
    zero = unpack(words, scales, 0, INTERPRETED)
    one = unpack(words, scales, 1, INTERPRETED)
    two = unpack(words, scales, 2, INTERPRETED)
    three = unpack(words, scales, 3, INTERPRETED)
    parts = tl.join(tl.join(zero, two), tl.join(one, three)).reshape(2, twos.shape[0] // 64, 8, 4, 2, 2, 2, 2, 2)
    # [half, warp, lane // 4, lane % 4, h, b, e, two bits of the part: high, low] -> rows; columns as part, h, b, lane % 4, e
    return parts.permute(1, 0, 2, 7, 8, 4, 5, 3, 6).reshape(twos.shape[0] // 4, 128)


@triton.jit
def load_columns(
    x, begin, count, at, num_rows, k, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr
):
    """A block of columns of x, transposed: [BLOCK_K, BLOCK_T]."""
    tokens = tl.trans(load_tokens(x, begin, count, at, num_rows, k, BLOCK_T, BLOCK_K, TMA))
    return tokens.to(tl.float32) if INTERPRETED else tokens
