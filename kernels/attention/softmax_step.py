"""One block of keys of verify attention: the lookup of its pages, and the online softmax step that adds it.

    peak' = max(peak, max s)    mass' = mass * f + sum p    acc' = acc * f + p V    with f = 2^(peak - peak'), p = 2^(s - peak')

Source: Milakov and Gimelshein 2018 ("Online normalizer calculation for softmax", arXiv 1805.02867).
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.common.e4m3 import e4m3_values


@triton.jit
def page_of(table, key, end, PAGE_SIZE: tl.constexpr):
    return tl.load(table + key // PAGE_SIZE, mask=key < end, other=0)


@triton.jit
def attend_keys(
    q, peak, mass, acc, odd, page, key, end, base, d, position, start, bits, scale, kv_stride_part, kv_stride_page,
    TREE: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: (peak, mass, acc, odd) with the keys `key` below `end` added.

    base  address of K's head in page 0
    FP8   K and V are e4m3, multiplied in q's dtype. `scale` [TILE, 1] contains K's scale; acc and odd [TILE, DIM / 2] are the
          even and the odd numbers of a head, without V's scale. Else odd is not used
    """
    at = page.to(tl.int64) * kv_stride_page + (key % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
    at = base + at[:, None] + d[None, :]  # the same addresses for K and V: K is transposed in shared memory
    inside = (key < end)[:, None]
    if HEAD_DIM != DIM:
        inside = inside & (d < HEAD_DIM)[None, :]
    k = tl.load(at, mask=inside, other=0.0)
    if FP8:
        even_v, odd_v = pairs_of(
            page, key, end, base + kv_stride_part, kv_stride_page, PAGE_SIZE, KV_HEADS, HEAD_DIM, DIM, INTERPRETED
        )
        k = e4m3_values(k, q.dtype, INTERPRETED)
    else:
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
    if FP8:
        p = p.to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(p, even_v.to(q.dtype), input_precision="ieee")
        odd = odd * shrink[:, None] + tl.dot(p, odd_v.to(q.dtype), input_precision="ieee")
    else:
        p = p.to(v.dtype)
        if WIDE:
            p = p.to(tl.float32)
            v = v.to(tl.float32)
        acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
    return new_peak, mass, acc, odd


_UNPACK = tl.constexpr("""{
    .reg .b32 bytes;
    .reg .b16 evens, odds;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {evens, odds}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, evens;
    cvt.rn.f16x2.e4m3x2 $1, odds;
}""")
"""Two pairs of 16 bits, each an even and an odd number -> the even ones of both as fp16, and the odd ones."""


@triton.jit
def pairs_of(
    page, key, end, base, kv_stride_page, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The even and the odd numbers of e4m3 V, each fp16 [keys, DIM / 2]. V holds no NaN.

    V is read as pairs of 16 bits: the tensor core needs it transposed, and the instruction that transposes moves 16 bits.
    """
    pair = tl.arange(0, DIM // 2)
    at = page.to(tl.int64) * kv_stride_page + (key % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
    inside = (key < end)[:, None]
    if HEAD_DIM != DIM:
        inside = inside & (pair < HEAD_DIM // 2)[None, :]
    place = (base + at[:, None]).to(tl.pointer_type(tl.uint16), bitcast=True) + pair[None, :]
    both = tl.load(place, mask=inside, other=0)
    if INTERPRETED:
        even = (both & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = (both >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        even, odd = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [both], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )  # fmt: skip
    return even, odd


@triton.jit
def narrowed(q, scale):
    """Queries in the dtype in which they are multiplied with e4m3 keys, and the softmax scale of each line [TILE, 1].

    fp16, to which one instruction converts two e4m3 numbers (bf16 takes three more), or fp32 for fp32. q is scaled by a power of
    two where it would overflow in fp16.
    """
    scales = scale + tl.zeros([q.shape[0], 1], tl.float32)
    if q.dtype != tl.float32:
        wide = q.to(tl.float32)
        excess = tl.maximum(tl.floor(tl.log2(tl.max(tl.abs(wide), 1))) - 14.0, 0.0)[:, None]
        q = (wide * tl.exp2(-excess)).to(tl.float16)
        scales = scales * tl.exp2(excess)
    return q, scales
