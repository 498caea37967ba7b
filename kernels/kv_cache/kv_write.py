"""Write keys and values of flat tokens into their pages: kv[0 | 1, slots[t] // page_size, slots[t] % page_size] = k | v [t].

If K or V of a key is not finite, K is written as NaN, and values of V that are not finite as 0. Then the queries that attend to
the key get NaN, and no others do: attention masks the score of a key to which a query does not attend, but still multiplies its V
by 0.
With scales K and V are stored as e4m3 (`common/e4m3.py`), with a scale of each head; finite values saturate.
Bound by memory (bytes read + written: 4 * T * KVH * D * itemsize), by launch latency at decode sizes. k and v may be slices of a
fused QKV product, without a copy. The slots of dead rows are all in the scratch page 0, where the order of writes does not
matter.
Source: the paged cache of Kwon et al. 2023 (arXiv 2309.06180).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.e4m3 import E4M3, e4m3_bits, movable, to_e4m3


@triton.jit
def kv_write_kernel(
    k, v, kv, scales, slot_mapping, k_stride_t, k_stride_h, v_stride_t, v_stride_h, kv_stride_part, kv_stride_slot,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    exists = (head < NUM_HEADS) & (dim < HEAD_DIM)
    target = kv + tl.load(slot_mapping + place) * kv_stride_slot + head * HEAD_DIM + dim
    key = tl.load(k + place * k_stride_t + head * k_stride_h + dim, mask=exists, other=0.0)
    value = tl.load(v + place * v_stride_t + head * v_stride_h + dim, mask=exists, other=0.0)
    finite = tl.abs(value) < float("inf")
    whole = tl.min((finite & (tl.abs(key) < float("inf"))).to(tl.int32), 1)[:, None] > 0
    if scales is None:
        tl.store(target, tl.where(whole, key, float("nan")), mask=exists)
        tl.store(target + kv_stride_part, tl.where(finite, value, 0.0), mask=exists)
    else:
        wide: tl.constexpr = tl.float64 if k.dtype.element_ty == tl.float64 else tl.float32
        k_inverse = tl.div_rn(1.0, tl.load(scales + head, mask=head < NUM_HEADS, other=1.0))
        v_inverse = tl.div_rn(1.0, tl.load(scales + NUM_HEADS + head, mask=head < NUM_HEADS, other=1.0))
        key_bits = e4m3_bits(key.to(wide), k_inverse, INTERPRETED)
        value_bits = e4m3_bits(tl.where(finite, value, 0.0).to(wide), v_inverse, INTERPRETED)
        tl.store(target, tl.where(whole, key_bits, 0x7F), mask=exists)
        tl.store(target + kv_stride_part, value_bits, mask=exists)


def kv_write(
    k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor, *, scales: Tensor | None = None, interpret: bool = False
) -> None:
    """Write T tokens' keys and values into the pages of one layer, in place.

    k, v   fp32, bf16, fp16 or fp64 [T, KVH, D]  any strides over T and KVH
    kv     [2, P, page_size, KVH, D] of the same dtype, with scales e4m3  keys, values; contiguous except for the first dimension
    scales fp32 [2, KVH]  of K and of V, positive, with an e4m3 cache
    slot_mapping  int64 [T]  page * page_size + offset, below P * page_size: not checked, which would read the device

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_flat_tokens, num_heads, head_dim = k.shape
    check("kv_write: k", k, (num_flat_tokens, num_heads, head_dim), *FLOATS, rows=True)
    check("kv_write: v", v, (num_flat_tokens, num_heads, head_dim), k.dtype, rows=True)
    check("kv_write: kv[0]", kv[0], (*kv.shape[1:3], num_heads, head_dim), k.dtype if scales is None else E4M3)
    if scales is not None:
        check("kv_write: scales", scales, (2, num_heads), torch.float32)
    check("kv_write: slot_mapping", slot_mapping, (num_flat_tokens,), torch.int64)
    if not (k.is_cuda or interpret):
        kv_write_reference(k, v, kv, slot_mapping, scales)
    elif num_flat_tokens:
        kv_write_kernel[(num_flat_tokens,)](
            k, v, movable(kv), scales, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1), kv.stride(0),
            kv.stride(2), NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEADS=triton.next_power_of_2(num_heads),
            DIM=triton.next_power_of_2(head_dim), INTERPRETED=not k.is_cuda, num_warps=4,
        )


def kv_write_reference(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor, scales: Tensor | None = None) -> None:
    """The same in plain torch."""
    if k.is_cuda or not math.isfinite(float(k.sum()) + float(v.sum())):  # a sum is cheap on a CPU, and may overflow at worst
        finite = v.isfinite()
        k = k.where((finite & k.isfinite()).all(-1, keepdim=True), float("nan"))
        v = v.where(finite, 0.0)
    if scales is not None:
        k, v = (movable(to_e4m3(x, scale[:, None])) for x, scale in zip((k, v), scales, strict=True))
    flat = movable(kv).flatten(1, 2)
    flat[0].index_copy_(0, slot_mapping, k)
    flat[1].index_copy_(0, slot_mapping, v)
