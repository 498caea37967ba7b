"""What a program of the products with MXFP4 weights loads and unpacks, step by step of the loop over K (`experts_mxfp4.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.common.fetch import fetch_to_l2
from batchspec.kernels.moe.blocks import load_rows, load_tokens
from batchspec.kernels.moe.mxfp4 import unpack


@triton.jit
def load_words(
    w, expert, first, n, width, at, GATED: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """WORDS columns of words: [2, BLOCK_N, WORDS] of gate and up; of a plain product [2, BLOCK_N / 2, WORDS], its halves."""
    if GATED and TMA:  # one copy for gate and up: each copy costs the program a barrier
        pair = w.load([expert * 2, first, at])
    elif GATED:
        gate = load_rows(w, expert, first, 2 * n, at, width, BLOCK_N, WORDS, TMA, True)
        pair = tl.join(gate, load_rows(w, expert, n + first, 2 * n, at, width, BLOCK_N, WORDS, TMA, True)).permute(2, 0, 1)
    else:
        pair = load_rows(w, expert, first, n, at, width, BLOCK_N, WORDS, TMA, True).reshape(2, BLOCK_N // 2, WORDS)
    return pair


@triton.jit
def load_scales(
    w_scales, expert, first, n, num_blocks, block, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Scales of a block of 128 columns in one load: int32 [2 * BLOCK_N] of gate and up, [BLOCK_N] of a plain product.

    BLOCKS: 2 with TMA for two blocks, [2, ...]; the second may lie beyond the last one, and its scales are then any numbers.
    """
    LANES: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    if TMA:
        at = expert * num_blocks + block
        scales = w_scales.load([at, 0, first]) if GATED else w_scales.load([at, first])
        scales = scales.reshape(BLOCKS, LANES) if BLOCKS == 2 else scales.reshape(LANES)
    else:
        rows = 2 * n if GATED else n
        lane = tl.arange(0, LANES)
        row = first + (lane % BLOCK_N + lane // BLOCK_N * n if GATED else lane)
        own = w_scales + (expert * num_blocks).to(tl.int64) * rows
        scales = tl.load(own + (block * rows + tl.minimum(row, rows - 1)))
    return scales


@triton.jit
def load_columns(
    x, begin, count, at, num_rows, k, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """A block of columns of x, transposed: [BLOCK_K, BLOCK_T]."""
    tokens = tl.trans(load_tokens(x, begin, count, at, num_rows, k, BLOCK_T, BLOCK_K, TMA))
    return tokens.to(tl.float32) if INTERPRETED else tokens


@triton.jit
def unpack_block(words, scales, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr):
    """The 128 values of each row: [N, 128]. Joining moves no value between registers."""
    zero = unpack(words, scales, 0, INTERPRETED)
    one = unpack(words, scales, 1, INTERPRETED)
    two = unpack(words, scales, 2, INTERPRETED)
    three = unpack(words, scales, 3, INTERPRETED)
    parts = tl.join(tl.join(zero, two), tl.join(one, three))  # [N, 32, two bits of the part: high, low]
    return parts.permute(0, 2, 3, 1).reshape(BLOCK_N, 128)


@triton.jit
def unpack_blocks(words, scales, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr):
    """The values of two blocks: words [N, 64], scales [2, N] -> [N, 256]."""
    low, high = tl.split(words.reshape(BLOCK_N, 2, 32).permute(0, 2, 1))
    low_scales, high_scales = tl.split(scales.permute(1, 0))
    low = unpack_block(low, low_scales, BLOCK_N, INTERPRETED)
    high = unpack_block(high, high_scales, BLOCK_N, INTERPRETED)
    return tl.join(low, high).permute(0, 2, 1).reshape(BLOCK_N, 256)


@triton.jit
def fetch_ahead(words, expert, first, n, k, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ask the L2 cache for all words of a tile, for gate and up separately."""
    row_bytes = tl.cdiv(k, 128) * 64
    num_bytes = tl.minimum(n - first, BLOCK_N) * row_bytes
    for part in tl.static_range(2 if GATED else 1):
        row = (expert * (2 if GATED else 1) + part).to(tl.int64) * n + first
        fetch_to_l2(words + row * row_bytes, num_bytes)
