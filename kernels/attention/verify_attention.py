"""Verify attention: the few queries of each row over its long paged context, split over the keys (flash decoding).

    out[t] = softmax over the keys of t of (scale * q[t] . K[k]) @ V,   which are 0 .. position[t], or those in the
                                                              window and the sink, or those in t's ancestor mask
    with sink_logits: the softmax has one more key, whose logit is a constant of the head and whose value is 0 (gpt-oss)

One program for each item of the work list (`split_kv_schedule.py`) and K/V head: the row's queries, in all heads that share the
K/V head, are the lines of one tile. The softmax is online, in base 2. An item that is a whole row writes its output, the others
write partial results in fp32, which `merge_states.py` merges.
The grid is an upper bound with early exits, not persistent programs: the GPU starts items in the listed order, longest first,
which balances rows of different lengths better than a fixed stride, and there is no counter to reset.
With e4m3 K/V (`e4m3_step.py`) K's scale is folded into the softmax scale, V's into the output; products are in fp16, which
holds every e4m3 number.
Bound by reading K/V once: 4.3 TB/s at 64 rows x 8448 keys on an H200. Source: Dao et al. 2023 ("Flash-Decoding for long-context
inference"); prefixes of a group read once: Juravsky et al. 2024 ("Hydragen", arXiv 2402.05099).
"""

from __future__ import annotations

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.attention.e4m3_step import attend_block, narrowed
from batchspec.kernels.attention.merge_states import Partials, merge_states
from batchspec.kernels.attention.settings import DTYPES, Config, config_of
from batchspec.kernels.attention.softmax_step import page_of
from batchspec.kernels.attention.tile import lanes_of, write_lines, zero_tokens
from batchspec.kernels.attention.work_list import AttentionWork
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.e4m3 import E4M3, movable
from batchspec.kernels.common.pdl import await_earlier, launch_args


@triton.jit(do_not_specialize=["max_pages", "max_q"])
def verify_kernel(
    q, kv, scales, page_table, positions, cu_seqlens_q, kv_len, row_order, items, num_items, row_parts, ancestors, tail_start,
    sink_logits, out, part_out, part_lse, scale, max_pages, max_q, q_stride_t, q_stride_h, kv_stride_part, kv_stride_page,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SINK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr,
    WIDE: tl.constexpr, INTERPRETED: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):
    if not EARLY:
        await_earlier(PDL)
    index = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    item = items + index * 8
    unit = tl.load(item)
    tile = tl.load(item + 1)
    first = tl.load(item + 2)
    end = tl.load(item + 3)
    part = tl.load(item + 4)
    begin = tl.load(item + 6)
    count = tl.load(item + 7)
    if index >= tl.load(num_items):  # after the other loads, which are valid for every program: one latency instead of two
        await_earlier(EARLY)
        return
    if end == 0:  # a dead row, or the padding after the last row
        await_earlier(EARLY)
        zero_tokens(out, begin, begin + count, head, HEADS, KV_HEADS, TILE, HEAD_DIM, DIM)
        return

    lane, row, first_place, num_lanes, inside = lanes_of(
        tile, unit, begin, count, cu_seqlens_q, kv_len, row_order, max_q, HEADS, TILE, GROUPED
    )
    table_row = unit
    if GROUPED:
        table_row = tl.max(tl.where(inside, row, -1), 0)  # the page tables of all live members begin with the same pages
        if table_row < 0:
            await_earlier(EARLY)
            return
    table = page_table + table_row.to(tl.int64) * max_pages
    key = tl.arange(0, BLOCK)
    page = page_of(table, first + key, end, PAGE_SIZE)  # issued before the loads of the flat tokens: their latencies overlap
    token = (first_place + lane // HEADS).to(tl.int64)
    position = tl.load(positions + token, mask=inside, other=-1).to(tl.int32)
    await_earlier(EARLY)

    q_head = head * HEADS + lane % HEADS
    d = tl.arange(0, DIM)
    within = inside[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + (token * q_stride_t + q_head * q_stride_h)[:, None] + d[None, :], mask=within, other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    FP8: tl.constexpr = scales is not None
    if FP8:
        query, scale = narrowed(query, scale * tl.load(scales + head))
        even_q, odd_q = tl.split(tl.reshape(query, [TILE, DIM // 2, 2]))
    else:
        even_q, odd_q = None, None
    listed = end
    if ancestors is not None:
        start = tl.load(tail_start + row) + tl.zeros([TILE], tl.int32)
        bits = tl.load(ancestors + token, mask=inside, other=0)
    else:
        start = position
        bits = position
        end = tl.minimum(end, tl.max(position, 0) + 1)
    TREE: tl.constexpr = ancestors is not None

    base = kv + head * HEAD_DIM
    peak = tl.full([TILE], -1e30, tl.float32)  # finite, so that a query without a key in this item does not get NaN
    # Triton divides the keys of so small a tile among warps, whose sums of weights would be combined in shared memory at every
    # step: they are kept separately for each key of a block until the end. In other tiles each warp has all keys of its lines.
    APART: tl.constexpr = FP8 and TILE < DIM // 2
    mass = tl.zeros([TILE, BLOCK] if APART else [TILE], tl.float32)
    acc = tl.zeros([TILE, DIM // 2 if FP8 else DIM], tl.float32)
    odd = tl.zeros([TILE, DIM // 2], tl.float32) if FP8 else 0.0
    if SINK > 0:
        sinks = tl.load(item + 5)
        for at in range(0, sinks, BLOCK):
            page_at = page_of(table, at + key, sinks, PAGE_SIZE)
            peak, mass, acc, odd = attend_block(
                query, even_q, odd_q, peak, mass, acc, odd, page_at, at + key, sinks, base, position, start, bits, scale,
                kv_stride_part, kv_stride_page, TREE, WINDOW, SINK, PAGE_SIZE, KV_HEADS, HEAD_DIM, DIM, FP8, WIDE, INTERPRETED,
            )
    for at in range(first, end, BLOCK):
        # Page ids are loaded one step ahead into registers. Loaded in the same step, they would occupy a pipeline stage, and only
        # one block of K and V would be in flight at a time.
        next_page = page_of(table, at + BLOCK + key, listed, PAGE_SIZE)
        peak, mass, acc, odd = attend_block(
            query, even_q, odd_q, peak, mass, acc, odd, page, at + key, end, base, position, start, bits, scale, kv_stride_part,
            kv_stride_page, TREE, WINDOW, SINK, PAGE_SIZE, KV_HEADS, HEAD_DIM, DIM, FP8, WIDE, INTERPRETED,
        )
        page = next_page

    if FP8:
        mass = tl.sum(mass, 1) if APART else mass
        acc = tl.reshape(tl.join(acc, odd), [TILE, DIM]) * tl.load(scales + KV_HEADS + head)
    if TILE > 16:  # read again: keeping the addresses of a large tile would cost registers in the loop
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


def verify_attention(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    positions: Tensor,
    work: AttentionWork,
    partials: Partials,
    *,
    scale: float,
    out: Tensor,
    ancestors: Tensor | None = None,
    tail_start: Tensor | None = None,
    sink_logits: Tensor | None = None,
    scales: Tensor | None = None,
    config: Config | None = None,
    group_config: Config | None = None,
    early: bool = False,
    interpret: bool = False,
) -> None:
    """Attention of T queries over the pages of their rows, for one layer.

    q           fp32, bf16 or fp16 [T, NH, D]  any strides over T and NH: a slice of a fused product is fine
    kv          [2, P, page_size, KVH, D] of the same dtype, with scales e4m3, with the queries' own K/V already written;
                contiguous except for the first dimension. Unwritten slots in a row's pages are never read
    page_table  int32 [R, max pages a row]
    positions   int64 [T]  a query attends to keys 0 .. its position, below kv_len, within the work list's window. Positions may
                be later than those with which the list was made, as long as they are below kv_len
    work        from `split_kv_schedule`; it has the layout of the rows
    partials    from `partials_of`
    out         [T, NH, D] contiguous, of q's dtype; dead rows and padding get zeros
    ancestors   int64 [T]  for trees: the query attends to key tail_start[row] + j if bit j is set, and all keys below tail_start.
                A window does not apply to keys from tail_start on
    tail_start  int32 [R]  with ancestors
    sink_logits fp32 [NH]  joins the denominator of each softmax once, not scaled
    scales      fp32 [2, KVH]  of K and of V, positive, with an e4m3 cache
    early       the previous launch has not written work, page_table or positions: with programmatic launches (`pdl.py`) they are
                read before it ends
    config, group_config  warps and stages other than those of `settings.py`, for measurements; the blocks are those of work.shape

    Products and sums in fp32 (fp32 inputs: no TF32), weights rounded to the dtype of kv, with e4m3 to fp16. Does not synchronise
    on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    shape = work.shape
    num_flat_tokens, num_heads, head_dim = q.shape
    num_rows = work.kv_len.shape[0]
    check("verify_attention: q", q, (num_flat_tokens, shape.kv_heads * shape.heads_per_kv, head_dim), *DTYPES, rows=True)
    check(
        "verify_attention: kv[0]",
        kv[0],
        (kv.shape[1], shape.page_size, shape.kv_heads, head_dim),
        q.dtype if scales is None else E4M3,
    )
    if scales is not None:
        check("verify_attention: scales", scales, (2, shape.kv_heads), torch.float32)
    check("verify_attention: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    check("verify_attention: positions", positions, (num_flat_tokens,), torch.int64)
    check("verify_attention: out", out, (num_flat_tokens, num_heads, head_dim), q.dtype)
    if (ancestors is None) != (tail_start is None):
        raise ValueError("verify_attention: ancestors and tail_start go together; pass both or neither")
    if ancestors is not None and tail_start is not None:
        check("verify_attention: ancestors", ancestors, (num_flat_tokens,), torch.int64)
        check("verify_attention: tail_start", tail_start, (num_rows,), torch.int32)
    if sink_logits is not None:
        check("verify_attention: sink_logits", sink_logits, (num_heads,), torch.float32)
    if not (q.is_cuda or interpret):
        verify_attention_reference(
            q, kv, page_table, positions, work, scale=scale, out=out, ancestors=ancestors, tail_start=tail_start,
            sink_logits=sink_logits, scales=scales,
        )
        return
    heads = {
        "KV_HEADS": shape.kv_heads, "HEADS": shape.heads_per_kv, "HEAD_DIM": head_dim,
        "DIM": max(16 if scales is None else 32, triton.next_power_of_2(head_dim)),
    }

    args, choose = launch_args(q), partial(config_of, dtype=q.dtype, card=card_of(q.device), fp8=scales is not None)

    def launch(items: Tensor, kind: int, tile: int, block: int, choice: Config) -> None:
        row_order = work.shared.row_order if kind and work.shared else work.cu_seqlens_q
        verify_kernel[(items.shape[0] * shape.kv_heads,)](
            q, kv, scales, page_table, positions, work.cu_seqlens_q, work.kv_len, row_order, items,
            work.counts[kind:], work.row_parts, ancestors, tail_start, sink_logits, out, partials.out, partials.lse,
            scale * math.log2(math.e), page_table.shape[1], shape.max_q, q.stride(0), q.stride(1), kv.stride(0), kv.stride(1),
            **heads, PAGE_SIZE=shape.page_size, WINDOW=shape.window, SINK=shape.sink, TILE=tile, BLOCK=block, GROUPED=bool(kind),
            WIDE=not q.is_cuda and q.dtype == torch.bfloat16, num_warps=choice.num_warps, num_stages=choice.num_stages,
            INTERPRETED=not q.is_cuda, EARLY=early and args["PDL"], **args,
        )

    if len(work.group_items):
        choice = group_config or choose(head_dim, shape.group_tile)
        launch(work.group_items, 1, shape.group_tile, shape.group_block, choice)
    launch(work.items, 0, shape.tile, shape.block, config or choose(head_dim, shape.tile, crowded=work.crowded))
    if work.num_lines:
        merge_states(
            partials.out, partials.lse, work.row_parts, work.cu_seqlens_q, max_q=shape.max_q, out=out, sink_logits=sink_logits,
            interpret=interpret,
        )


def verify_attention_reference(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    positions: Tensor,
    work: AttentionWork,
    *,
    scale: float,
    out: Tensor,
    ancestors: Tensor | None = None,
    tail_start: Tensor | None = None,
    sink_logits: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """The same in plain torch, row by row: every key gathered, softmax over the whole row in fp32."""
    shape, begins = work.shape, work.cu_seqlens_q.tolist()
    out.zero_()
    for row, (begin, stop, length) in enumerate(zip(begins, begins[1:], work.kv_len.tolist(), strict=False)):
        if not (length and stop > begin):
            continue
        keys = torch.arange(length, device=q.device)
        where = page_table[row, keys // shape.page_size].long(), keys % shape.page_size
        k, v = (movable(part)[where].view(part.dtype).float() for part in kv)
        if scales is not None:
            k, v = k * scales[0, :, None], v * scales[1, :, None]
        k, v = (part.repeat_interleave(shape.heads_per_kv, 1) for part in (k, v))
        position = positions[begin:stop, None]
        seen = keys <= position
        if shape.window:
            seen = seen & ((keys > position - shape.window) | (keys < shape.sink))
        if ancestors is not None and tail_start is not None:
            tail = keys - tail_start[row]
            bits = (ancestors[begin:stop, None] >> tail.clamp(0, 63)) & 1
            seen = torch.where(tail < 0, seen, (bits != 0) & (tail < 64))
        scores = torch.einsum("thd,khd->htk", q[begin:stop].float(), k) * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        if sink_logits is not None:
            scores = torch.cat((scores, sink_logits[:, None, None].expand(-1, stop - begin, 1)), 2)
        weights = scores.softmax(2)[:, :, :length]
        out[begin:stop] = torch.einsum("htk,khd->thd", weights, v).to(out.dtype)
