"""The slot mapping of a flat batch in the page table of another K/V group: layers of each sliding window have their own tables.

    key = positions[cu_seqlens_q[r]] + (t - cu_seqlens_q[r])       slot = page_table[r, key // page_size] * page_size + the rest

A row's tokens are adjacent in K/V, from the position of its first token on; so are the nodes of a draft tree, although their
positions are their depths. Dead rows, padding and keys past the page table get slot 0 of the scratch page 0.
One program a row. Bound by launch latency: a few KB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.kv_cache.slot_mapping import BLOCK, slot_of


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_pages"])
def group_slot_mapping_kernel(
    cu_seqlens_q, kv_len, positions, page_table, out_slot_mapping, num_rows, num_tokens, max_pages,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Program r < num_rows writes row r's slots, program num_rows those of the padding after the last row."""
    await_earlier(PDL)
    row = tl.program_id(0)
    is_row = row < num_rows
    begin = tl.load(cu_seqlens_q + row)
    end = tl.where(is_row, tl.load(cu_seqlens_q + row + 1, mask=is_row, other=0), num_tokens)
    length = tl.load(kv_len + row, mask=is_row, other=0)
    live_end = tl.where(length > 0, end, begin)
    start = tl.load(positions + begin, mask=begin < live_end, other=0)
    for at in range(begin, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        exists = token < end
        slot = slot_of(page_table, row.to(tl.int64), start + (token - begin), token < live_end, max_pages, PAGE_SIZE)
        tl.store(out_slot_mapping + token, slot, mask=exists)


def group_slot_mapping(
    cu_seqlens_q: Tensor,
    kv_len: Tensor,
    positions: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    out_slot_mapping: Tensor,
    interpret: bool = False,
) -> None:
    """Write the slots of the K/V of T flat tokens of R rows, according to one page table.

    cu_seqlens_q      int32 [R+1]  first flat token of each row, and the end of the last one; padding may follow
    kv_len            int32 [R]    0 for a dead row, which may own tokens
    positions         int64 [T]
    page_table        int32 [R, max pages a row]
    out_slot_mapping  int64 [T]    0 for dead rows, padding and past the page table

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, num_tokens = page_table.shape[0], positions.shape[0]
    check("group_slot_mapping: cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), torch.int32)
    check("group_slot_mapping: kv_len", kv_len, (num_rows,), torch.int32)
    check("group_slot_mapping: positions", positions, (num_tokens,), torch.int64)
    check("group_slot_mapping: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    check("group_slot_mapping: out_slot_mapping", out_slot_mapping, (num_tokens,), torch.int64)
    if not (positions.is_cuda or interpret):
        group_slot_mapping_reference(
            cu_seqlens_q, kv_len, positions, page_table, page_size=page_size, out_slot_mapping=out_slot_mapping
        )
    elif num_tokens:
        group_slot_mapping_kernel[(num_rows + 1,)](
            cu_seqlens_q, kv_len, positions, page_table, out_slot_mapping, num_rows, num_tokens, page_table.shape[1],
            PAGE_SIZE=page_size, BLOCK=BLOCK, num_warps=1, **launch_args(positions),
        )


def group_slot_mapping_reference(
    cu_seqlens_q: Tensor, kv_len: Tensor, positions: Tensor, page_table: Tensor, *, page_size: int, out_slot_mapping: Tensor
) -> None:
    """The same in plain torch."""
    out_slot_mapping.zero_()
    begins = cu_seqlens_q.tolist()
    for row, (begin, end, length) in enumerate(zip(begins, begins[1:], kv_len.tolist(), strict=False)):
        if length and end > begin:
            keys = positions[begin] + torch.arange(end - begin, device=positions.device)
            page = keys // page_size
            known = page < page_table.shape[1]
            pages = page_table[row].long()[page.clamp(max=page_table.shape[1] - 1)]
            out_slot_mapping[begin:end] = torch.where(known, pages * page_size + keys % page_size, 0)
