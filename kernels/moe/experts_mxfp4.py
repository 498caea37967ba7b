"""Grouped products of experts with MXFP4 weights: 4-bit values become bf16 in registers, from which the tensor cores read them.

bf16 holds every dequantised weight exactly. Formula, work list and order of sums are those of `experts.py`, so the result equals
that of `experts.py` with dequantised weights. Weights are in the order of `mxfp4.py`.
Bound by memory (17/32 bytes per weight); the instructions that unpack weights, about four for two values, take nearly as long.
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
from batchspec.kernels.moe.experts import (
    add_bias_and_gate,
    check_launch,
    experts_down_reference,
    experts_up_reference,
    load_rows,
    write_pairs,
)
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.mxfp4 import BLOCK, Mxfp4Weight, dequantise_mxfp4, mxfp4_shapes, unpack
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing, program_place, unit_pairs


@triton.jit
def load_scales(scales, expert, first, num_rows, block, num_blocks, BLOCK_N: tl.constexpr):
    """int32 [BLOCK_N]: for each row the four scales of this block of 128 columns, one per byte."""
    rows = tl.minimum(first + tl.arange(0, BLOCK_N), num_rows - 1)
    return tl.load(scales + (expert * num_blocks + block).to(tl.int64) * num_rows + rows)


@triton.jit
def wait_for(acc):
    """acc unchanged, but only once its wgmma has finished.

    If a wgmma were still running at the end of the loop's body, ptxas would wait after every single wgmma (its warning C7515).
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["num_units"])
def experts_mxfp4_kernel(
    x, w, w_scales, bias, pairs, units, out, num_units, n, k, stride_x,
    SLOTS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """w: int16 words, 32 (BLOCK_K / 4) for each 128 values (BLOCK_K) of a row. SLOTS: number of pairs that read one row of x."""
    unit, tile = program_place(num_units, tl.cdiv(n, BLOCK_N), GROUP)
    await_earlier(PDL)
    expert, pair, exists, count = unit_pairs(pairs, units, unit, 0, BLOCK_T)
    if count == 0:
        return
    num_blocks = tl.cdiv(k, BLOCK_K)
    PART_K: tl.constexpr = BLOCK_K // 4
    rows = x + (pair // SLOTS * stride_x)[None, :]
    first = tile * BLOCK_N
    w_rows = 2 * n if GATED else n
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for block in range(0, num_blocks):
        a = load_rows(w, expert, first, w_rows, block * PART_K, num_blocks * PART_K, BLOCK_N, PART_K, TMA, True)
        a_scales = load_scales(w_scales, expert, first, w_rows, block, num_blocks, BLOCK_N)
        if GATED:
            b = load_rows(w, expert, n + first, w_rows, block * PART_K, num_blocks * PART_K, BLOCK_N, PART_K, TMA, True)
            b_scales = load_scales(w_scales, expert, n + first, w_rows, block, num_blocks, BLOCK_N)
        for part in tl.static_range(4):
            depth = block * BLOCK_K + part * PART_K + tl.arange(0, PART_K)
            # Lanes without a pair read nothing: all programs would read the same row for them.
            if EVEN_K:
                tokens = tl.load(rows + depth[:, None], mask=exists[None, :], other=0.0)
            else:
                tokens = tl.load(rows + depth[:, None], mask=(depth < k)[:, None] & exists[None, :], other=0.0)
            if INTERPRETED:
                tokens = tokens.to(tl.float32)
            acc = tl.dot(unpack(a, a_scales, part, INTERPRETED), tokens, acc, input_precision="ieee")
            if GATED:
                up = tl.dot(unpack(b, b_scales, part, INTERPRETED), tokens, up, input_precision="ieee")
        if not INTERPRETED:
            acc = wait_for(acc)
            if GATED:
                up = wait_for(up)
    acc = add_bias_and_gate(acc, up, bias, expert, first, n, GATED, LIMIT, ALPHA, BLOCK_N)
    write_pairs(acc, out, first, pair, exists, n, BLOCK_N)


def experts_mxfp4_up(
    x: Tensor, weight: Mxfp4Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, gate: Gate = SWIGLU,
    out: Tensor | None = None, interpret: bool = False,
) -> Tensor:  # fmt: skip
    """The gated first product of each pair.

    x        bf16 [T, H], on a CPU any float dtype  rows may be slices of wider rows; on a GPU they begin at 16-byte boundaries
    weight   from `shuffle_mxfp4`, of a matrix [E, 2I, H], gate rows before up rows
    bias     bf16 or fp32 [E, 2I], or None
    routing  from `route` with unit_pairs=tile.block_t
    tile     block_k is 128
    out      bf16 or fp32 [P, I], contiguous, in pair order; None: a new tensor of x's dtype

    Returns out. Does not synchronise on a GPU. The launch raises ValueError for other shapes, dtypes or strides.
    """
    (num_tokens, top_k), width = routing.expert_ids.shape, weight.words.shape[1] // 2
    out = x.new_empty(num_tokens * top_k, width) if out is None else out
    if x.is_cuda or interpret:
        launch("experts_mxfp4_up", x, weight, bias, routing, tile, out, gate=gate)
    else:
        wide = dequantise_mxfp4(weight, x.shape[1], x.dtype)
        out.copy_(experts_up_reference(x, wide, bias, routing.expert_ids, gate=gate))
    return out


def experts_mxfp4_down(
    h: Tensor, weight: Mxfp4Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, out: Tensor | None = None,
    interpret: bool = False,
) -> Tensor:  # fmt: skip
    """The second product of each pair: h [P, I] in pair order, weight of a matrix [E, H, I] -> [P, H]. See `experts_mxfp4_up`."""
    out = h.new_empty(h.shape[0], weight.words.shape[1]) if out is None else out
    if h.is_cuda or interpret:
        launch("experts_mxfp4_down", h, weight, bias, routing, tile, out)
    else:
        out.copy_(experts_down_reference(h, dequantise_mxfp4(weight, h.shape[1], h.dtype), bias, routing.expert_ids))
    return out


def launch(
    kernel: str, x: Tensor, weight: Mxfp4Weight, bias: Tensor | None, routing: Routing, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, compile_only: bool = False,
) -> None:  # fmt: skip
    """Check the arguments and start the kernel, unless `compile_only`."""
    (num_tokens, top_k), (num_experts, w_rows, _), k = routing.expert_ids.shape, weight.words.shape, x.shape[1]
    n, slots = (w_rows, 1) if gate is None else (w_rows // 2, top_k)
    words, scales = mxfp4_shapes(w_rows, k)
    check(f"{kernel}: x", x, (num_tokens * top_k // slots, k), torch.bfloat16, rows=True)
    check(f"{kernel}: words", weight.words, (num_experts, *words), torch.uint8)
    check(f"{kernel}: scales", weight.scales, (num_experts, *scales), torch.uint8)
    check(f"{kernel}: out", out, (num_tokens * top_k, n), torch.bfloat16, torch.float32)
    if bias is not None:
        check(f"{kernel}: bias", bias, (num_experts, w_rows), torch.bfloat16, torch.float32)
    check_launch(kernel, routing, tile, num_experts)
    if tile.block_k != BLOCK:
        raise ValueError(f"{kernel}: block_k is {tile.block_k}; must be {BLOCK}")
    if not len(routing.units):
        return
    flat = weight.words.view(torch.int16).view(num_experts * w_rows, -1)
    tma = tile.tma and flat.data_ptr() % 16 == 0
    grid = (len(routing.units) * triton.cdiv(n, tile.block_n),)
    start = partial(experts_mxfp4_kernel.warmup, grid=grid) if compile_only else experts_mxfp4_kernel[grid]
    start(
        x, TensorDescriptor.from_tensor(flat, [tile.block_n, BLOCK // 4]) if tma else flat, weight.scales.view(torch.int32), bias,
        routing.pairs, routing.units, out, len(routing.units), n, k, x.stride(0),
        SLOTS=slots, GATED=gate is not None, LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha,
        BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, BLOCK_K=BLOCK, GROUP=tile.group, TMA=tma, EVEN_K=k % BLOCK == 0,
        INTERPRETED=not x.is_cuda, num_warps=tile.warps, num_stages=tile.stages, **launch_args(x),
    )  # fmt: skip


if __name__ == "__main__":
    from batchspec.kernels.benchmarks.moe_bench import main

    main()
