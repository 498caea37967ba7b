"""One block of keys of verify attention over e4m3 K/V: the same online softmax step as `softmax_step.py`, on pairs of numbers.

    s = even(q) even(K)^T + odd(q) odd(K)^T        even(acc)' = even(acc) * f + p even(V),  odd(acc)' = odd(acc) * f + p odd(V)

K and V are read as words of 16 bits, each with an even and an odd number of a head: the tensor core needs V transposed, and the
instruction that transposes moves 16 bits. fp16 holds every e4m3 number, and one instruction converts two of them. K and V have
the same addresses except for an offset. Half of the bytes leave half of the time for each key, so the number of instructions
matters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.attention.softmax_step import attend_keys, seen_keys
from batchspec.kernels.common.e4m3 import e4m3_values


@triton.jit
def attend_pairs(
    even_q, odd_q, peak, mass, even, odd, page, key, end, base, position, start, bits, scale, kv_stride_part,
    TREE: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """One step of the online softmax: (peak, mass, even, odd) with the keys `key` below `end` added.

    even_q, odd_q  [TILE, DIM / 2] fp16 or fp32
    mass           [TILE, keys] sums of weights of the keys at the same place in all blocks, or [TILE] of all
    even, odd      [TILE, DIM / 2] the even and the odd numbers of a head, without V's scale
    base           address of K's head in page 0
    scale          [TILE, 1] contains K's scale
    """
    pair = tl.arange(0, DIM // 2)
    slot = page * PAGE_SIZE + (key.to(tl.uint32) % PAGE_SIZE).to(tl.int32)
    at = (base + slot.to(tl.int64) * (KV_HEADS * HEAD_DIM))[:, None]
    at = at.to(tl.pointer_type(tl.uint16), bitcast=True) + pair[None, :]
    inside = (key < end)[:, None]
    if HEAD_DIM != DIM:
        inside = inside & (pair < HEAD_DIM // 2)[None, :]
    k = tl.load(at, mask=inside, other=0)
    v = tl.load(at + kv_stride_part // 2, mask=inside, other=0)
    even_k, odd_k = unpacked(k, INTERPRETED)
    even_v, odd_v = unpacked(v, INTERPRETED)
    s = tl.dot(even_q, tl.trans(even_k.to(even_q.dtype)), input_precision="ieee")
    s = tl.dot(odd_q, tl.trans(odd_k.to(even_q.dtype)), s, input_precision="ieee") * scale
    s = tl.where(seen_keys(key, end, position, start, bits, TREE, WINDOW, SINK), s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    shrink = tl.exp2(peak - new_peak)[:, None]
    p = tl.exp2(s - new_peak[:, None])
    if len(mass.shape) == 2:
        mass = mass * shrink + p
    else:
        mass = mass * tl.exp2(peak - new_peak) + tl.sum(p, 1)
    p = p.to(even_q.dtype)
    even = tl.dot(p, even_v.to(even_q.dtype), even * shrink, input_precision="ieee")
    odd = tl.dot(p, odd_v.to(even_q.dtype), odd * shrink, input_precision="ieee")
    return new_peak, mass, even, odd


@triton.jit
def attend_block(
    q, even_q, odd_q, peak, mass, acc, odd, page, key, end, base, position, start, bits, scale, kv_stride_part, kv_stride_page,
    TREE: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """`attend_pairs` with an e4m3 cache, else `attend_keys`: (peak, mass, acc, odd) with the keys `key` below `end` added."""
    if FP8:
        peak, mass, acc, odd = attend_pairs(
            even_q, odd_q, peak, mass, acc, odd, page, key, end, base, position, start, bits, scale, kv_stride_part,
            TREE, WINDOW, SINK, PAGE_SIZE, KV_HEADS, HEAD_DIM, DIM, INTERPRETED,
        )
    else:
        peak, mass, acc = attend_keys(
            q, peak, mass, acc, page, key, end, base, tl.arange(0, DIM), position, start, bits, scale, kv_stride_part,
            kv_stride_page, TREE, WINDOW, SINK, PAGE_SIZE, KV_HEADS, HEAD_DIM, DIM, WIDE,
        )
    return peak, mass, acc, odd


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
def unpacked(words, INTERPRETED: tl.constexpr):
    """The even and the odd numbers of words of 16 bits, each fp16."""
    if INTERPRETED:
        even = e4m3_values((words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True), tl.float16, True)
        odd = e4m3_values((words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True), tl.float16, True)
    else:
        even, odd = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return even, odd


@triton.jit
def narrowed(q, scale):
    """Queries in the dtype in which they are multiplied with e4m3 keys, and the softmax scale of each line [TILE, 1].

    fp16, to which one instruction converts two e4m3 numbers (bf16 takes three more), or fp32 for fp32. q is scaled by a power of
    two if it would overflow in fp16.
    """
    scales = scale + tl.zeros([q.shape[0], 1], tl.float32)
    if q.dtype != tl.float32:
        wide = q.to(tl.float32)
        excess = tl.maximum(tl.floor(tl.log2(tl.max(tl.abs(wide), 1))) - 14.0, 0.0)[:, None]
        q = (wide * tl.exp2(-excess)).to(tl.float16)
        scales = scales * tl.exp2(excess)
    return q, scales
