"""What a program of the products with MXFP4 weights loads and unpacks in each step of the loop over K (`experts_mxfp4.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.moe.blocks import load_rows, load_tokens
from batchspec.kernels.moe.mxfp4 import unpack


@triton.jit
def load_words(
    w, expert, first, n, width, at, GATED: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr
):
    """A block of 32 columns of words: [2, BLOCK_N, 32] of gate and up; of a plain product [2, BLOCK_N / 2, 32], its halves."""
    if GATED and TMA:  # one copy for gate and up: each copy costs the program a barrier
        pair = w.load([expert * 2, first, at])
    elif GATED:  # one load too: joining two would place words of two rows side by side
        lane = tl.arange(0, 2 * BLOCK_N)
        row = expert.to(tl.int64) * 2 * n + tl.minimum(first + lane % BLOCK_N, n - 1) + lane // BLOCK_N * n
        pair = tl.load(w + row[:, None] * width + (at + tl.arange(0, 32))[None, :]).reshape(2, BLOCK_N, 32)
    else:
        pair = load_rows(w, expert, first, n, at, width, BLOCK_N, 32, TMA, True).reshape(2, BLOCK_N // 2, 32)
    return pair


@triton.jit
def load_scales(w_scales, expert, first, n, num_blocks, block, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Scales of a block of 128 columns in one load: int32 [2 * BLOCK_N] of gate and up, [BLOCK_N] of a plain product."""
    LANES: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    rows = 2 * n if GATED else n
    lane = tl.arange(0, LANES)
    row = first + (lane % BLOCK_N + lane // BLOCK_N * n if GATED else lane)
    own = w_scales + (expert * num_blocks).to(tl.int64) * rows
    return tl.load(own + (block * rows + tl.minimum(row, rows - 1)))


@triton.jit
def load_columns(
    x, begin, count, at, num_rows, k, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr
):
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
