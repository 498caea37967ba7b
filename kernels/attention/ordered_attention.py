"""Batch-invariant verify attention: what `verify_attention.py` computes for chains and windows, with one order of sums.

A row's keys are cut at multiples of PART (`ordered_step.py`), and its parts are merged one after another, in the order of keys.
A query's bits are then those of `ordered_prefill.py`, and depend neither on other rows nor on the other queries of its row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.attention.merge_states import Partials, merge_states
from batchspec.kernels.attention.ordered_step import WARPS, attend_part
from batchspec.kernels.attention.softmax_step import page_of
from batchspec.kernels.attention.tile import lanes_of, write_lines, zero_tokens
from batchspec.kernels.attention.verify_attention import verify_attention_reference
from batchspec.kernels.attention.work_list import AttentionWork
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.common.pdl import await_earlier, launch_args

STAGES = 3
REGISTERS = 96
"""Registers of a thread with a tile of 32 and heads of 64: a fifth program fits on a multiprocessor, and none of them spills."""
MAX_ITEMS = 4096
"""Longer work lists are divided among this many programs. The list has space for rows of the job's greatest length, but few rows
are so long."""


@triton.jit
def attend_item(
    index, listed, head, q, kv, scales, page_table, positions, cu_seqlens_q, kv_len, row_order, items, row_parts, sink_logits,
    out, part_out, part_lse, scale, max_pages, max_q, q_stride_t, q_stride_h, kv_stride_part, kv_stride_page,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One item of the work list and one K/V head; nothing if it is not `listed`. Waits for earlier launches if EARLY."""
    item = items + index * 8
    unit, tile = tl.load(item), tl.load(item + 1)
    first, end, part = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    begin, count = tl.load(item + 6), tl.load(item + 7)
    if not listed:  # after the loads, which are valid for every program: one latency instead of two
        await_earlier(EARLY)
    elif end == 0:  # a dead row, or the padding after the last row
        await_earlier(EARLY)
        zero_tokens(out, begin, begin + count, head, HEADS, KV_HEADS, TILE, HEAD_DIM, DIM)
    else:
        lane, row, first_place, num_lanes, inside = lanes_of(
            tile, unit, begin, count, cu_seqlens_q, kv_len, row_order, max_q, HEADS, TILE, GROUPED
        )
        table_row = unit
        if GROUPED:  # the page tables of all live members begin with the same pages; without any, nothing is written
            table_row = tl.maximum(tl.max(tl.where(inside, row, -1), 0), 0)
        table = page_table + table_row.to(tl.int64) * max_pages
        page = page_of(table, first + tl.arange(0, BLOCK), end, PAGE_SIZE)  # its latency and that of the positions overlap
        token = (first_place + lane // HEADS).to(tl.int64)
        position = tl.load(positions + token, mask=inside, other=-1).to(tl.int32)
        await_earlier(EARLY)

        q_head = head * HEADS + lane % HEADS
        d = tl.arange(0, DIM)
        within = inside[:, None] & (d < HEAD_DIM)[None, :]
        query = tl.load(q + (token * q_stride_t + q_head * q_stride_h)[:, None] + d[None, :], mask=within, other=0.0)
        if WIDE:
            query = query.to(tl.float32)
        stop = tl.minimum(end, tl.max(position, 0) + 1)
        peak, mass, acc = attend_part(
            query, page, first, None, stop, end, table, kv + head * HEAD_DIM, position, scale,
            None if scales is None else scales + head, kv_stride_part, kv_stride_page, WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM,
            DIM, TILE, BLOCK, WIDE,
        )
        # Read again: kept in registers during the loop, the addresses would leave room for fewer programs of a multiprocessor.
        lane, row, first_place, num_lanes, inside = lanes_of(
            tl.load(item + 1, volatile=True), unit, begin, count, cu_seqlens_q, kv_len, row_order, max_q, HEADS, TILE, GROUPED
        )
        token = (first_place + lane // HEADS).to(tl.int64)
        q_head = head * HEADS + lane % HEADS
        within = inside[:, None] & (d < HEAD_DIM)[None, :]
        write_lines(
            out, part_out, part_lse, row_parts, sink_logits, peak, mass, acc, part, token, q_head, lane, row, num_lanes, head, d,
            inside, within, KV_HEADS, HEADS, HEAD_DIM,
        )


@triton.jit(do_not_specialize=["max_pages", "max_q", "stride"])
def ordered_attention_kernel(
    q, kv, scales, page_table, positions, cu_seqlens_q, kv_len, row_order, items, num_items, row_parts, sink_logits, out,
    part_out, part_lse, scale, max_pages, max_q, stride, q_stride_t, q_stride_h, kv_stride_part, kv_stride_page,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr,
    STRIDED: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):
    """Program (item, K/V head). STRIDED: it takes further items, `stride` apart."""
    if not EARLY:
        await_earlier(PDL)
    index = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    count = tl.load(num_items)
    if STRIDED:
        for at in range(index, count, stride):
            attend_item(
                at, True, head, q, kv, scales, page_table, positions, cu_seqlens_q, kv_len, row_order, items, row_parts,
                sink_logits, out, part_out, part_lse, scale, max_pages, max_q, q_stride_t, q_stride_h, kv_stride_part,
                kv_stride_page, KV_HEADS, HEADS, HEAD_DIM, DIM, PAGE_SIZE, WINDOW, TILE, BLOCK, GROUPED, WIDE, False,
            )
    else:
        attend_item(
            index, index < count, head, q, kv, scales, page_table, positions, cu_seqlens_q, kv_len, row_order, items, row_parts,
            sink_logits, out, part_out, part_lse, scale, max_pages, max_q, q_stride_t, q_stride_h, kv_stride_part,
            kv_stride_page, KV_HEADS, HEADS, HEAD_DIM, DIM, PAGE_SIZE, WINDOW, TILE, BLOCK, GROUPED, WIDE, EARLY,
        )


def ordered_attention(
    q: Tensor, kv: Tensor, page_table: Tensor, positions: Tensor, work: AttentionWork, partials: Partials, *, scale: float,
    out: Tensor, sink_logits: Tensor | None = None, scales: Tensor | None = None, early: bool = False, interpret: bool = False,
) -> None:
    """Attention of T queries over the pages of their rows, for one layer; arguments as in `verify_attention`.

    q       bf16 [T, NH, D]
    kv      bf16, or e4m3 with scales [2, P, page_size, KVH, D]
    work    made with a `WorkShape` that has `part`
    scales  fp32 [2, KVH]  of K and of V; only with an e4m3 cache

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides, and for a work list without parts or
    with sink keys.
    """
    shape, (num_flat_tokens, num_heads, head_dim), num_rows = work.shape, q.shape, work.kv_len.shape[0]
    check("ordered_attention: q", q, (num_flat_tokens, shape.kv_heads * shape.heads_per_kv, head_dim), torch.bfloat16, rows=True)
    stored = torch.bfloat16 if scales is None else E4M3
    check("ordered_attention: kv[0]", kv[0], (kv.shape[1], shape.page_size, shape.kv_heads, head_dim), stored)
    if scales is not None:
        check("ordered_attention: scales", scales, (2, shape.kv_heads), torch.float32)
    check("ordered_attention: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    check("ordered_attention: positions", positions, (num_flat_tokens,), torch.int64)
    check("ordered_attention: out", out, (num_flat_tokens, num_heads, head_dim), torch.bfloat16)
    if sink_logits is not None:
        check("ordered_attention: sink_logits", sink_logits, (num_heads,), torch.float32)
    if not shape.part or shape.sink:
        raise ValueError(f"ordered_attention: part={shape.part}, sink={shape.sink}; use a shape with parts and without sink keys")
    if not (q.is_cuda or interpret):
        verify_attention_reference(
            q, kv, page_table, positions, work, scale=scale, out=out, sink_logits=sink_logits, scales=scales
        )
        return
    args = launch_args(q)

    def launch(items: Tensor, kind: int, tile: int, block: int) -> None:
        row_order = work.shared.row_order if kind and work.shared else work.cu_seqlens_q
        programs = min(len(items), MAX_ITEMS)
        strided = programs < len(items)
        ordered_attention_kernel[(programs * shape.kv_heads,)](
            q, kv, scales, page_table, positions, work.cu_seqlens_q, work.kv_len, row_order, items, work.counts[kind:],
            work.row_parts, sink_logits, out, partials.out, partials.lse, scale * math.log2(math.e), page_table.shape[1],
            shape.max_q,
            programs, q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), KV_HEADS=shape.kv_heads, HEADS=shape.heads_per_kv,
            HEAD_DIM=head_dim, DIM=max(16, triton.next_power_of_2(head_dim)), PAGE_SIZE=shape.page_size, WINDOW=shape.window,
            TILE=tile, BLOCK=block, GROUPED=bool(kind), WIDE=not q.is_cuda, STRIDED=strided,
            EARLY=early and not strided and args["PDL"], num_warps=WARPS[tile],
            num_stages=STAGES, maxnreg=REGISTERS if tile == 32 and head_dim <= 64 else None, enable_fp_fusion=False, **args,
        )

    if len(work.group_items):
        launch(work.group_items, 1, shape.group_tile, shape.group_block)
    launch(work.items, 0, shape.tile, shape.block)
    if work.num_lines:
        merge_states(
            partials.out, partials.lse, work.row_parts, work.cu_seqlens_q, max_q=shape.max_q, out=out, sink_logits=sink_logits,
            in_order=True, interpret=interpret,
        )
