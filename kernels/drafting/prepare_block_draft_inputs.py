"""Inputs of a block of S queries a row, in one launch: its newest token, the anchor, then masks, which all read each other.

    j = 0..S-1:   position = num_tokens - 1 + j      slot = page_table[row, position // page_size] * page_size + the rest
    j = 0         the newest token;   j > 0 the mask token
    start = num_tokens - 1      kv_len = min(start + S, limit - 1)      seen = the keys start .. kv_len - 1, as bits

The keys before `start` are those of the context. Positions from limit - 1 on are never verified: they go to the scratch slot 0
and are no keys, because no page may be theirs. Dead rows get position 0, slot 0 and no keys. One program a row. Bound by launch
latency: a few hundred bytes a row. Source: the inputs of DFlash's block (https://github.com/z-lab/dflash).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.kv_cache.slot_mapping import slot_of, slot_of_reference

MOST_QUERIES = 64


@triton.jit(do_not_specialize=["mask_id", "draft_len", "max_pages"])
def prepare_block_draft_inputs_kernel(
    tokens, num_tokens, limit, live, page_table, out_ids, out_positions, out_slot_mapping, out_start, out_kv_len, out_seen,
    out_draft_len, mask_id, draft_len, token_stride, max_pages, WIDTH: tl.constexpr, LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    await_earlier(PDL)
    num = tl.load(num_tokens + row)
    alive = (tl.load(live + row) != 0) & (num > 0)
    lane = tl.arange(0, LANES)
    exists = lane < WIDTH
    at = row * WIDTH + lane
    newest = tl.load(tokens + row * token_stride + tl.maximum(num - 1, 0))
    tl.store(out_ids + at, tl.where(lane == 0, newest, mask_id), mask=exists)
    position = tl.where(alive, num - 1 + lane, 0).to(tl.int64)
    tl.store(out_positions + at, position, mask=exists)
    count = tl.where(alive, tl.maximum(tl.minimum(tl.load(limit + row) - num, WIDTH), 0), 0)
    slot = slot_of(page_table, row, position, lane < count, max_pages, PAGE_SIZE)
    tl.store(out_slot_mapping + at, slot, mask=exists)
    start = tl.where(alive, num - 1, 0)
    tl.store(out_start + row, start)
    tl.store(out_kv_len + row, start + count)
    tl.store(out_draft_len + row, tl.where(alive, draft_len, 0))
    ones = (tl.full([LANES], 1, tl.int64) << tl.minimum(count, 63).to(tl.int64)) - 1
    tl.store(out_seen + at, tl.where(count > 63, -1, ones), mask=exists)


def prepare_block_draft_inputs(
    tokens: Tensor,
    num_tokens: Tensor,
    limit: Tensor,
    live: Tensor,
    page_table: Tensor,
    *,
    mask_id: int,
    draft_len: int,
    page_size: int,
    out_ids: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_start: Tensor,
    out_kv_len: Tensor,
    out_seen: Tensor,
    out_draft_len: Tensor,
    interpret: bool = False,
) -> None:
    """Write the S flat tokens of the block of each of R rows, dead rows included; row r owns r * S .. r * S + S - 1.

    tokens         int32 [R, L]    rows may be slices of wider ones
    num_tokens     int32 [R]       committed tokens: the newest is not in K/V yet
    limit          int32 [R]       maximum number of tokens, as in `prepare_verify_inputs`
    live           int32 [R]
    page_table     int32 [R, max pages a row]
    out_ids        int32 [R * S], 1 <= S <= 64
    out_positions  int64 [R * S]
    out_slot_mapping  int64 [R * S]  0 for dead rows and for positions that are no keys
    out_start      int32 [R]       number of keys before the block; 0 for dead rows
    out_kv_len     int32 [R]       that with the block's; 0 for dead rows
    out_seen       int64 [R * S]   bit j: key start + j is one; the same for all queries of a row
    out_draft_len  int32 [R]       draft_len; 0 for dead rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, num_flat_tokens = num_tokens.shape[0], out_ids.shape[0]
    width = num_flat_tokens // max(1, num_rows)
    name = "prepare_block_draft_inputs"
    check(f"{name}: tokens", tokens, (num_rows, tokens.shape[1]), torch.int32, rows=True)
    for key, vector in (
        ("num_tokens", num_tokens), ("limit", limit), ("live", live), ("out_start", out_start), ("out_kv_len", out_kv_len),
        ("out_draft_len", out_draft_len),
    ):
        check(f"{name}: {key}", vector, (num_rows,), torch.int32)
    check(f"{name}: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    check(f"{name}: out_ids", out_ids, (num_rows * max(1, width),), torch.int32)
    for key, flat in (("out_positions", out_positions), ("out_slot_mapping", out_slot_mapping), ("out_seen", out_seen)):
        check(f"{name}: {key}", flat, (num_flat_tokens,), torch.int64)
    if width > MOST_QUERIES:
        raise ValueError(f"{name}: {width} queries a row; a mask has {MOST_QUERIES} bits")
    if not (tokens.is_cuda or interpret):
        prepare_block_draft_inputs_reference(
            tokens, num_tokens, limit, live, page_table, mask_id=mask_id, draft_len=draft_len, page_size=page_size,
            out_ids=out_ids, out_positions=out_positions, out_slot_mapping=out_slot_mapping, out_start=out_start,
            out_kv_len=out_kv_len, out_seen=out_seen, out_draft_len=out_draft_len,
        )
    elif num_rows:
        prepare_block_draft_inputs_kernel[(num_rows,)](
            tokens, num_tokens, limit, live, page_table, out_ids, out_positions, out_slot_mapping, out_start, out_kv_len,
            out_seen, out_draft_len, mask_id, draft_len, tokens.stride(0), page_table.shape[1], WIDTH=width,
            LANES=triton.next_power_of_2(width), PAGE_SIZE=page_size, num_warps=1, **launch_args(tokens),
        )


def prepare_block_draft_inputs_reference(
    tokens: Tensor,
    num_tokens: Tensor,
    limit: Tensor,
    live: Tensor,
    page_table: Tensor,
    *,
    mask_id: int,
    draft_len: int,
    page_size: int,
    out_ids: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_start: Tensor,
    out_kv_len: Tensor,
    out_seen: Tensor,
    out_draft_len: Tensor,
) -> None:
    """The same in plain torch."""
    num_rows = live.shape[0]
    width = out_ids.shape[0] // max(1, num_rows)
    alive = (live != 0) & (num_tokens > 0)
    ids = out_ids.view(num_rows, width)
    ids.fill_(mask_id)
    ids[:, :1] = tokens.gather(1, (num_tokens - 1).clamp(min=0).long().unsqueeze(1))
    positions = (num_tokens[:, None] - 1 + torch.arange(width, device=live.device)) * alive[:, None]
    out_positions.copy_(positions.flatten())
    rows = torch.arange(num_rows, device=live.device)[:, None]
    count, place = (limit - num_tokens).clamp(min=0, max=width) * alive, torch.arange(MOST_QUERIES, device=live.device)
    inside = place[:width] < count[:, None]
    out_slot_mapping.copy_(slot_of_reference(page_table, rows, positions, inside, page_size).flatten())
    out_start.copy_((num_tokens - 1) * alive)
    out_kv_len.copy_(out_start + count)
    out_draft_len.copy_(alive * draft_len)
    bits = torch.where(place < count[:, None], torch.ones_like(place) << place, 0).sum(1)
    out_seen.copy_(bits[:, None].expand(num_rows, width).flatten())
