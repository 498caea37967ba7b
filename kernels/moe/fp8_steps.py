"""The sums over K of a tile of FP8 weights and FP8 activations (`experts_fp8.py`, `gemm/fp8_linear.py`).

A tile is one block of HALF rows of W, or two (gate and up, or neighbours), each with its own scales and sums. A tensor core's
product has a side M of at least 64, so with few tokens the rows of W are the side M (`sum_blocks`): for each block of K a thread
then needs a scale of x for every token of the tile. With many tokens, these are the side M (`sum_blocks_of_tokens`): a thread
holds two tokens of each 64, and needs only their two scales. Both give the same bits.

The tensor cores sum each block of 128 of K from 0. With scales of blocks, one explicit `fma` multiplies this sum by its scales
and adds it (`add_scaled`). Kernels are launched with enable_fp_fusion=False, so that the compiler fuses nothing else, which it
might do in some tiles only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.moe.blocks import load_row_blocks, load_rows, load_tokens
from batchspec.kernels.moe.quantise import GROUP, Fp8Rows


@triton.jit
def scale_at(scales, expert, tile_row, num_rows, block, num_blocks):
    """The scale of a block of 128 rows and 128 columns of an expert's weight; 0 past the last block of columns."""
    return tl.load(scales + (expert * num_rows + tile_row) * num_blocks + block, mask=block < num_blocks, other=0.0)


@triton.jit
def add_scaled(acc, part, scale):
    """acc + part * scale, rounded once. scale broadcasts against the others."""
    return tl.fma(part, tl.broadcast_to(scale, part.shape), acc)


@triton.jit
def sum_blocks(
    x, own_scales, w, w_scales, expert, begin, count, first, second, scale_row, second_scale_row, num_rows, w_rows, scale_rows,
    k, start, stop,
    TWO: tl.constexpr, BLOCKED: tl.constexpr, BLOCK_T: tl.constexpr, HALF: tl.constexpr, TMA: tl.constexpr, TOP_K: tl.constexpr,
    EVEN_K: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):
    """Sums [HALF, BLOCK_T] over blocks start to stop of K of the rows of W from `first` on, if TWO also of those from `second`.

    Rows of W are on M. own_scales: pointers [BLOCK_T] to the scales of x of block 0, num_rows apart from block to
    block; scale_row, second_scale_row: rows of the scales of W, of which an expert has scale_rows. Row scales are left to
    `apply_row_scales`. TOP_K not 0: x is pointers from `rows_of_tokens`.
    """
    num_blocks = tl.cdiv(k, 128)
    acc = tl.zeros([HALF, BLOCK_T], tl.float32)
    other = tl.zeros([HALF, BLOCK_T], tl.float32)
    lane = tl.arange(0, BLOCK_T)
    if BLOCKED:  # loaded one block ahead: Triton does not pipeline loads of scalars
        scale = scale_at(w_scales, expert, scale_row, scale_rows, start, num_blocks)
        other_scale = scale_at(w_scales, expert, second_scale_row, scale_rows, start, num_blocks) if TWO else scale
    for block in tl.range(start, stop, num_stages=STAGES):
        at = block * 128
        if TOP_K:
            tokens = tl.trans(load_row_blocks(x, at, k, 128)).to(DOT)
        else:
            tokens = tl.trans(load_tokens(x, begin, count, at, num_rows, k, BLOCK_T, 128, TMA)).to(DOT)
        a = load_rows(w, expert, first, w_rows, at, k, HALF, 128, TMA, EVEN_K)
        if BLOCKED:
            x_scale = tl.load(own_scales + block * num_rows, mask=lane < count, other=0.0)
            next_scale = scale_at(w_scales, expert, scale_row, scale_rows, block + 1, num_blocks)
        part = tl.dot(a.to(DOT), tokens, input_precision="ieee")
        acc = add_scaled(acc, part, (x_scale * scale)[None, :]) if BLOCKED else acc + part
        if TWO:
            b = load_rows(w, expert, second, w_rows, at, k, HALF, 128, TMA, EVEN_K)
            part = tl.dot(b.to(DOT), tokens, input_precision="ieee")
            other = add_scaled(other, part, (x_scale * other_scale)[None, :]) if BLOCKED else other + part
            if BLOCKED:
                other_scale = scale_at(w_scales, expert, second_scale_row, scale_rows, block + 1, num_blocks)
        if BLOCKED:
            scale = next_scale
    return acc, other


@triton.jit
def sum_blocks_of_tokens(
    x, own_scales, w, w_scales, expert, begin, count, first, second, scale_row, second_scale_row, num_rows, w_rows, scale_rows,
    k,
    BLOCKED: tl.constexpr, BLOCK_T: tl.constexpr, HALF: tl.constexpr, TMA: tl.constexpr, TOP_K: tl.constexpr,
    EVEN_K: tl.constexpr, DOT: tl.constexpr,
):
    """The sums of `sum_blocks` over all of K, for two blocks of rows, with the tokens on M; also [HALF, BLOCK_T] each.

    The scales of x are read into registers while the first product runs: if Triton pipelined these loads, every warp would copy
    them to shared memory number by number. Those of W, which come from memory rather than from the L2 cache, are loaded one block
    ahead. own_scales of rows past `count` point to some row's.
    """
    num_blocks = tl.cdiv(k, 128)
    acc = tl.zeros([BLOCK_T, HALF], tl.float32)
    other = tl.zeros([BLOCK_T, HALF], tl.float32)
    if BLOCKED:
        scale = scale_at(w_scales, expert, scale_row, scale_rows, 0, num_blocks)
        other_scale = scale_at(w_scales, expert, second_scale_row, scale_rows, 0, num_blocks)
    for block in range(num_blocks):
        at = block * 128
        if TOP_K:
            tokens = load_row_blocks(x, at, k, 128).to(DOT)
        else:
            tokens = load_tokens(x, begin, count, at, num_rows, k, BLOCK_T, 128, TMA).to(DOT)
        a = tl.trans(load_rows(w, expert, first, w_rows, at, k, HALF, 128, TMA, EVEN_K)).to(DOT)
        b = tl.trans(load_rows(w, expert, second, w_rows, at, k, HALF, 128, TMA, EVEN_K)).to(DOT)
        if BLOCKED:
            x_scale = tl.load(own_scales + block * num_rows)
            next_scale = scale_at(w_scales, expert, scale_row, scale_rows, block + 1, num_blocks)
            next_other = scale_at(w_scales, expert, second_scale_row, scale_rows, block + 1, num_blocks)
        part = tl.dot(tokens, a, input_precision="ieee")
        acc = add_scaled(acc, part, (x_scale * scale)[:, None]) if BLOCKED else acc + part
        part = tl.dot(tokens, b, input_precision="ieee")
        other = add_scaled(other, part, (x_scale * other_scale)[:, None]) if BLOCKED else other + part
        if BLOCKED:
            scale = next_scale
            other_scale = next_other
    return tl.trans(acc), tl.trans(other)


@triton.jit
def apply_row_scales(acc, own_scales, w_scales, expert, count, first, w_rows, last, scale_stride, HALF: tl.constexpr):
    """Sums [HALF, BLOCK_T] over all of K, times the scale of each row of x and of W; no row of W past `last` is read.

    own_scales: pointers [BLOCK_T] to the scales of x
    scale_stride: 1 if each of the w_rows rows of an expert has a scale, 0 if the expert has one
    """
    x_scale = tl.load(own_scales, mask=tl.arange(0, own_scales.shape[0]) < count, other=0.0)[None, :]
    rows = tl.minimum(first + tl.arange(0, HALF), last) * scale_stride
    own = w_scales + expert * (w_rows * scale_stride + 1 - scale_stride)
    return acc * x_scale * tl.load(own + rows)[:, None]


def fp8_product_reference(x: Fp8Rows, values: Tensor, scales: Tensor, *, gated: bool) -> Tensor:
    """R rows times one weight, in plain torch: [R, N] in the dtype of x.scales (fp32 or fp64).

    values  e4m3 [N, K]
    scales  [row blocks, ceil(K / 128)] of blocks, [N] of rows, or [] of the whole weight
    gated   gate rows and up rows have blocks of scales of their own
    """
    (num_rows, k), wide = values.shape, x.scales.dtype
    if scales.dim() < 2:
        return x.values.to(wide) @ values.to(wide).T * x.scales.T * scales.to(wide)
    parts = 2 if gated else 1
    of_row = torch.arange(num_rows // parts, device=values.device) // GROUP
    of_row = torch.cat([of_row + part * (len(scales) // parts) for part in range(parts)])
    y = torch.zeros(len(x.values), num_rows, dtype=wide, device=values.device)
    for block in range(-(-k // GROUP)):
        part = slice(block * GROUP, (block + 1) * GROUP)
        dot = x.values[:, part].to(wide) @ values[:, part].to(wide).T
        y += dot * x.scales[block, :, None] * scales[of_row, block].to(wide)
    return y
