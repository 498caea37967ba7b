"""Words and scales of weights of four bits, loaded straight into the registers from which the tensor cores read W.

`common/four_bit.py` stores words in the order of these registers: of the 1,024 bytes of 16 rows of a block, the first 512 are the
first 16 bytes of each thread of a warp, the others the second 16. So no word passes through shared memory, and no barrier waits
for one. A warp has 16 rows; of their sums a thread has those of rows lane / 4 and 8 + lane / 4. Words are unpacked as in
`four_bit_steps.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.gemm.four_bit_steps import unpack_part


@triton.jit
def words_of(w, block, stop, k_blocks, stride, first, last, WARPS: tl.constexpr):
    """The words of a block of columns of 16 * WARPS rows: int32 [2 row halves * WARPS * 32 lanes, 4]. Blocks from `stop` on are
    not loaded; rows after the last 16 and blocks after the last one have the words of the last ones.

    w: int32 words. stride: rows of a block in memory. last: index of the last 16 rows
    """
    row = tl.arange(0, WARPS * 64)
    lane, warp, half = row % 32, row // 32 % WARPS, row // (32 * WARPS)
    own = tl.minimum(first // 16 + warp, last) * 256 + half * 128 + lane * 4
    inside = (row * 0 + block) < stop
    at = tl.minimum(block, k_blocks - 1).to(tl.int64) * (stride * 16)
    return tl.load(w + at + (own[:, None] + tl.arange(0, 4)[None, :]), mask=inside[:, None], eviction_policy="evict_first")


@triton.jit
def pairs_of_lanes(source, stride, group, inside, pair):
    """int32: the pairs of a group, one for each lane."""
    return tl.load(source + group * stride + pair, mask=inside)


@triton.jit
def groups_of(source, block, stop, k_blocks, stride, first, last, GROUP: tl.constexpr, WARPS: tl.constexpr):
    """The pairs of rows of each lane, of the groups of a block: a tuple of four, each int32 [WARPS * 32], the same several times
    in large groups.

    source: scales or shifts. stride: pairs of a group. GROUP: see `four_bit_steps.load_parts`
    """
    row = tl.arange(0, WARPS * 32)
    pair = tl.minimum(first // 16 + row // 32, last) * 8 + row % 32 // 4
    inside = (row * 0 + block) < stop
    own = tl.minimum(block, k_blocks - 1)
    if GROUP == 16 or GROUP == 32:
        a = pairs_of_lanes(source, stride, own * 4, inside, pair)
        b = pairs_of_lanes(source, stride, own * 4 + 1, inside, pair)
        c = pairs_of_lanes(source, stride, own * 4 + 2, inside, pair)
        d = pairs_of_lanes(source, stride, own * 4 + 3, inside, pair)
        found = (a, b, c, d)
    elif GROUP == 64:
        a = pairs_of_lanes(source, stride, own * 2, inside, pair)
        b = pairs_of_lanes(source, stride, own * 2 + 1, inside, pair)
        found = (a, a, b, b)
    else:
        a = pairs_of_lanes(source, stride, own // (GROUP // 128) if GROUP else own * 0, inside, pair)
        found = (a, a, a, a)
    return found


@triton.jit
def unpack(words, scales, shifts, GROUP: tl.constexpr, WARPS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The 128 columns of each row: [16 * WARPS, 128]. Every number is where the tensor cores need it.

    words: of `words_of`. scales: of `groups_of`; shifts alike, or a tuple of None
    """
    codes = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).reshape(WARPS * 64, 8)
    zero = unpack_part(codes, scales[0], shifts[0], 0, GROUP, True, INTERPRETED)
    one = unpack_part(codes, scales[1], shifts[1], 1, GROUP, True, INTERPRETED)
    two = unpack_part(codes, scales[2], shifts[2], 2, GROUP, True, INTERPRETED)
    three = unpack_part(codes, scales[3], shifts[3], 3, GROUP, True, INTERPRETED)
    parts = tl.join(tl.join(zero, two), tl.join(one, three))
    # row half, warp, row, thread, 16 columns, 8 columns, neighbour, two bits of the part: high, low
    parts = parts.reshape(2, WARPS, 8, 4, 2, 2, 2, 2, 2)
    return parts.permute(1, 0, 2, 7, 8, 4, 5, 3, 6).reshape(WARPS * 16, 128)
