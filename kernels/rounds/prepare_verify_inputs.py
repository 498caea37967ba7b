"""Inputs of a round of a fixed draft length, in one launch: newest token, draft lengths, positions, slot_mapping, kv_len.

    position = num_tokens - 1 + j,  j = 0..K      slot = page_table[row, position // page_size] * page_size + position % page_size
    draft_len = min(K, limit - num_tokens - 1)     kv_len = num_tokens + K

One program a row; dead rows get position 0, the scratch slot 0 and no keys. Bound by launch latency: a few hundred bytes a row.
Source: the fused input preparation of https://github.com/lightseekorg/tokenspeed/pull/142 (no cumsum, fills or casts).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.kv_cache.slot_mapping import slot_of, slot_of_reference


@triton.jit(do_not_specialize=["max_pages", "max_tokens"])
def prepare_verify_inputs_kernel(
    tokens, num_tokens, limit, live, page_table, out_ids, out_draft_len, out_positions, out_slot_mapping, out_kv_len,
    token_stride, max_tokens, max_pages, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    await_earlier(PDL)
    alive = tl.load(live + row) != 0
    num = tl.load(num_tokens + row)
    newest = tl.load(tokens + row * token_stride + tl.maximum(num - 1, 0))
    tl.store(out_ids + row * WIDTH, newest)
    room = tl.minimum(tl.load(limit + row) - num, WIDTH) - 1
    tl.store(out_draft_len + row, tl.where(alive, tl.maximum(room, 0), 0))
    tl.store(out_kv_len + row, tl.where(alive, tl.minimum(num + WIDTH - 1, max_tokens), 0))
    lane = tl.arange(0, LANES)
    position = tl.where(alive, num - 1 + lane, 0).to(tl.int64)
    exists = lane < WIDTH
    slot = slot_of(page_table, row, position, lane < tl.where(alive, WIDTH, 0), max_pages, PAGE_SIZE)
    tl.store(out_positions + row * WIDTH + lane, position, mask=exists)
    tl.store(out_slot_mapping + row * WIDTH + lane, slot, mask=exists)


def prepare_verify_inputs(
    tokens: Tensor,
    num_tokens: Tensor,
    limit: Tensor,
    live: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    out_ids: Tensor,
    out_draft_len: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_kv_len: Tensor,
    interpret: bool = False,
) -> None:
    """Write the inputs of verification: for each of R rows, dead or not, S = K + 1 flat tokens, the newest token and K drafts.

    tokens         int32 [R, L]      rows may be slices of wider ones
    num_tokens     int32 [R]         committed tokens; the newest is not in K/V yet
    limit          int32 [R]         maximum number of tokens; a round emits one token more than it accepts
    live           int32 [R]
    page_table     int32 [R, max pages a row]
    out_ids        int32 [R, S]      column 0: the newest token; other columns stay unchanged
    out_draft_len  int32 [R]         0..K; 0 for dead rows
    out_positions  int64 [R * S]
    out_slot_mapping  int64 [R * S]  0 for dead rows and for positions past the page table
    out_kv_len     int32 [R]         keys that the last flat token attends to, at most L; 0 for dead rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, width = out_ids.shape
    check("prepare_verify_inputs: tokens", tokens, (num_rows, tokens.shape[1]), torch.int32, rows=True)
    for name, vector in (
        ("num_tokens", num_tokens), ("limit", limit), ("live", live), ("out_draft_len", out_draft_len),
        ("out_kv_len", out_kv_len),
    ):
        check(f"prepare_verify_inputs: {name}", vector, (num_rows,), torch.int32)
    check("prepare_verify_inputs: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    check("prepare_verify_inputs: out_ids", out_ids, (num_rows, width), torch.int32)
    check("prepare_verify_inputs: out_positions", out_positions, (num_rows * width,), torch.int64)
    check("prepare_verify_inputs: out_slot_mapping", out_slot_mapping, (num_rows * width,), torch.int64)
    if not (tokens.is_cuda or interpret):
        prepare_verify_inputs_reference(
            tokens, num_tokens, limit, live, page_table, page_size=page_size, out_ids=out_ids, out_draft_len=out_draft_len,
            out_positions=out_positions, out_slot_mapping=out_slot_mapping, out_kv_len=out_kv_len,
        )
    elif num_rows:
        prepare_verify_inputs_kernel[(num_rows,)](
            tokens, num_tokens, limit, live, page_table, out_ids, out_draft_len, out_positions, out_slot_mapping, out_kv_len,
            tokens.stride(0), tokens.shape[1], page_table.shape[1],
            WIDTH=width, PAGE_SIZE=page_size, LANES=triton.next_power_of_2(width), num_warps=1, **launch_args(tokens),
        )


def prepare_verify_inputs_reference(
    tokens: Tensor,
    num_tokens: Tensor,
    limit: Tensor,
    live: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    out_ids: Tensor,
    out_draft_len: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_kv_len: Tensor,
) -> None:
    """The same in plain torch."""
    width = out_ids.shape[1]
    newest = (num_tokens - 1).clamp(min=0).long().unsqueeze(1)
    out_ids[:, :1] = tokens.gather(1, newest)
    out_draft_len.copy_((limit - num_tokens - 1).clamp(min=0, max=width - 1) * live)
    out_kv_len.copy_((num_tokens + width - 1).clamp(max=tokens.shape[1]) * live)
    places = (num_tokens[:, None] - 1 + torch.arange(width, device=tokens.device)) * live[:, None]
    out_positions.copy_(places.flatten())
    rows = torch.arange(len(live), device=live.device)[:, None]
    out_slot_mapping.copy_(slot_of_reference(page_table, rows, places, live[:, None] != 0, page_size).flatten())
