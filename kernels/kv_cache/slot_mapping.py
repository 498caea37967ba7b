"""Positions and K/V slots of the flat tokens of a forward pass.

    position = start[r] + j,   slot = page_table[r, position // page_size] * page_size + position % page_size

Dead rows, padding and positions past the page table get slot 0 of the scratch page 0; indices never wrap around.
`compute_slot_mapping` is for rows of different lengths, as in prefill: row r has `q_len[r]` flat tokens. One launch: the program
of each row sums the lengths of the rows before it. Rounds of a fixed draft length need no sum: `prepare_verify_inputs` and
`prepare_chain_draft_inputs` compute their slots with `slot_of`.
Bound by launch latency: a few KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check

BLOCK = 128
LEAST_ROWS = 64
"""All smaller numbers of rows use the same compiled kernel, because prefill passes have any number of rows."""


@triton.jit
def slot_of(page_table, row, position, inside, max_pages, page_size):
    """int64 slots of int64 positions; 0 where `inside` is false."""
    page = position // page_size
    known = inside & (page < max_pages)
    location = tl.load(page_table + row * max_pages + page, mask=known, other=0).to(tl.int64) * page_size
    return tl.where(known, location + position % page_size, 0)


def slot_of_reference(page_table: Tensor, row: Tensor, position: Tensor, inside: Tensor, page_size: int) -> Tensor:
    """`slot_of` in plain torch, for tensors that broadcast against each other. page_table int32 [R, P]."""
    page, width = position // page_size, page_table.shape[1]
    location = page_table[row, page.clamp(min=0, max=width - 1).long()].long() * page_size
    return torch.where(inside & (page < width), location + position % page_size, 0)


@triton.jit(do_not_specialize=["num_rows", "num_flat_tokens"])
def compute_slot_mapping_kernel(
    start, q_len, page_table, out_cu_seqlens_q, out_row_ids, out_positions, out_slot_mapping, num_rows, num_flat_tokens,
    max_pages, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program r < num_rows writes the flat tokens of row r, program num_rows the padding after the last row."""
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    begin = tl.sum(tl.load(q_len + rows, mask=rows < row, other=0), 0)
    tl.store(out_cu_seqlens_q + row, begin)
    is_row = row < num_rows
    owned = tl.load(q_len + row, mask=is_row, other=0)
    end = tl.minimum(tl.where(is_row, begin + owned, num_flat_tokens), num_flat_tokens)
    first = tl.load(start + row, mask=is_row, other=0).to(tl.int64)
    row_id = tl.where(is_row, row, 0)
    for at in range(begin, end, BLOCK):
        place = at + tl.arange(0, BLOCK)
        exists = place < end
        position = tl.where(is_row, first + (place - begin), 0)
        inside = exists & (place < begin + owned)
        slot = slot_of(page_table, row_id.to(tl.int64), position, inside, max_pages, PAGE_SIZE)
        tl.store(out_row_ids + place, tl.zeros([BLOCK], tl.int32) + row_id, mask=exists)
        tl.store(out_positions + place, position, mask=exists)
        tl.store(out_slot_mapping + place, slot, mask=exists)


def compute_slot_mapping(
    start: Tensor,
    q_len: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    out_cu_seqlens_q: Tensor,
    out_row_ids: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    interpret: bool = False,
) -> None:
    """Write the flat layout of rows of different lengths, in row order.

    start          int32 [R]    position of each row's first token
    q_len          int32 [R]    number of flat tokens of each row, 0 for dead rows; their sum may be below T
    page_table     int32 [R, max pages a row]
    out_cu_seqlens_q  int32 [R+1]  first flat token of each row, and their sum
    out_row_ids    int32 [T]    0 for padding, which comes after the last row
    out_positions  int64 [T]    0 for padding
    out_slot_mapping  int64 [T]  0 for padding and past the page table

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, max_pages = page_table.shape
    num_flat_tokens = out_slot_mapping.numel()
    check("compute_slot_mapping: start", start, (num_rows,), torch.int32)
    check("compute_slot_mapping: q_len", q_len, (num_rows,), torch.int32)
    check("compute_slot_mapping: page_table", page_table, (num_rows, max_pages), torch.int32)
    check("compute_slot_mapping: out_cu_seqlens_q", out_cu_seqlens_q, (num_rows + 1,), torch.int32)
    check("compute_slot_mapping: out_row_ids", out_row_ids, (num_flat_tokens,), torch.int32)
    check("compute_slot_mapping: out_positions", out_positions, (num_flat_tokens,), torch.int64)
    check("compute_slot_mapping: out_slot_mapping", out_slot_mapping, (num_flat_tokens,), torch.int64)
    if not (start.is_cuda or interpret):
        compute_slot_mapping_reference(
            start,
            q_len,
            page_table,
            page_size=page_size,
            out_cu_seqlens_q=out_cu_seqlens_q,
            out_row_ids=out_row_ids,
            out_positions=out_positions,
            out_slot_mapping=out_slot_mapping,
        )
    else:
        compute_slot_mapping_kernel[(num_rows + 1,)](
            start,
            q_len,
            page_table,
            out_cu_seqlens_q,
            out_row_ids,
            out_positions,
            out_slot_mapping,
            num_rows,
            num_flat_tokens,
            max_pages,
            PAGE_SIZE=page_size,
            ROWS=max(LEAST_ROWS, triton.next_power_of_2(num_rows)),
            BLOCK=BLOCK,
            num_warps=4,
        )


def compute_slot_mapping_reference(
    start: Tensor,
    q_len: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    out_cu_seqlens_q: Tensor,
    out_row_ids: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
) -> None:
    """The same in plain torch."""
    out_cu_seqlens_q[:1] = 0
    torch.cumsum(q_len, 0, dtype=torch.int32, out=out_cu_seqlens_q[1:])
    rows = torch.repeat_interleave(torch.arange(len(q_len), device=start.device), q_len.long())[: len(out_slot_mapping)]
    positions = torch.arange(len(rows), device=start.device) + (start - out_cu_seqlens_q[:-1])[rows]
    inside = positions < page_table.shape[1] * page_size
    for out, values in (
        (out_row_ids, rows),
        (out_positions, positions),
        (out_slot_mapping, slot_of_reference(page_table, rows, positions, inside, page_size)),
    ):
        out[: len(rows)] = values
        out[len(rows) :] = 0
