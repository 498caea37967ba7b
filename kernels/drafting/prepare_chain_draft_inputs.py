"""Inputs of all steps of a chain of K drafts, in one launch: first draft token, draft lengths, positions and slot_mapping.

    step k = 0..K-2:  position = num_tokens - 1 + k     slot = page_table[row, position // page_size] * page_size + the rest
    draft_len = K     kv_len = num_tokens + K - 2, the keys of the last step: one attention work list serves all steps

Positions and slots are stored step by step, so that those of one step are contiguous. One program a row; dead rows get position
0, the scratch slot 0 and no keys. Bound by launch latency: a hundred bytes a row.
Source: the uniform cache locations of https://github.com/lightseekorg/tokenspeed/pull/142 (no cumsum, fills or casts).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.kv_cache.slot_mapping import slot_of, slot_of_reference


@triton.jit(do_not_specialize=["num_rows", "max_tokens", "max_pages"])
def prepare_chain_draft_inputs_kernel(
    first_ids, num_tokens, live, page_table, out_ids, out_draft_len, out_positions, out_slot_mapping, out_kv_len,
    num_rows, ids_stride, max_tokens, max_pages, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    alive = tl.load(live + row) != 0
    num = tl.load(num_tokens + row)
    tl.store(out_ids + row * ids_stride, tl.load(first_ids + row))
    tl.store(out_draft_len + row, tl.where(alive, WIDTH, 0))
    tl.store(out_kv_len + row, tl.where(alive, tl.minimum(num + WIDTH - 2, max_tokens), 0))
    step = tl.arange(0, LANES)
    position = tl.where(alive, num - 1 + step, 0).to(tl.int64)
    exists = step < WIDTH - 1
    slot = slot_of(page_table, row, position, step < tl.where(alive, WIDTH - 1, 0), max_pages, PAGE_SIZE)
    index = step.to(tl.int64) * num_rows + row
    tl.store(out_positions + index, position, mask=exists)
    tl.store(out_slot_mapping + index, slot, mask=exists)


def prepare_chain_draft_inputs(
    first_ids: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    max_tokens: int,
    out_ids: Tensor,
    out_draft_len: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_kv_len: Tensor,
    interpret: bool = False,
) -> None:
    """Write the inputs of the draft steps of R rows, dead rows included.

    first_ids      int32 [R]       the first draft token of each row
    num_tokens     int32 [R]       committed tokens; the newest is not in K/V yet
    live           int32 [R]
    page_table     int32 [R, max pages a row]
    max_tokens     maximum length of a row in tokens; kv_len never exceeds it
    out_ids        int32 [R, K]    column 0: the first draft token; other columns stay unchanged; rows may be slices of wider ones
    out_draft_len  int32 [R]       K; 0 for dead rows
    out_positions  int64 [K-1, R]
    out_slot_mapping  int64 [K-1, R]  0 for dead rows and for positions past the page table
    out_kv_len     int32 [R]       keys that the last step attends to, at most max_tokens; 0 for dead rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, width = out_ids.shape
    for name, vector in (
        ("first_ids", first_ids), ("num_tokens", num_tokens), ("live", live), ("out_draft_len", out_draft_len),
        ("out_kv_len", out_kv_len),
    ):
        check(f"prepare_chain_draft_inputs: {name}", vector, (num_rows,), torch.int32)
    check("prepare_chain_draft_inputs: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    check("prepare_chain_draft_inputs: out_ids", out_ids, (num_rows, width), torch.int32, rows=True)
    check("prepare_chain_draft_inputs: out_positions", out_positions, (width - 1, num_rows), torch.int64)
    check("prepare_chain_draft_inputs: out_slot_mapping", out_slot_mapping, (width - 1, num_rows), torch.int64)
    if not (first_ids.is_cuda or interpret):
        prepare_chain_draft_inputs_reference(
            first_ids, num_tokens, live, page_table, page_size=page_size, max_tokens=max_tokens, out_ids=out_ids,
            out_draft_len=out_draft_len, out_positions=out_positions, out_slot_mapping=out_slot_mapping, out_kv_len=out_kv_len,
        )
    elif num_rows:
        prepare_chain_draft_inputs_kernel[(num_rows,)](
            first_ids, num_tokens, live, page_table, out_ids, out_draft_len, out_positions, out_slot_mapping, out_kv_len,
            num_rows, out_ids.stride(0), max_tokens, page_table.shape[1],
            WIDTH=width, PAGE_SIZE=page_size, LANES=triton.next_power_of_2(max(1, width - 1)), num_warps=1,
            **launch_args(num_tokens),
        )


def prepare_chain_draft_inputs_reference(
    first_ids: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    max_tokens: int,
    out_ids: Tensor,
    out_draft_len: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_kv_len: Tensor,
) -> None:
    """The same in plain torch."""
    width = out_ids.shape[1]
    alive = live != 0
    out_ids[:, 0] = first_ids
    out_draft_len.copy_(alive * width)
    out_kv_len.copy_((num_tokens + width - 2).clamp(max=max_tokens) * alive)
    positions = (num_tokens - 1 + torch.arange(width - 1, device=live.device)[:, None]) * alive
    out_positions.copy_(positions)
    rows = torch.arange(len(live), device=live.device)
    out_slot_mapping.copy_(slot_of_reference(page_table, rows, positions, alive, page_size))
