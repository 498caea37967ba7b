"""Inputs of a round whose rows verify different numbers of drafts, in one launch.

    row r of the live rows has the flat tokens   newest token, draft 1, ..., draft draft_len[r]
    position = num_tokens - 1 + j    slot = page_table[row, position // page_size] * page_size + position % page_size
    kv_len = num_tokens + draft_len

Rows follow each other; dead ones have no token. What is left of the T tokens is padding: token 0 of row 0 at position 0, in the
scratch slot 0. One program a row sums the lengths of the rows before it, one more writes the padding.
Bound by launch latency: a few hundred bytes a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.kv_cache.slot_mapping import slot_of, slot_of_reference

BLOCK = 128
"""At least the largest number of tokens of a row."""


@triton.jit(do_not_specialize=["num_rows", "num_flat_tokens", "max_pages"])
def prepare_ragged_inputs_kernel(
    tokens, num_tokens, live, draft_ids, draft_len, page_table, out_ids, out_row_ids, out_positions, out_slot_mapping,
    out_cu_seqlens_q, out_kv_len, token_stride, draft_stride, num_rows, num_flat_tokens, max_pages,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows, lane = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    await_earlier(PDL)
    before = rows < tl.minimum(row, num_rows)
    alive_before = tl.load(live + rows, mask=before, other=0) != 0
    begin = tl.sum(tl.where(alive_before, tl.load(draft_len + rows, mask=before, other=0) + 1, 0), 0)
    tl.store(out_cu_seqlens_q + row, begin)
    if row < num_rows:
        alive = tl.load(live + row) != 0
        num, drafts = tl.load(num_tokens + row), tl.load(draft_len + row)
        owned = tl.where(alive, drafts + 1, 0)
        tl.store(out_kv_len + row, tl.where(alive, num + drafts, 0))
        newest = tl.load(tokens + row * token_stride + tl.maximum(num - 1, 0))
        draft = tl.load(draft_ids + row * draft_stride + lane - 1, mask=(lane > 0) & (lane < owned), other=0)
        place = begin + lane
        exists = (lane < owned) & (place < num_flat_tokens)
        position = (num - 1 + lane).to(tl.int64)
        slot = slot_of(page_table, row, position, exists, max_pages, PAGE_SIZE)
        tl.store(out_ids + place, tl.where(lane == 0, newest, draft), mask=exists)
        tl.store(out_row_ids + place, tl.zeros([BLOCK], tl.int32) + row.to(tl.int32), mask=exists)
        tl.store(out_positions + place, position, mask=exists)
        tl.store(out_slot_mapping + place, slot, mask=exists)
    else:
        for at in range(begin, num_flat_tokens, BLOCK):
            place = at + lane
            exists = place < num_flat_tokens
            nothing = tl.zeros([BLOCK], tl.int32)
            tl.store(out_ids + place, nothing, mask=exists)
            tl.store(out_row_ids + place, nothing, mask=exists)
            tl.store(out_positions + place, nothing.to(tl.int64), mask=exists)
            tl.store(out_slot_mapping + place, nothing.to(tl.int64), mask=exists)


def prepare_ragged_inputs(
    tokens: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    draft_ids: Tensor,
    draft_len: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    out_ids: Tensor,
    out_row_ids: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_cu_seqlens_q: Tensor,
    out_kv_len: Tensor,
    interpret: bool = False,
) -> None:
    """Write the inputs of verification of R rows, T flat tokens.

    tokens         int32 [R, L]      rows may be slices of wider ones
    num_tokens     int32 [R]         committed tokens; the newest is not in K/V yet
    live           int32 [R]
    draft_ids      int32 [R, K]      K <= 127; rows may be slices of wider ones
    draft_len      int32 [R]         drafts of each row that are verified, 0..K; T is enough for them
    page_table     int32 [R, max pages a row]
    out_ids        int32 [T]
    out_row_ids    int32 [T]
    out_positions  int64 [T]
    out_slot_mapping  int64 [T]      0 for padding and for positions past the page table
    out_cu_seqlens_q  int32 [R+1]    first flat token of each row, and their number
    out_kv_len     int32 [R]         keys that the row's last flat token attends to; 0 for dead rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, max_pages), width, num_flat_tokens = page_table.shape, draft_ids.shape[1], out_ids.numel()
    if width >= BLOCK:
        raise ValueError(f"prepare_ragged_inputs: draft_ids has {width} columns; at most {BLOCK - 1} drafts a row are supported")
    check("prepare_ragged_inputs: tokens", tokens, (num_rows, tokens.shape[1]), torch.int32, rows=True)
    check("prepare_ragged_inputs: draft_ids", draft_ids, (num_rows, width), torch.int32, rows=True)
    check("prepare_ragged_inputs: page_table", page_table, (num_rows, max_pages), torch.int32)
    for name, vector, size, dtype in (
        ("num_tokens", num_tokens, num_rows, torch.int32), ("live", live, num_rows, torch.int32),
        ("draft_len", draft_len, num_rows, torch.int32), ("out_ids", out_ids, num_flat_tokens, torch.int32),
        ("out_row_ids", out_row_ids, num_flat_tokens, torch.int32),
        ("out_positions", out_positions, num_flat_tokens, torch.int64),
        ("out_slot_mapping", out_slot_mapping, num_flat_tokens, torch.int64),
        ("out_cu_seqlens_q", out_cu_seqlens_q, num_rows + 1, torch.int32), ("out_kv_len", out_kv_len, num_rows, torch.int32),
    ):
        check(f"prepare_ragged_inputs: {name}", vector, (size,), dtype)
    if not (tokens.is_cuda or interpret):
        prepare_ragged_inputs_reference(
            tokens, num_tokens, live, draft_ids, draft_len, page_table, page_size=page_size, out_ids=out_ids,
            out_row_ids=out_row_ids, out_positions=out_positions, out_slot_mapping=out_slot_mapping,
            out_cu_seqlens_q=out_cu_seqlens_q, out_kv_len=out_kv_len,
        )
    else:
        prepare_ragged_inputs_kernel[(num_rows + 1,)](
            tokens, num_tokens, live, draft_ids, draft_len, page_table, out_ids, out_row_ids, out_positions, out_slot_mapping,
            out_cu_seqlens_q, out_kv_len, tokens.stride(0), draft_ids.stride(0), num_rows, num_flat_tokens, max_pages,
            PAGE_SIZE=page_size, ROWS=max(64, triton.next_power_of_2(num_rows)), BLOCK=BLOCK, num_warps=4,
            **launch_args(tokens),
        )


def prepare_ragged_inputs_reference(
    tokens: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    draft_ids: Tensor,
    draft_len: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    out_ids: Tensor,
    out_row_ids: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_cu_seqlens_q: Tensor,
    out_kv_len: Tensor,
) -> None:
    """The same in plain torch."""
    q_len = (draft_len + 1) * (live != 0)
    out_cu_seqlens_q[:1] = 0
    torch.cumsum(q_len, 0, dtype=torch.int32, out=out_cu_seqlens_q[1:])
    out_kv_len.copy_((num_tokens + draft_len) * (live != 0))
    rows = torch.repeat_interleave(torch.arange(len(live), device=live.device), q_len.long())
    lane = torch.arange(len(rows), device=live.device) - out_cu_seqlens_q[:-1][rows]
    positions = (num_tokens - 1)[rows] + lane
    newest = tokens.gather(1, (num_tokens - 1).clamp(min=0).long().unsqueeze(1))
    slots = slot_of_reference(page_table, rows, positions, positions >= 0, page_size)
    for out, values in (
        (out_ids, torch.cat((newest, draft_ids), 1)[rows, lane]), (out_row_ids, rows), (out_positions, positions),
        (out_slot_mapping, slots),
    ):
        out[: len(rows)] = values
        out[len(rows) :] = 0
