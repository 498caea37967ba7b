"""Attention over one part of a row's keys, with one order of sums whatever tile the query is in.

    s = q K', p = 2^(s * scale - peak')    mass' = mass * f + p 1    acc' = acc * f + p V    with f = 2^(peak - peak')

as in `softmax_step.py`, except that: blocks begin at multiples of BLOCK, which is one number for all tiles; the sum of weights is
a product with ones, because the order of a sum over a tile's columns depends on how its warps divide them; and no product is
fused with a sum unless it is written so (launch with enable_fp_fusion=False). Keys that a query does not attend to change none of
its bits. Tensor cores of the Hopper generation give the same bits by mma.sync and by wgmma, in tiles of any size
(`tests/gpu/test_gpu_deterministic.py`), if both multiply the same 16 numbers of K in one instruction; `e4m3_operand` makes sure
of that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.attention.softmax_step import page_of, seen_keys
from batchspec.kernels.common.e4m3 import e4m3_operand

PART = 2048
"""Keys of a part: every row is cut at the multiples of this number, whatever else is in the batch."""
WARPS = {16: 4, 32: 4, 64: 4}
"""Warps for each number of lines of a tile, in rounds."""
ONES = tl.constexpr(16)  # the smallest width of a product on tensor cores


def block_of(head_dim: int) -> int:
    """Keys that are read at once."""
    return 64 if head_dim <= 128 else 32 if head_dim <= 256 else 16


@triton.jit
def attend_block(
    query, page, at, end, table, base, position, scale, kv_stride_part, kv_stride_page, peak, mass, acc,
    WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, SEEN: tl.constexpr, WIDE: tl.constexpr,
):
    """(peak, mass, acc) after the keys at .. at + BLOCK - 1, and the pages of the BLOCK keys after those. SEEN: all queries
    attend to all of these keys."""
    key = tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    next_page = page_of(table, at + BLOCK + key, end, PAGE_SIZE)  # one step ahead, as in `verify_attention.py`
    keys = at + key
    place = page.to(tl.int64) * kv_stride_page + (keys % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
    place = base + place[:, None] + d[None, :]
    inside = (keys < end)[:, None] | SEEN
    if HEAD_DIM != DIM:
        inside = inside & (d < HEAD_DIM)[None, :]
    k = tl.load(place, mask=inside, other=0.0)
    v = tl.load(place + kv_stride_part, mask=inside, other=0.0)
    if base.dtype.element_ty == tl.float8e4nv:  # exact; the scales are multiplied in `attend_part`
        k, v = e4m3_operand(k, WIDE), e4m3_operand(v, WIDE)
    if WIDE:
        k = k.to(tl.float32)
    s = tl.dot(query, tl.trans(k), input_precision="ieee")
    if not SEEN:
        s = tl.where(seen_keys(keys, end, position, position, position, False, WINDOW, 0), s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
    p = tl.exp2(tl.fma(s, tl.zeros_like(s) + scale, tl.zeros_like(s) - new_peak[:, None])).to(v.dtype)
    ones = tl.full([BLOCK, ONES], 1.0, v.dtype)
    if WIDE:
        p, v, ones = p.to(tl.float32), v.to(tl.float32), ones.to(tl.float32)
    shrink = tl.exp2(peak - new_peak)[:, None]
    mass = tl.dot(p, ones, mass * shrink, input_precision="ieee")
    acc = tl.dot(p, v, acc * shrink, input_precision="ieee")
    return new_peak, mass, acc, next_page


@triton.jit
def attend_part(
    query, page, first, seen, stop, end, table, base, position, scale, scales, kv_stride_part, kv_stride_page,
    WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):
    """(peak, mass, acc) of a tile over the keys first .. stop-1, first a multiple of BLOCK; of them the row has those below end.

    page   of the keys first .. first + BLOCK - 1 (`page_of`), which a caller may know before it has the queries
    seen   all queries attend to the keys below this multiple of BLOCK, which then need no comparison; None: they are all compared
    base   address of K's head in page 0
    scale  of the scores, times log2(e)
    scales  address of the scale of K's head; the scale of V's head is KV_HEADS numbers later. None unless K/V are e4m3
    """
    if scales is not None:
        scale = scale * tl.load(scales)
    peak = tl.full([TILE], -1e30, tl.float32)  # finite, so that a query without a key in this part does not get NaN
    mass = tl.zeros([TILE, ONES], tl.float32)
    acc = tl.zeros([TILE, DIM], tl.float32)
    if seen is not None:
        begin = tl.minimum(tl.maximum(first, seen), stop)
        for at in range(first, begin, BLOCK):
            peak, mass, acc, page = attend_block(
                query, page, at, end, table, base, position, scale, kv_stride_part, kv_stride_page, peak, mass, acc, WINDOW,
                PAGE_SIZE, KV_HEADS, HEAD_DIM, DIM, BLOCK, True, WIDE,
            )
    else:
        begin = first
    for at in range(begin, stop, BLOCK):
        peak, mass, acc, page = attend_block(
            query, page, at, end, table, base, position, scale, kv_stride_part, kv_stride_page, peak, mass, acc, WINDOW,
            PAGE_SIZE, KV_HEADS, HEAD_DIM, DIM, BLOCK, False, WIDE,
        )
    if scales is not None:
        acc = acc * tl.load(scales + KV_HEADS)
    return peak, tl.max(mass, 1), acc  # all columns of mass are the same
