"""One block of keys of verify attention: the lookup of its pages, and the online softmax step that adds it.

    peak' = max(peak, max s)    mass' = mass * f + sum p    acc' = acc * f + p V    with f = 2^(peak - peak'), p = 2^(s - peak')

Source: Milakov and Gimelshein 2018 ("Online normalizer calculation for softmax", arXiv 1805.02867).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_of(table, key, end, PAGE_SIZE: tl.constexpr):
    """The page of each key. The division is unsigned (no key is negative): a signed one by 16 takes four instructions."""
    return tl.load(table + (key.to(tl.uint32) // PAGE_SIZE).to(tl.int32), mask=key < end, other=0)


@triton.jit
def seen_keys(
    key, end, position, start, bits, TREE: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr
):
    """Which of the keys each line of the tile attends to [TILE, keys]."""
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
    return seen


@triton.jit
def attend_keys(
    q, peak, mass, acc, page, key, end, base, d, position, start, bits, scale, kv_stride_part, kv_stride_page,
    TREE: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):
    """One step of the online softmax: (peak, mass, acc) with the keys `key` below `end` added.

    base  address of K's head in page 0
    """
    at = page.to(tl.int64) * kv_stride_page + (key % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
    at = base + at[:, None] + d[None, :]  # the same addresses for K and V: K is transposed in shared memory
    inside = (key < end)[:, None]
    if HEAD_DIM != DIM:
        inside = inside & (d < HEAD_DIM)[None, :]
    k = tl.load(at, mask=inside, other=0.0)
    v = tl.load(at + kv_stride_part, mask=inside, other=0.0)
    if WIDE:
        k = k.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(seen_keys(key, end, position, start, bits, TREE, WINDOW, SINK), s, float("-inf"))
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
