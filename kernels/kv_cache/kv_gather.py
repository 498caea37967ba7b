"""Keys and values of an e4m3 cache, gathered into contiguous rows and read back: what prefill attends to.

    out_k[n] = kv[0, slots[n]] * scales[0]        out_v[n] = kv[1, slots[n]] * scales[1]       a scale of each head, rounded once

Bound by memory (bytes read + written: 2 * N * KVH * D * (1 + itemsize)). Other caches are gathered by torch's index_select.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.e4m3 import E4M3, e4m3_values, from_e4m3, movable

ROWS = 8


@triton.jit(do_not_specialize=["num_rows"])
def kv_gather_kernel(
    kv, scales, slots, out_k, out_v, num_rows, kv_stride_part, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Program (rows, K or V)."""
    wide: tl.constexpr = tl.float64 if out_k.dtype.element_ty == tl.float64 else tl.float32
    part = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=0)
    out = out_v if part else out_k
    source = kv + part.to(tl.int64) * kv_stride_part
    for at in tl.static_range(0, NUM_HEADS * HEAD_DIM, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = (row < num_rows)[:, None] & (column < NUM_HEADS * HEAD_DIM)[None, :]
        scale = tl.load(scales + part * NUM_HEADS + column // HEAD_DIM, mask=column < NUM_HEADS * HEAD_DIM, other=0.0)
        stored = tl.load(source + slot[:, None] * (NUM_HEADS * HEAD_DIM) + column[None, :], mask=inside, other=0.0)
        values = e4m3_values(stored, tl.float32, INTERPRETED).to(wide) * scale.to(wide)[None, :]
        tl.store(out + row[:, None] * (NUM_HEADS * HEAD_DIM) + column[None, :], values, mask=inside)


def kv_gather(kv: Tensor, scales: Tensor, slots: Tensor, *, dtype: torch.dtype, interpret: bool = False) -> tuple[Tensor, Tensor]:
    """K and V [N, KVH, D] of N slots of one layer.

    kv      e4m3 [2, P, page_size, KVH, D]  contiguous except for the first dimension
    scales  fp32 [2, KVH]  of K and of V
    slots   int64 [N]  page * page_size + offset, below P * page_size: not checked, which would read the device
    dtype   fp32, bf16, fp16 or fp64, of the results

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_heads, head_dim = kv.shape[3:]
    check("kv_gather: kv[0]", kv[0], tuple(kv.shape[1:]), E4M3)
    check("kv_gather: scales", scales, (2, num_heads), torch.float32)
    check("kv_gather: slots", slots, (slots.numel(),), torch.int64)
    if dtype not in FLOATS:
        raise ValueError(f"kv_gather: dtype is {dtype}; must be float32, bfloat16, float16 or float64")
    if not (kv.is_cuda or interpret):
        return kv_gather_reference(kv, scales, slots, dtype=dtype)
    num_rows = slots.numel()
    k, v = (torch.empty(num_rows, num_heads, head_dim, dtype=dtype, device=kv.device) for _ in range(2))
    if num_rows:
        kv_gather_kernel[(triton.cdiv(num_rows, ROWS), 2)](
            kv, scales, slots, k, v, num_rows, kv.stride(0), NUM_HEADS=num_heads, HEAD_DIM=head_dim, ROWS=ROWS,
            BLOCK=min(1024, triton.next_power_of_2(num_heads * head_dim)), INTERPRETED=not kv.is_cuda, num_warps=8,
        )
    return k, v


def kv_gather_reference(kv: Tensor, scales: Tensor, slots: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    stored = movable(kv).flatten(1, 2).index_select(1, slots).view(E4M3)
    k, v = from_e4m3(stored, scales[:, None, :, None], dtype)
    return k, v
