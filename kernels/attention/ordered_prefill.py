"""Prefill attention over paged K/V whose bits are those of `ordered_attention.py`: causal, with windows and learned sinks.

    out[t] = softmax over the keys k that t attends to of (scale * q[t] . K[k]) @ V

One program for each tile of (query, head) pairs of a row and K/V head. It attends to one part of the keys after another, as the
items of a round do, and adds each part to the result as `merge_states.py` does. The tiles with the most keys start first.
Bound by tensor cores.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.attention.ordered_step import PART, attend_part, block_of
from batchspec.kernels.attention.softmax_step import page_of
from batchspec.kernels.attention.tile import lanes_of, sink_share
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.e4m3 import E4M3, movable
from batchspec.kernels.common.pdl import await_earlier, launch_args

TILE, WIDE_HEAD_TILE, WARPS, STAGES = 128, 32, 8, 2
"""Lines of a tile with heads of at most 256 values, and with wider ones, whose sums take more registers."""
REGISTERS = 128
"""Registers of a thread with heads of 64 and keys of one part: two programs fit on a multiprocessor, and none of them spills."""


@triton.jit(do_not_specialize=["max_pages", "num_tiles"])
def ordered_prefill_kernel(
    q, kv, scales, page_table, positions, cu_seqlens_q, kv_len, sink_logits, out, scale, max_pages, num_tiles, q_stride_t,
    q_stride_h, kv_stride_part, kv_stride_page,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PARTED: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, tile from the last one on, K/V head). PARTED: rows may have keys of more than one part."""
    head = tl.program_id(0) % KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // KV_HEADS % num_tiles
    row = tl.program_id(0) // KV_HEADS // num_tiles
    await_earlier(PDL)
    begin = tl.load(cu_seqlens_q + row)
    count = tl.load(cu_seqlens_q + row + 1) - begin
    length = tl.load(kv_len + row)
    if tile * TILE >= count * HEADS:
        return
    lane, _, first_place, _, inside = lanes_of(tile, row, begin, count, cu_seqlens_q, kv_len, kv_len, 1, HEADS, TILE, False)
    token = (first_place + lane // HEADS).to(tl.int64)
    position = tl.load(positions + token, mask=inside, other=-1).to(tl.int32)
    q_head = head * HEADS + lane % HEADS
    d = tl.arange(0, DIM)
    within = inside[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + (token * q_stride_t + q_head * q_stride_h)[:, None] + d[None, :], mask=within, other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    table = page_table + row.to(tl.int64) * max_pages
    base = kv + head * HEAD_DIM
    own_scales = None if scales is None else scales + head
    end = tl.minimum(length, tl.max(position, 0) + 1)
    key = tl.arange(0, BLOCK)
    first = 0
    seen = None
    if WINDOW == 0:  # all queries of the tile attend to the keys up to the first query's position
        seen = (tl.min(tl.where(inside, position, 2147483646), 0) + 1) // BLOCK * BLOCK
    if WINDOW > 0:
        first = tl.maximum(tl.load(positions + begin + tile * TILE // HEADS).to(tl.int32) - (WINDOW - 1), 0) // BLOCK * BLOCK
    if PARTED:
        peak = tl.full([TILE], -1e30, tl.float32)
        mass = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, DIM], tl.float32)
        for part in range(first // PART, tl.cdiv(end, PART)):
            low = tl.maximum(part * PART, first)
            own_peak, own_mass, own = attend_part(
                query, page_of(table, low + key, end, PAGE_SIZE), low, seen, tl.minimum(part * PART + PART, end), end, table,
                base, position, scale, own_scales, kv_stride_part, kv_stride_page, WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM, DIM,
                TILE, BLOCK, WIDE,
            )
            own_mass = tl.maximum(own_mass, 1e-30)
            own = own / own_mass[:, None]
            lse = own_peak + tl.log2(own_mass)
            new_peak = tl.maximum(peak, lse)
            weight = tl.exp2(lse - new_peak)
            shrink = tl.exp2(peak - new_peak)
            mass = mass * shrink + weight
            acc = acc * shrink[:, None] + own * weight[:, None]
            peak = new_peak
    else:
        peak, mass, acc = attend_part(
            query, page_of(table, first + key, end, PAGE_SIZE), first, seen, end, end, table, base, position, scale,
            own_scales, kv_stride_part, kv_stride_page, WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM, DIM, TILE, BLOCK, WIDE,
        )
    mass = tl.maximum(mass, 1e-30)
    acc = acc / mass[:, None]
    if sink_logits is not None:
        acc = acc * sink_share(sink_logits, q_head, inside, peak + tl.log2(mass))[:, None]
    place = token * (KV_HEADS * HEADS) + q_head
    tl.store(out + place[:, None] * HEAD_DIM + d[None, :], acc.to(out.dtype.element_ty), mask=within)


def ordered_prefill(
    q: Tensor, kv: Tensor, page_table: Tensor, positions: Tensor, cu_seqlens_q: Tensor, kv_len: Tensor, *, scale: float,
    max_q: int, max_kv: int, out: Tensor, window: int = 0, sink_logits: Tensor | None = None, scales: Tensor | None = None,
    interpret: bool = False,
) -> None:
    """Causal attention of T queries over the pages of their rows, for one layer.

    q             bf16 [T, NH, D]  any strides over T and NH
    kv            bf16, or e4m3 with scales [2, P, page_size, KVH, D]; the queries' own K/V are already written; contiguous but
                  for the first dimension
    page_table    int32 [R, max pages a row]
    positions     int64 [T]  consecutive within a row, below its kv_len
    cu_seqlens_q  int32 [R+1]  row r's flat tokens are cu_seqlens_q[r] .. cu_seqlens_q[r+1]-1; all T are some row's
    kv_len        int32 [R]  positive
    max_q, max_kv no row has more queries or keys
    window        a query at position p attends to keys p-window+1 .. p; 0: 0 .. p
    sink_logits   fp32 [NH]  joins the denominator of each softmax once, not scaled
    scales        fp32 [2, KVH]  of K and of V; only with an e4m3 cache
    out           bf16 [T, NH, D] contiguous

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_tokens, num_heads, head_dim), (_, num_pages, page_size, kv_heads, _) = q.shape, kv.shape
    num_rows = kv_len.shape[0]
    check("ordered_prefill: q", q, (num_tokens, num_heads, head_dim), torch.bfloat16, rows=True)
    stored = torch.bfloat16 if scales is None else E4M3
    check("ordered_prefill: kv[0]", kv[0], (num_pages, page_size, kv_heads, head_dim), stored)
    if scales is not None:
        check("ordered_prefill: scales", scales, (2, kv_heads), torch.float32)
    check("ordered_prefill: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    check("ordered_prefill: positions", positions, (num_tokens,), torch.int64)
    check("ordered_prefill: cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), torch.int32)
    check("ordered_prefill: kv_len", kv_len, (num_rows,), torch.int32)
    check("ordered_prefill: out", out, (num_tokens, num_heads, head_dim), torch.bfloat16)
    if sink_logits is not None:
        check("ordered_prefill: sink_logits", sink_logits, (num_heads,), torch.float32)
    if not (q.is_cuda or interpret):
        ordered_prefill_reference(
            q, kv, page_table, positions, cu_seqlens_q, kv_len, scale=scale, out=out, window=window, sink_logits=sink_logits,
            scales=scales,
        )
    elif num_tokens:
        heads, tile = num_heads // kv_heads, TILE if head_dim <= 256 else WIDE_HEAD_TILE
        num_tiles = triton.cdiv(max_q * heads, tile)
        ordered_prefill_kernel[(num_rows * num_tiles * kv_heads,)](
            q, kv, scales, page_table, positions, cu_seqlens_q, kv_len, sink_logits, out, scale * math.log2(math.e),
            page_table.shape[1], num_tiles, q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), KV_HEADS=kv_heads, HEADS=heads,
            HEAD_DIM=head_dim, DIM=max(16, triton.next_power_of_2(head_dim)), PAGE_SIZE=page_size, WINDOW=window, TILE=tile,
            BLOCK=block_of(head_dim), PART=PART, PARTED=max_kv > PART, WIDE=not q.is_cuda, num_warps=WARPS,
            num_stages=STAGES, maxnreg=REGISTERS if head_dim <= 64 and max_kv <= PART else None, enable_fp_fusion=False,
            **launch_args(q),
        )


def ordered_prefill_reference(
    q: Tensor, kv: Tensor, page_table: Tensor, positions: Tensor, cu_seqlens_q: Tensor, kv_len: Tensor, *, scale: float,
    out: Tensor, window: int = 0, sink_logits: Tensor | None = None, scales: Tensor | None = None,
) -> None:
    """The same in plain torch, row by row: softmax over the whole row in fp32."""
    begins, heads = cu_seqlens_q.tolist(), q.shape[1] // kv.shape[3]
    for row, (begin, stop, length) in enumerate(zip(begins, begins[1:], kv_len.tolist(), strict=False)):
        keys = torch.arange(length, device=q.device)
        where = page_table[row, keys // kv.shape[2]].long(), keys % kv.shape[2]
        k, v = (movable(part)[where].view(part.dtype).float() for part in kv)
        if scales is not None:
            k, v = k * scales[0, :, None], v * scales[1, :, None]
        k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
        position = positions[begin:stop, None]
        seen = keys <= position if not window else (keys <= position) & (keys > position - window)
        scores = torch.einsum("thd,khd->htk", q[begin:stop].float(), k).mul(scale).masked_fill(~seen, float("-inf"))
        if sink_logits is not None:
            scores = torch.cat((scores, sink_logits[:, None, None].expand(-1, stop - begin, 1)), 2)
        out[begin:stop] = torch.einsum("htk,khd->thd", scores.softmax(2)[:, :, :length], v).to(out.dtype)
