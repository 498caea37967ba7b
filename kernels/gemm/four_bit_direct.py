"""The form of `four_bit_linear` for tiles that say so (`Tile.direct`): its programs load weights straight into the registers from
which the tensor cores read them (`four_bit_direct_steps.py`), two blocks of K ahead.

Only x passes through shared memory. The first two blocks are asked for before earlier launches have ended, as weights are
constant. Partial sums are stored in the order in which threads hold them, and the last program of a tile loads several parts at
once. Results are equal to the bit to those of `four_bit_linear_kernel` where K is divided into the same parts. Parts are whole
steps of two blocks, so fewer than `Tile.split` programs may share a tile.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchspec.kernels.common.four_bit import BLOCK, WORDS, FourBitWeight, pairs_of
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.four_bit_direct_steps import groups_of, unpack, words_of
from batchspec.kernels.gemm.four_bit_steps import SIZE, load_tokens
from batchspec.kernels.gemm.four_bit_tiles import AHEAD, parts_of
from batchspec.kernels.gemm.linear import write_tile
from batchspec.kernels.gemm.split_k import counters
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.moe.packed_tiles import in_two, wait_for, whole_tile


@triton.jit
def load_rows(w, scales, shifts, block, stop, k_blocks, w_rows, first, last, GROUP: tl.constexpr, WARPS: tl.constexpr):
    """Words, scales and shifts of a block of 16 * WARPS rows; in place of shifts that are None the scales."""
    words = words_of(w, block, stop, k_blocks, w_rows, first, last, WARPS)
    s = groups_of(scales, block, stop, k_blocks, w_rows // 2, first, last, GROUP, WARPS)
    z = s
    if shifts is not None:
        z = groups_of(shifts, block, stop, k_blocks, w_rows // 2, first, last, GROUP, WARPS)
    return words, s, z


@triton.jit
def load_block(
    w, scales, shifts, block, stop, k_blocks, w_rows, first, second, last, GROUP: tl.constexpr, TWO: tl.constexpr,
    WARPS: tl.constexpr,
):
    """A block of the rows from `first` on and, TWO, of those from `second` on."""
    words, s, z = load_rows(w, scales, shifts, block, stop, k_blocks, w_rows, first, last, GROUP, WARPS)
    words2, s2, z2 = words, s, z
    if TWO:
        words2, s2, z2 = load_rows(w, scales, shifts, block, stop, k_blocks, w_rows, second, last, GROUP, WARPS)
    return words, s, z, words2, s2, z2


@triton.jit
def add_block(
    acc, up, block, tokens, GROUP: tl.constexpr, SHIFTS: tl.constexpr, TWO: tl.constexpr, WARPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """acc, up plus the product of a loaded block with tokens. See `four_bit_steps.sum_blocks` for TWO."""
    words, s, z, words2, s2, z2 = block
    if not SHIFTS:
        z = (None, None, None, None)
        z2 = (None, None, None, None)
    acc = tl.dot(unpack(words, s, z, GROUP, WARPS, INTERPRETED), tokens, acc, input_precision="ieee")
    if TWO:
        up = tl.dot(unpack(words2, s2, z2, GROUP, WARPS, INTERPRETED), tokens, up, input_precision="ieee")
        up = up if INTERPRETED else wait_for(up)
    else:
        acc = acc if INTERPRETED else wait_for(acc)
    return acc, up


@triton.jit
def of_threads(sums, WARPS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Sums [16 * WARPS, BLOCK_T] -> [BLOCK_T / 8 * WARPS * 32 lanes, 4]: each thread keeps its own."""
    MANY: tl.constexpr = BLOCK_T // 16
    parts = sums.reshape(WARPS, 2, 8, MANY, 2, 4, 2)  # warp, row half, row, 16 tokens, 8 tokens, thread, neighbour
    return parts.permute(1, 3, 0, 2, 5, 4, 6).reshape(2 * MANY * WARPS * 32, 4)


@triton.jit
def of_tile(sums, WARPS: tl.constexpr, BLOCK_T: tl.constexpr):
    """The inverse of `of_threads`."""
    return sums.reshape(2, BLOCK_T // 16, WARPS, 8, 4, 2, 2).permute(2, 0, 3, 1, 5, 4, 6).reshape(16 * WARPS, BLOCK_T)


@triton.jit
def sum_of(partials, split, SLOT: tl.constexpr, HEIGHT: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr):
    """The sum of `split` parts, at most PARTS, in order. TOGETHER of them are asked for at once."""
    places = partials + tl.arange(0, HEIGHT)[:, None] * 4 + tl.arange(0, 4)[None, :]
    total = tl.zeros([HEIGHT, 4], tl.float32)
    for base in range(0, PARTS, TOGETHER):
        for ahead in tl.static_range(TOGETHER):
            inside = (tl.arange(0, HEIGHT) * 0 + base + ahead < split)[:, None]
            # Written by other multiprocessors in this launch: bypass the L1 cache.
            total += tl.load(places + (base + ahead) * SLOT, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def join_parts(
    partials, arrived, acc, up, part, split, TWO: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Whether this program finished its tile last, and then the whole tile; see `split_k.py`."""
    HEIGHT: tl.constexpr = BLOCK_T // 8 * WARPS * 32
    SLOT: tl.constexpr = HEIGHT * 4 * (2 if TWO else 1)
    TOGETHER: tl.constexpr = min(PARTS, max(1, 128 // BLOCK_T))  # as many as registers hold
    tile = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    slots = partials + (tile * split).to(tl.int64) * SLOT
    places = slots + part.to(tl.int64) * SLOT + (tl.arange(0, HEIGHT)[:, None] * 4 + tl.arange(0, 4)[None, :])
    tl.store(places, of_threads(acc, WARPS, BLOCK_T))
    if TWO:
        tl.store(places + HEIGHT * 4, of_threads(up, WARPS, BLOCK_T))
    tl.debug_barrier()  # all threads have written before one thread counts the part
    complete = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == split - 1
    if complete:
        tl.store(arrived + tile, 0)  # for the next launch
        acc = of_tile(sum_of(slots, split, SLOT, HEIGHT, PARTS, TOGETHER), WARPS, BLOCK_T)
        if TWO:
            up = of_tile(sum_of(slots + HEIGHT * 4, split, SLOT, HEIGHT, PARTS, TOGETHER), WARPS, BLOCK_T)
    return complete, acc, up


@triton.jit(do_not_specialize=["num_tokens", "split", "part_blocks"])  # no recompilation for other token counts
def four_bit_direct_kernel(
    x, w, scales, shifts, row_scales, bias, out, partials, arrived, num_tokens, n, w_rows, k, stride_x, split, part_blocks,
    GROUP: tl.constexpr, GATED: tl.constexpr, TWO: tl.constexpr, PARTS: tl.constexpr, BLOCK_T: tl.constexpr, WARPS: tl.constexpr,
    TMA: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """The tile of program_id 1 (tokens) and 2 (rows of W), part program_id 0 of K: part_blocks blocks, an even number.

    w: int32 words; w_rows: rows of a block of columns in memory. PARTS: at least `split`, 1 if K is not split.
    """
    ROWS: tl.constexpr = 16 * WARPS
    BLOCK_N: tl.constexpr = ROWS * (2 if TWO and not GATED else 1)
    SHIFTS: tl.constexpr = shifts is not None
    part = tl.program_id(0)
    t, first, k_blocks = tl.program_id(1) * BLOCK_T, tl.program_id(2) * BLOCK_N, tl.cdiv(k, 128)
    start = part * part_blocks
    stop = tl.minimum(start + part_blocks, tl.cdiv(k_blocks, 2) * 2)
    second, last = first + (n if GATED else ROWS), tl.cdiv(2 * n if GATED else n, 16) - 1
    even = load_block(w, scales, shifts, start, stop, k_blocks, w_rows, first, second, last, GROUP, TWO, WARPS)
    odd = load_block(w, scales, shifts, start + 1, stop, k_blocks, w_rows, first, second, last, GROUP, TWO, WARPS)
    await_earlier(PDL)
    acc = tl.zeros([ROWS, BLOCK_T], tl.float32)
    up = tl.zeros([ROWS, BLOCK_T], tl.float32)
    for block in range(start, stop, 2):
        own = even
        even = load_block(w, scales, shifts, block + 2, stop, k_blocks, w_rows, first, second, last, GROUP, TWO, WARPS)
        tokens = load_tokens(x, t, block * 128, num_tokens, k, stride_x, BLOCK_T, TMA, EVEN_K, INTERPRETED)
        acc, up = add_block(acc, up, own, tokens, GROUP, SHIFTS, TWO, WARPS, INTERPRETED)
        own = odd
        odd = load_block(w, scales, shifts, block + 3, stop, k_blocks, w_rows, first, second, last, GROUP, TWO, WARPS)
        tokens = load_tokens(x, t, block * 128 + 128, num_tokens, k, stride_x, BLOCK_T, TMA, EVEN_K, INTERPRETED)
        acc, up = add_block(acc, up, own, tokens, GROUP, SHIFTS, TWO, WARPS, INTERPRETED)
    complete = True
    if PARTS > 1:
        complete, acc, up = join_parts(partials, arrived, acc, up, part, split, TWO, PARTS, WARPS, BLOCK_T)
    if complete:
        y, other = whole_tile(acc, up, row_scales, 0, first, n, GATED, TWO, BLOCK_T, BLOCK_N)
        y, other = tl.trans(y) * SIZE, tl.trans(other) * SIZE
        write_tile(bias, None, None, out, y, other, y, t, first, num_tokens, n, k, n, 0.0, BLOCK_T, BLOCK_N, GATED)


def launch_direct(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None, *, out: Tensor, tile: Tile, gated: bool, group: int, compile_only: bool
) -> None:
    """Start the kernel, or only compile it. Arguments have been checked by `four_bit_linear.launch`."""
    num_tokens, n, k_blocks = len(x), out.shape[1], triton.cdiv(weight.k, BLOCK)
    part_blocks = triton.cdiv(triton.cdiv(k_blocks, tile.split), AHEAD) * AHEAD
    split = triton.cdiv(k_blocks, part_blocks)
    grid = (split, triton.cdiv(num_tokens, tile.block_m), triton.cdiv(n, tile.block_n))
    rows = tile.block_n * (2 if gated else 1)
    partials = x.new_empty(grid[0] * grid[1] * grid[2] * rows * tile.block_m, dtype=torch.float32) if split > 1 else None
    start = partial(four_bit_direct_kernel.warmup, grid=grid) if compile_only else four_bit_direct_kernel[grid]
    tma = tile.tma and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
    start(
        TensorDescriptor.from_tensor(x, [tile.block_m, BLOCK]) if tma else x, weight.words.view(torch.int32),
        pairs_of(weight.scales), pairs_of(weight.shifts), weight.row_scales, bias, out, partials,
        counters(x.device) if split > 1 else None, num_tokens, n, weight.words.stride(0) // WORDS, weight.k, x.stride(0), split,
        part_blocks, GROUP=group, GATED=gated, TWO=in_two(tile.block_n, tile.warps, gated=gated), PARTS=parts_of(split),
        BLOCK_T=tile.block_m, WARPS=tile.warps, TMA=tma, EVEN_K=weight.k % (BLOCK * AHEAD) == 0, INTERPRETED=not x.is_cuda,
        num_warps=tile.warps, num_stages=tile.stages, **launch_args(x),
    )
