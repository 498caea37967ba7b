"""Grouped products of experts with MXFP4 weights: 4-bit values become bf16 in registers, from which the tensor cores read them.

bf16 holds every dequantised weight exactly. Formula, work list, order of rows and order of sums are those of `experts_plain.py`,
so the result equals that of `experts_plain.py` with dequantised weights. Weights are in the order of `mxfp4.py`: each thread
loads the words of its own operands, a step of the loop over K ahead. The four values of every word form one operand of 128
columns, so the tensor cores compute a whole block of K without waiting in between. A program has four warps or eight.
Bound by memory (17/32 bytes per weight); the instructions that unpack weights, about four per two values, take nearly as long.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.fetch import fetch_to_l2
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.blocks import blocks_of, check_launch
from batchspec.kernels.moe.experts_plain import experts_plain_down_reference, experts_plain_up_reference
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.mxfp4 import BLOCK, Mxfp4Weight, dequantise_mxfp4, mxfp4_shapes
from batchspec.kernels.moe.mxfp4_steps import load_columns, load_scales, load_words, scales_of_blocks, unpack_block
from batchspec.kernels.moe.packed_tiles import FIRST_ROWS, HEIGHT_OF, JOINED_BELOW, MORE_ROWS, store_sums, wait_for
from batchspec.kernels.moe.tiles import FEW_UNITS, ExpertTile, mxfp4_rows
from batchspec.kernels.moe.units import Routing, program_place

FETCHED = 3
"""Steps of weights that a program fetches to the L2 cache ahead, if there are at most FEW_UNITS units: the loads of so few
programs do not use the whole bandwidth. One token of gpt-oss takes 33 us a layer with it, 38 without; more tokens gain at most
what such runs differ by (one H200, 2026-11-26)."""


@triton.jit
def add_last(values, tokens, more, acc, acc_more, MORE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The sums with the last products of a step, after the tensor cores have finished all products of the step."""
    if MORE:
        acc_more = tl.dot(values, more, acc_more, input_precision="ieee")
    acc = tl.dot(values, tokens, acc, input_precision="ieee")
    return acc if INTERPRETED else wait_for(acc), acc_more


@triton.jit
def multiply(
    x, x_more, w, w_scales, bias, pairs, out, expert, begin, count, tile, num_rows, n, k,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_T: tl.constexpr, MORE: tl.constexpr, THREADS: tl.constexpr, FETCHED: tl.constexpr, TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A pair of blocks of 64 rows of W (gated: of gate and up; others: adjacent) by BLOCK_T rows of x and the MORE after them.

    With four warps each block is a product of its own. The tensor cores run the first while the second's words are unpacked:
    Triton does not wait for a sum that only the next step of the loop uses, and the wait for the other covers both.
    With eight warps both are one product, each block of four warps: twice as many warps fit on a multiprocessor.
    A last pair that is stored as one block is read as two: it is the first; and the second too, whose sums are not stored, or in
    a gated product with its halves exchanged, so that rows of up are those of the gate in the first.
    After the last column of K come zeros, which do not change a sum. Rows after the last one are not stored.
    MORE: a further product of the same unpacked weights, as a tile of Triton has a power of two of rows; 0: none.
    """
    BLOCK_N: tl.constexpr = 64 if GATED else 128
    TWO: tl.constexpr = THREADS == 128
    num_blocks, steps = tl.cdiv(2 * n if GATED else n, 64), tl.cdiv(k, 128)
    w += (expert * num_blocks + tile * 2).to(tl.int64) * steps * 1024
    w_scales += (expert * tl.cdiv(num_blocks, 2) + tile).to(tl.int64) * steps * 128
    alone = tile * 2 + 1 == num_blocks
    size = tl.where(alone, 1024, 2048)  # of a step
    second = tl.where(alone, 0, 1024)
    turn = tl.where(alone, 2, 0) if GATED else 0
    acc = tl.zeros([THREADS // 2, BLOCK_T], tl.float32)
    up = tl.zeros([64, BLOCK_T], tl.float32)
    acc_more = tl.zeros([THREADS // 2, max(MORE, 1)], tl.float32)
    up_more = tl.zeros([64, max(MORE, 1)], tl.float32)
    if FETCHED:
        fetch_to_l2(w, tl.minimum(steps, FETCHED) * size * 4)
        fetch_to_l2(w_scales, steps * 512)
    next_a, next_b = load_words(w, second, turn, THREADS)
    next_scales = load_scales(w_scales, THREADS)
    for step in range(steps):
        if FETCHED:
            ahead = step + FETCHED
            if ahead < steps:
                fetch_to_l2(w + ahead * size, size * 4)
        a, b = next_a, next_b
        a_scales, b_scales = scales_of_blocks(next_scales, THREADS)
        later = tl.minimum(step + 1, steps - 1)  # the last step loads its own again
        next_a, next_b = load_words(w + later * size, second, turn, THREADS)
        next_scales = load_scales(w_scales + later * 128, THREADS)
        tokens = load_columns(x, begin, count, step * 128, num_rows, k, BLOCK_T, 128, TMA, INTERPRETED)
        more = tokens
        if MORE:
            more = load_columns(x_more, begin + BLOCK_T, count - BLOCK_T, step * 128, num_rows, k, MORE, 128, TMA, INTERPRETED)
        values = unpack_block(a, a_scales, INTERPRETED)
        if TWO:
            acc = tl.dot(values, tokens, acc, input_precision="ieee")
            if MORE:
                acc_more = tl.dot(values, more, acc_more, input_precision="ieee")
            values = unpack_block(b, b_scales, INTERPRETED)
            up, up_more = add_last(values, tokens, more, up, up_more, MORE, INTERPRETED)
        else:
            acc, acc_more = add_last(values, tokens, more, acc, acc_more, MORE, INTERPRETED)
    first = tile * BLOCK_N
    store_sums(acc, up, None, bias, out, pairs, expert, begin, count, first, n, SCATTER, GATED, LIMIT, ALPHA, TWO, BLOCK_T,
               BLOCK_N)
    if MORE:
        store_sums(acc_more, up_more, None, bias, out, pairs, expert, begin + BLOCK_T, count - BLOCK_T, first, n, SCATTER, GATED,
                   LIMIT, ALPHA, TWO, MORE, BLOCK_N)


@triton.jit(do_not_specialize=["num_rows"])
def experts_mxfp4_kernel(
    x16, x32, x64, x128, x256, w, w_scales, bias, pairs, units, out, num_rows, n, k,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    LOW: tl.constexpr, BLOCK_T: tl.constexpr, JOINED: tl.constexpr, THREADS: tl.constexpr,
    FETCHED: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """x16 to x256: x [num_rows, k] with blocks of that many rows, None if no height of the tile needs it.

    w, w_scales: int32, of all experts in the order of `mxfp4.py`
    THREADS: of a program, 128 or 256 (`multiply`)
    FETCHED: only on cards with early starts (`pdl.py`), which have what `fetch_to_l2` needs.
    JOINED: units of up to 48, 80 and 96 pairs run as 32 + 16, 64 + 16 and 64 + 32.
    """
    await_earlier(PDL)
    expert, begin, count, tile = program_place(units, tl.cdiv(n, 64 if GATED else 128), BLOCK_T)
    blocks = ((x16, None), (x32, None), (x32, x16), (x64, None), (x64, x16), (x64, x32), (x128, None), (x256, None))
    for step in tl.static_range(8):  # unrolled
        if (JOINED or MORE_ROWS[step] == 0) and HEIGHT_OF[step] >= LOW and HEIGHT_OF[step] <= BLOCK_T:
            below = JOINED_BELOW[step] if JOINED else HEIGHT_OF[step] // 2
            if (count > (below if HEIGHT_OF[step] > LOW else 0)) & (count <= HEIGHT_OF[step]):
                multiply(blocks[step][0], blocks[step][1], w, w_scales, bias, pairs, out, expert, begin, count, tile, num_rows,
                         n, k, SCATTER, GATED, LIMIT, ALPHA, FIRST_ROWS[step], MORE_ROWS[step], THREADS, FETCHED if PDL else 0,
                         TMA, INTERPRETED)


def experts_mxfp4_up(
    x: Tensor, weight: Mxfp4Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, gate: Gate = SWIGLU,
    out: Tensor | None = None, interpret: bool = False,
) -> Tensor:
    """The gated first product of each pair.

    x        bf16 [P, H], on a CPU any float dtype, in the order of the list of pairs
    weight   from `shuffle_mxfp4` with gated=True, of a matrix [E, 2I, H], gate rows before up rows
    bias     bf16 or fp32 [E, 2I], or None
    routing  from `route` with unit_pairs=tile.block_t
    tile     block_n is 64, block_k 128, warps 4 or 8
    out      bf16 or fp32 [P, I], contiguous; None: a new tensor of x's dtype

    Returns out, in the order of the list. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    out = x.new_empty(len(x), weight.num_rows // 2) if out is None else out
    if x.is_cuda or interpret:
        launch("experts_mxfp4_up", x, weight, bias, routing, tile, out, gate=gate)
        return out
    return out.copy_(experts_plain_up_reference(x, dequantise_mxfp4(weight, x.dtype), bias, routing, gate=gate))


def experts_mxfp4_down(
    h: Tensor, weight: Mxfp4Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, out: Tensor | None = None,
    interpret: bool = False,
) -> Tensor:
    """The second product of each pair: h [P, I] in the order of the list, weight of a matrix [E, H, I] -> [P, H] in pair order.

    See `experts_mxfp4_up`; the weight is from `shuffle_mxfp4` with gated=False, and block_n is 128.
    """
    out = h.new_empty(len(h), weight.num_rows) if out is None else out
    if h.is_cuda or interpret:
        launch("experts_mxfp4_down", h, weight, bias, routing, tile, out)
        return out
    return out.copy_(experts_plain_down_reference(h, dequantise_mxfp4(weight, h.dtype), bias, routing))


def launch(
    kernel: str, x: Tensor, weight: Mxfp4Weight, bias: Tensor | None, routing: Routing, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, compile_only: bool = False,
) -> None:
    """Check the arguments and start the kernel, unless `compile_only`."""
    num_pairs, num_experts, k, gated = routing.expert_ids.numel(), len(weight.words), weight.k, gate is not None
    n = weight.num_rows // 2 if gated else weight.num_rows
    words, scales = mxfp4_shapes(weight.num_rows, k)
    check(f"{kernel}: x", x, (num_pairs, k), torch.bfloat16)
    check(f"{kernel}: words", weight.words, (num_experts, *words), torch.uint8)
    check(f"{kernel}: scales", weight.scales, (num_experts, *scales), torch.uint8)
    check(f"{kernel}: out", out, (num_pairs, n), torch.bfloat16, torch.float32)
    if bias is not None:
        check(f"{kernel}: bias", bias, (num_experts, weight.num_rows), torch.bfloat16, torch.float32)
    check_launch(kernel, routing, tile, num_experts)
    if weight.gated != gated:
        raise ValueError(f"{kernel}: the weight was shuffled with gated={weight.gated}; must be {gated}")
    if (tile.block_n, tile.block_k) != (mxfp4_rows(gated=gated), BLOCK) or tile.warps not in (4, 8):
        raise ValueError(f"{kernel}: {tile}; block_n must be {mxfp4_rows(gated=gated)}, block_k {BLOCK} and warps 4 or 8")
    if not len(routing.units):
        return
    tma = tile.tma and x.data_ptr() % 16 == 0 and k * x.itemsize % 16 == 0
    fetched = FETCHED if len(routing.units) <= FEW_UNITS else 0
    grid = (len(routing.units) * triton.cdiv(n, tile.block_n),)
    start = partial(experts_mxfp4_kernel.warmup, grid=grid) if compile_only else experts_mxfp4_kernel[grid]
    start(
        *blocks_of(x, tile, tma), weight.words.view(torch.int32), weight.scales.view(torch.int32), bias, routing.pairs,
        routing.units, out, num_pairs, n, k,
        SCATTER=not gated, GATED=gated, LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha,
        LOW=tile.low, BLOCK_T=tile.block_t, JOINED=tile.joined, THREADS=32 * tile.warps, FETCHED=fetched,
        TMA=tma, INTERPRETED=not x.is_cuda, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        **launch_args(x),
    )
