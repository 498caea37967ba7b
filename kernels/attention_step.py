"""Steps of verify attention: the lines of a tile, where a block of keys lies, and the online softmax that adds one:

    peak' = max(peak, max s)    mass' = mass * f + sum p    acc' = acc * f + p V    with f = 2^(peak - peak'), p = 2^(s - peak')

Source: Milakov and Gimelshein 2018 ("Online normalizer calculation for softmax", arXiv 1805.02867).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_of(table, key, end, PAGE_SIZE: tl.constexpr):
    return tl.load(table + key // PAGE_SIZE, mask=key < end, other=0)


@triton.jit
def attend_keys(
    q, peak, mass, acc, page, key, end, base, d, position, start, bits, scale, kv_stride_part, kv_stride_page,
    TREE: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: (peak, mass, acc) with the keys `key` below `end` added. base is K's head in page 0."""
    at = page.to(tl.int64) * kv_stride_page + (key % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
    at = base + at[:, None] + d[None, :]  # one address for K and V: K is turned in shared memory
    inside = (key < end)[:, None]
    if HEAD_DIM != DIM:
        inside = inside & (d < HEAD_DIM)[None, :]
    k = tl.load(at, mask=inside, other=0.0)
    v = tl.load(at + kv_stride_part, mask=inside, other=0.0)
    if WIDE:
        k = k.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = key[None, :] <= tl.minimum(position, end - 1)[:, None]
    if TREE:
        tail = key[None, :] - start[:, None]
        bit = (bits[:, None] >> tl.minimum(tl.maximum(tail, 0), 63).to(tl.int64)) & 1
        seen = tl.where(tail < 0, seen, (bit != 0) & (tail < 64) & (key < end)[None, :])
    if WINDOW > 0:
        near = (key[None, :] > position[:, None] - WINDOW) | (key < SINK)[None, :]
        if TREE:
            near = near | (tail >= 0)
        seen = seen & near
    s = tl.where(seen, s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    shrink = tl.exp2(peak - new_peak)
    p = tl.exp2(s - new_peak[:, None])
    mass = mass * shrink + tl.sum(p, 1)
    p = p.to(v.dtype)
    if WIDE:
        p = p.to(tl.float32)
        v = v.to(tl.float32)
    acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
    return new_peak, mass, acc


@triton.jit
def zero_places(out, begin, finish, head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TILE: tl.constexpr,
                HEAD_DIM: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    d = tl.arange(0, DIM)
    for lane in range(begin * HEADS, finish * HEADS, TILE):
        lanes = lane + tl.arange(0, TILE)
        line = (lanes // HEADS).to(tl.int64) * (KV_HEADS * HEADS) + head * HEADS + lanes % HEADS
        inside = (lanes < finish * HEADS)[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(out + line[:, None] * HEAD_DIM + d[None, :], tl.zeros([TILE, DIM], out.dtype.element_ty), mask=inside)


@triton.jit
def lanes_of(tile, unit, begin, count, q_start, kv_len, row_order, max_q, HEADS: tl.constexpr, TILE: tl.constexpr,
             GROUPED: tl.constexpr):  # fmt: skip
    """Of each line of a tile: its (query, head) pair, its row, that row's first place and pairs, and whether there is one."""
    lane = tile * TILE + tl.arange(0, TILE)
    if GROUPED:
        member = begin + lane // (max_q * HEADS)
        lane = lane % (max_q * HEADS)
        inside = member < begin + count
        row = tl.load(row_order + member, mask=inside, other=0)
        inside = inside & (tl.load(kv_len + row, mask=inside, other=0) > 0)
        begin = tl.load(q_start + row)
        num_lanes = (tl.load(q_start + row + 1) - begin) * HEADS
    else:
        row = unit
        inside = lane >= 0
        num_lanes = count * HEADS
    return lane, row, begin, num_lanes, inside & (lane < num_lanes)
