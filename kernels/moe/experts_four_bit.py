"""Grouped products of experts with weights of four bits, INT4 or NVFP4: codes become bf16 in registers, from which the tensor
cores read them.

INT4 weights are rounded once to bf16, as `dequantise` gives them (`common/four_bit.py`). Formula, work list, order of rows and
order of sums are those of `experts_plain.py`, so the result equals that of `experts_plain.py` with dequantised weights. NVFP4
weights are not rounded, and sums are multiplied by row scales (`common/nvfp4.py`). The loop over K is that of the dense product
(`gemm/four_bit_steps.py`).
Bound by memory (the weights of the experts that have tokens); the instructions that unpack INT4 weights take two thirds as long,
those of NVFP4 weights four fifths.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.four_bit import BLOCK, ROWS, WORDS, FourBitWeight, multiplied, pairs_of, scale_dtype
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.four_bit_linear import words_operand
from batchspec.kernels.gemm.four_bit_steps import SIZE, sum_blocks
from batchspec.kernels.moe.blocks import blocks_of, check_launch
from batchspec.kernels.moe.experts_plain import experts_plain_down_reference, experts_plain_up_reference
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.packed_tiles import FIRST_ROWS, HEIGHT_OF, JOINED_BELOW, MORE_ROWS, in_two, store_sums
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing, program_place


class StackedFourBit(NamedTuple):
    """The weights [N, K] of E experts of one format, with the same groups of columns; see `FourBitWeight`."""

    words: Tensor
    """int16 [E, ceil(K / 128), N / 16, 512], contiguous"""
    scales: Tensor
    """[E, G, N], contiguous; those of `FourBitWeight`"""
    shifts: Tensor | None
    """bf16 [E, G, N], contiguous, -z * s / SIZE; None: all zero points are 8"""
    k: int
    group: int
    """The size of the groups as kernels take it (`FourBitWeight.kernel_group`)."""
    row_scales: Tensor | None = None
    """fp32 [E, 1, N], contiguous; None: INT4 weights"""

    @property
    def num_rows(self) -> int:
        """N, a multiple of 16; of a gated product those of each half are."""
        return self.scales.shape[2]

    def expert(self, index: int) -> FourBitWeight:
        """The weight of an expert, without copies."""
        shifts, rows = (None if own is None else own[index] for own in (self.shifts, self.row_scales))
        group = self.group or self.k
        return FourBitWeight(self.words[index], self.scales[index], shifts, self.num_rows, self.k, group, row_scales=rows)


@triton.jit
def multiply(
    x, x_more, w, scales, shifts, row_scales, bias, pairs, out, expert, begin, count, first, num_rows, n, k, num_groups,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, GROUP: tl.constexpr, TWO: tl.constexpr,
    BLOCK_T: tl.constexpr, MORE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile of BLOCK_N rows of W (gated: and as many of up) by BLOCK_T rows of x and the MORE rows after them."""
    acc, up, acc_more, up_more = sum_blocks(
        x, x_more, w, scales, shifts, expert, begin, first, num_rows, n, 2 * n if GATED else n, k, k, num_groups, 0,
        tl.cdiv(k, 128), GROUP, GATED, TWO, BLOCK_T, MORE, BLOCK_N, TMA, EVEN_K, INTERPRETED,
    )
    store_sums(acc * SIZE, up * SIZE, row_scales, bias, out, pairs, expert, begin, count, first, n, SCATTER, GATED, LIMIT, ALPHA,
               TWO, BLOCK_T, BLOCK_N)
    if MORE:
        store_sums(acc_more * SIZE, up_more * SIZE, row_scales, bias, out, pairs, expert, begin + BLOCK_T, count - BLOCK_T, first,
                   n, SCATTER, GATED, LIMIT, ALPHA, TWO, MORE, BLOCK_N)


@triton.jit(do_not_specialize=["num_rows"])
def experts_four_bit_kernel(
    x16, x32, x64, x128, x256, w, scales, shifts, row_scales, bias, pairs, units, out, num_rows, n, k, num_groups,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, GROUP: tl.constexpr, TWO: tl.constexpr,
    LOW: tl.constexpr, BLOCK_T: tl.constexpr, JOINED: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """x16 to x256: x [num_rows, k] with blocks of that many rows, None if no height of the tile needs it. w: see `load_words`.

    num_groups: of a row. JOINED: units of up to 48, 80 and 96 pairs run as 32 + 16, 64 + 16 and 64 + 32.
    """
    await_earlier(PDL)
    expert, begin, count, tile = program_place(units, tl.cdiv(n, BLOCK_N), BLOCK_T)
    first = tile * BLOCK_N
    blocks = ((x16, None), (x32, None), (x32, x16), (x64, None), (x64, x16), (x64, x32), (x128, None), (x256, None))
    for step in tl.static_range(8):  # unrolled
        if (JOINED or MORE_ROWS[step] == 0) and HEIGHT_OF[step] >= LOW and HEIGHT_OF[step] <= BLOCK_T:
            below = JOINED_BELOW[step] if JOINED else HEIGHT_OF[step] // 2
            if (count > (below if HEIGHT_OF[step] > LOW else 0)) & (count <= HEIGHT_OF[step]):
                multiply(blocks[step][0], blocks[step][1], w, scales, shifts, row_scales, bias, pairs, out, expert, begin, count,
                         first, num_rows, n, k, num_groups, SCATTER, GATED, LIMIT, ALPHA, GROUP, TWO, FIRST_ROWS[step],
                         MORE_ROWS[step], BLOCK_N, TMA, EVEN_K, INTERPRETED)


def experts_four_bit_up(
    x: Tensor, weight: StackedFourBit, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, gate: Gate = SWIGLU,
    out: Tensor | None = None, interpret: bool = False,
) -> Tensor:
    """The gated first product of each pair.

    x        bf16 [P, H], on a CPU any float dtype, in the order of the list of pairs
    weight   of a matrix [E, 2I, H], gate rows before up rows, without a gate [E, I, H]; I a multiple of 16; scales as for
             `four_bit_linear`
    bias     bf16 or fp32 [E, 2I], or [E, I], or None
    routing  from `route` with unit_pairs=tile.block_t
    tile     block_k is 128
    out      bf16 or fp32 [P, I], contiguous; None: a new tensor of x's dtype

    Returns out, in the order of the list. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    out = x.new_empty(len(x), weight.num_rows // gate.parts) if out is None else out
    if x.is_cuda or interpret:
        launch("experts_four_bit_up", x, weight, bias, routing, tile, out, gate=gate)
        return out
    return out.copy_(experts_plain_up_reference(x, dequantised(weight, x.dtype), bias, routing, gate=gate))


def experts_four_bit_down(
    h: Tensor, weight: StackedFourBit, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, out: Tensor | None = None,
    interpret: bool = False,
) -> Tensor:
    """The second product of each pair: h [P, I] in the order of the list, weight of a matrix [E, H, I] -> [P, H] in pair order.

    See `experts_four_bit_up`.
    """
    out = h.new_empty(len(h), weight.num_rows) if out is None else out
    if h.is_cuda or interpret:
        launch("experts_four_bit_down", h, weight, bias, routing, tile, out)
        return out
    return out.copy_(experts_plain_down_reference(h, dequantised(weight, h.dtype), bias, routing))


def dequantised(weight: StackedFourBit, dtype: torch.dtype = torch.float32) -> Tensor:
    """[E, N, K], rounded as the kernel does: INT4 weights to bf16."""
    own = [multiplied(weight.expert(expert), dtype) for expert in range(len(weight.words))]
    return torch.stack(own)


def launch(
    kernel: str, x: Tensor, weight: StackedFourBit, bias: Tensor | None, routing: Routing, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, compile_only: bool = False,
) -> None:
    """Check the arguments and start the kernel, unless `compile_only`."""
    num_pairs, (num_experts, num_groups, w_rows), k = routing.expert_ids.numel(), weight.scales.shape, weight.k
    gated = gate is not None and gate.parts == 2
    n = w_rows // 2 if gated else w_rows
    check(f"{kernel}: x", x, (num_pairs, k), torch.bfloat16)
    check(f"{kernel}: words", weight.words, (num_experts, -(-k // BLOCK), w_rows // ROWS, ROWS * WORDS), torch.int16)
    check(f"{kernel}: scales", weight.scales, (num_experts, num_groups, w_rows), scale_dtype(weight.row_scales))
    if weight.row_scales is not None:
        check(f"{kernel}: row_scales", weight.row_scales, (num_experts, 1, w_rows), torch.float32)
    if weight.shifts is not None:
        check(f"{kernel}: shifts", weight.shifts, (num_experts, num_groups, w_rows), torch.bfloat16)
    check(f"{kernel}: out", out, (num_pairs, n), torch.bfloat16, torch.float32)
    if bias is not None:
        check(f"{kernel}: bias", bias, (num_experts, w_rows), torch.bfloat16, torch.float32)
    check_launch(kernel, routing, tile, num_experts)
    if tile.block_k != BLOCK or n % ROWS:
        raise ValueError(f"{kernel}: block_k is {tile.block_k} and {n} outputs; must be {BLOCK} and a multiple of {ROWS}")
    if not len(routing.units):
        return
    tma = tile.tma and x.data_ptr() % 16 == 0 and k % 8 == 0
    grid = (len(routing.units) * triton.cdiv(n, tile.block_n),)
    start = partial(experts_four_bit_kernel.warmup, grid=grid) if compile_only else experts_four_bit_kernel[grid]
    start(
        *blocks_of(x, tile, tma), words_operand(weight.words, n, tile.block_n, gated=gated) if tma else weight.words,
        pairs_of(weight.scales), pairs_of(weight.shifts), weight.row_scales, bias, routing.pairs, routing.units, out,
        num_pairs, n, k, num_groups,
        SCATTER=gate is None, GATED=gated, LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha, GROUP=weight.group,
        TWO=in_two(tile.block_n, tile.warps, gated=gated), LOW=tile.low, BLOCK_T=tile.block_t, JOINED=tile.joined,
        BLOCK_N=tile.block_n, TMA=tma, EVEN_K=k % BLOCK == 0, INTERPRETED=not x.is_cuda,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **launch_args(x),
    )
