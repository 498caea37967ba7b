"""Grouped products of experts with MXFP4 weights: 4-bit values become bf16 in registers, from which the tensor cores read them.

bf16 holds every dequantised weight exactly. Formula, work list, order of rows and order of sums are those of `experts_plain.py`,
so the result equals that of `experts_plain.py` with dequantised weights. Weights are in the order of `mxfp4.py`. The four values
of every word form one operand of 128 columns, so the tensor cores compute a whole block of K without waiting in between.
Bound by memory (17/32 bytes per weight); the instructions that unpack weights, about four per two values, take nearly as long.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.blocks import blocks_of, check_launch
from batchspec.kernels.moe.experts_plain import experts_plain_down_reference, experts_plain_up_reference
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.mxfp4 import BLOCK, Mxfp4Weight, dequantise_mxfp4, mxfp4_shapes
from batchspec.kernels.moe.mxfp4_steps import load_columns, load_scales, load_words, unpack_block
from batchspec.kernels.moe.packed_tiles import FIRST_ROWS, HEIGHT_OF, JOINED_BELOW, MORE_ROWS, in_two, store_sums, wait_for
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing, program_place


@triton.jit
def multiply(
    x, x_more, w, w_scales, bias, pairs, out, expert, begin, count, first, num_rows, n, k,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, TWO: tl.constexpr,
    BLOCK_T: tl.constexpr, MORE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """One tile of BLOCK_N rows of W (gated: and as many of up) by BLOCK_T rows of x and the MORE rows after them.

    TWO: as two products of half the tile, gate and up in a gated one. The tensor cores run the first while the second's words
    are unpacked: Triton does not wait for a sum that only the next step of the loop uses, and the wait for the other covers both.
    Otherwise as one product of all rows.
    After the last column of K come zeros, which do not change a sum.
    MORE: a further product of the same unpacked weights, as a tile of Triton has a power of two of rows; 0: none.
    """
    num_blocks = tl.cdiv(k, 128)
    width = num_blocks * 32
    ROWS: tl.constexpr = (BLOCK_N if TWO else 2 * BLOCK_N) if GATED else (BLOCK_N // 2 if TWO else BLOCK_N)  # of a product
    acc = tl.zeros([ROWS, BLOCK_T], tl.float32)
    up = tl.zeros([ROWS, BLOCK_T], tl.float32)
    acc_more = tl.zeros([ROWS, max(MORE, 1)], tl.float32)
    up_more = tl.zeros([ROWS, max(MORE, 1)], tl.float32)
    for block in range(num_blocks):
        at = block * 128
        tokens = load_columns(x, begin, count, at, num_rows, k, BLOCK_T, 128, TMA, INTERPRETED)
        if MORE:
            more = load_columns(x_more, begin + BLOCK_T, count - BLOCK_T, at, num_rows, k, MORE, 128, TMA, INTERPRETED)
        own = load_scales(w_scales, expert, first, n, num_blocks, block, GATED, BLOCK_N)
        pair = load_words(w, expert, first, n, width, block * 32, GATED, BLOCK_N, TMA)
        if TWO:
            a, b = tl.split(pair.permute(1, 2, 0))
            a_scales, b_scales = tl.split(own.reshape(2, ROWS).permute(1, 0))
            values = unpack_block(a, a_scales, ROWS, INTERPRETED)
            acc = tl.dot(values, tokens, acc, input_precision="ieee")
            if MORE:
                acc_more = tl.dot(values, more, acc_more, input_precision="ieee")
            values = unpack_block(b, b_scales, ROWS, INTERPRETED)
            if MORE:
                up_more = tl.dot(values, more, up_more, input_precision="ieee")
            up = tl.dot(values, tokens, up, input_precision="ieee")
            up = up if INTERPRETED else wait_for(up)
        else:
            values = unpack_block(pair.reshape(ROWS, 32), own, ROWS, INTERPRETED)
            if MORE:
                acc_more = tl.dot(values, more, acc_more, input_precision="ieee")
            acc = tl.dot(values, tokens, acc, input_precision="ieee")
            acc = acc if INTERPRETED else wait_for(acc)
    store_sums(acc, up, None, bias, out, pairs, expert, begin, count, first, n, SCATTER, GATED, LIMIT, ALPHA, TWO, BLOCK_T,
               BLOCK_N)
    if MORE:
        store_sums(acc_more, up_more, None, bias, out, pairs, expert, begin + BLOCK_T, count - BLOCK_T, first, n, SCATTER, GATED,
                   LIMIT, ALPHA, TWO, MORE, BLOCK_N)


@triton.jit(do_not_specialize=["num_units", "num_rows"])
def experts_mxfp4_kernel(
    x16, x32, x64, x128, x256, w, w_scales, bias, pairs, units, out, num_units, num_rows, n, k,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, TWO: tl.constexpr,
    LOW: tl.constexpr, BLOCK_T: tl.constexpr, JOINED: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """x16 to x256: x [num_rows, k] with blocks of that many rows, None if no height of the tile needs it.

    w: words [E * 2, n, words of a row] in a gated product with TMA, else [E * rows, words of a row].
    w_scales: int32 [E, blocks, rows].
    JOINED: units of up to 48, 80 and 96 pairs run as 32 + 16, 64 + 16 and 64 + 32.
    """
    unit, tile = program_place(num_units, tl.cdiv(n, BLOCK_N), GROUP)
    first = tile * BLOCK_N
    await_earlier(PDL)
    expert = tl.load(units + unit * 4)
    begin = tl.load(units + unit * 4 + 1)
    count = tl.load(units + unit * 4 + 2)
    blocks = ((x16, None), (x32, None), (x32, x16), (x64, None), (x64, x16), (x64, x32), (x128, None), (x256, None))
    for step in tl.static_range(8):  # unrolled
        if (JOINED or MORE_ROWS[step] == 0) and HEIGHT_OF[step] >= LOW and HEIGHT_OF[step] <= BLOCK_T:
            below = JOINED_BELOW[step] if JOINED else HEIGHT_OF[step] // 2
            if (count > (below if HEIGHT_OF[step] > LOW else 0)) & (count <= HEIGHT_OF[step]):
                multiply(blocks[step][0], blocks[step][1], w, w_scales, bias, pairs, out, expert, begin, count, first, num_rows,
                         n, k, SCATTER, GATED, LIMIT, ALPHA, TWO, FIRST_ROWS[step], MORE_ROWS[step], BLOCK_N, TMA,
                         INTERPRETED)


def experts_mxfp4_up(
    x: Tensor, weight: Mxfp4Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, gate: Gate = SWIGLU,
    out: Tensor | None = None, interpret: bool = False,
) -> Tensor:
    """The gated first product of each pair.

    x        bf16 [P, H], on a CPU any float dtype, in the order of the list of pairs
    weight   from `shuffle_mxfp4`, of a matrix [E, 2I, H], gate rows before up rows
    bias     bf16 or fp32 [E, 2I], or None
    routing  from `route` with unit_pairs=tile.block_t
    tile     block_k is 128
    out      bf16 or fp32 [P, I], contiguous; None: a new tensor of x's dtype

    Returns out, in the order of the list. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    out = x.new_empty(len(x), weight.words.shape[1] // 2) if out is None else out
    if x.is_cuda or interpret:
        launch("experts_mxfp4_up", x, weight, bias, routing, tile, out, gate=gate)
        return out
    return out.copy_(experts_plain_up_reference(x, dequantise_mxfp4(weight, x.shape[1], x.dtype), bias, routing, gate=gate))


def experts_mxfp4_down(
    h: Tensor, weight: Mxfp4Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, out: Tensor | None = None,
    interpret: bool = False,
) -> Tensor:
    """The second product of each pair: h [P, I] in the order of the list, weight of a matrix [E, H, I] -> [P, H] in pair order.

    See `experts_mxfp4_up`.
    """
    out = h.new_empty(len(h), weight.words.shape[1]) if out is None else out
    if h.is_cuda or interpret:
        launch("experts_mxfp4_down", h, weight, bias, routing, tile, out)
        return out
    return out.copy_(experts_plain_down_reference(h, dequantise_mxfp4(weight, h.shape[1], h.dtype), bias, routing))


def launch(
    kernel: str, x: Tensor, weight: Mxfp4Weight, bias: Tensor | None, routing: Routing, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, compile_only: bool = False,
) -> None:
    """Check the arguments and start the kernel, unless `compile_only`."""
    num_pairs, (num_experts, w_rows, _), k = routing.expert_ids.numel(), weight.words.shape, x.shape[1]
    n = w_rows if gate is None else w_rows // 2
    words, scales = mxfp4_shapes(w_rows, k)
    check(f"{kernel}: x", x, (num_pairs, k), torch.bfloat16)
    check(f"{kernel}: words", weight.words, (num_experts, *words), torch.uint8)
    check(f"{kernel}: scales", weight.scales, (num_experts, *scales), torch.uint8)
    check(f"{kernel}: out", out, (num_pairs, n), torch.bfloat16, torch.float32)
    if bias is not None:
        check(f"{kernel}: bias", bias, (num_experts, w_rows), torch.bfloat16, torch.float32)
    check_launch(kernel, routing, tile, num_experts)
    if tile.block_k != BLOCK:
        raise ValueError(f"{kernel}: block_k is {tile.block_k}; must be {BLOCK}")
    if not len(routing.units):
        return
    flat = weight.words.view(torch.int16).view(num_experts * w_rows, -1)
    tma = tile.tma and x.data_ptr() % 16 == 0 and k * x.itemsize % 16 == 0 and flat.data_ptr() % 16 == 0
    w: Tensor | TensorDescriptor = flat
    if tma:
        w = TensorDescriptor.from_tensor(flat, [tile.block_n, BLOCK // 4])
        if gate is not None:
            w = TensorDescriptor.from_tensor(flat.view(-1, n, flat.shape[1]), [2, tile.block_n, BLOCK // 4])
    grid = (len(routing.units) * triton.cdiv(n, tile.block_n),)
    start = partial(experts_mxfp4_kernel.warmup, grid=grid) if compile_only else experts_mxfp4_kernel[grid]
    start(
        *blocks_of(x, tile, tma), w, weight.scales.view(torch.int32), bias, routing.pairs, routing.units, out,
        len(routing.units), num_pairs, n, k,
        SCATTER=gate is None, GATED=gate is not None, LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha,
        TWO=in_two(tile.block_n, tile.warps, gated=gate is not None), LOW=tile.low, BLOCK_T=tile.block_t, JOINED=tile.joined,
        BLOCK_N=tile.block_n, GROUP=tile.group, TMA=tma, INTERPRETED=not x.is_cuda,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **launch_args(x),
    )


if __name__ == "__main__":
    from batchspec.kernels.benchmarks.moe_bench import main

    main()
