"""Inputs of K parallel drafts of a row, in one launch: its newest token with its feature, then K - 1 mask tokens.

    j = 0..K-1:   position = num_tokens - 2 + j
    j = 0         the newest token, with the target's feature of the position before it; its K/V exist already: slot = 0
    j > 0         the mask token, with the mask's feature; slot = page_table[row, position // page_size] * page_size + the rest
    draft_len = K      kv_len = num_tokens + K - 2

Positions past the page table never wrap around: they go to the scratch slot 0 and are not counted as keys. Dead rows get position
0, slot 0 and no keys. One program a flat token. Bound by launch latency: 4 * H bytes a token, one launch for a gather, two fills
and the inputs of attention. Source: the input preparation of https://github.com/vllm-project/vllm/pull/32628 and its review.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.kv_cache.slot_mapping import slot_of, slot_of_reference

VALUES_PER_THREAD = 16


@triton.jit(do_not_specialize=["mask_id", "max_tokens", "max_pages"])
def prepare_parallel_draft_inputs_kernel(
    tokens, num_tokens, live, page_table, hidden, mask_hidden, out_ids, out_hidden, out_positions, out_slot_mapping, out_kv_len,
    out_draft_len, mask_id, token_stride, max_tokens, max_pages, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PDL: tl.constexpr,
):
    await_earlier(PDL)
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num = tl.load(num_tokens + row)
    alive = (tl.load(live + row) != 0) & (num > 1)
    t = row * K + j
    position = tl.where(alive, num - 2 + j, 0).to(tl.int64)
    tl.store(out_positions + t, position)
    tl.store(out_slot_mapping + t, slot_of(page_table, row, position, alive & (j > 0), max_pages, PAGE_SIZE))
    lane = tl.arange(0, BLOCK)
    exists = lane < WIDTH
    if j == 0:
        tl.store(out_ids + t, tl.load(tokens + row * token_stride + tl.maximum(num - 1, 0)))
        tl.store(out_kv_len + row, tl.where(alive, tl.minimum(num + K - 2, max_tokens), 0))
        tl.store(out_draft_len + row, tl.where(alive, K, 0))
        tl.store(out_hidden + t * WIDTH + lane, tl.load(hidden + row * WIDTH + lane, mask=exists), mask=exists)
    else:
        tl.store(out_ids + t, mask_id)
        tl.store(out_hidden + t * WIDTH + lane, tl.load(mask_hidden + lane, mask=exists), mask=exists)


def prepare_parallel_draft_inputs(
    tokens: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    page_table: Tensor,
    hidden: Tensor,
    mask_hidden: Tensor,
    *,
    mask_id: int,
    page_size: int,
    out_ids: Tensor,
    out_hidden: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_kv_len: Tensor,
    out_draft_len: Tensor,
    interpret: bool = False,
) -> None:
    """Write the K flat tokens from which each of R rows drafts, dead rows included; row r owns r * K .. r * K + K - 1.

    tokens         int32 [R, L]    rows may be slices of wider ones; kv_len never exceeds L
    num_tokens     int32 [R]       committed tokens, at least 2 in a live row: the newest has no feature yet
    live           int32 [R]
    page_table     int32 [R, max pages a row]
    hidden         fp32, bf16, fp16 or fp64 [R, H]  the feature of each row's newest position that has one
    mask_hidden    [H] of hidden's dtype
    out_ids        int32 [R * K], K >= 1
    out_hidden     [R * K, H] of hidden's dtype
    out_positions  int64 [R * K]
    out_slot_mapping  int64 [R * K]   0 for dead rows, each row's first token, and positions past the page table
    out_kv_len     int32 [R]       keys that the last mask token attends to, at most L; 0 for dead rows
    out_draft_len  int32 [R]       K; 0 for dead rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, width), num_flat_tokens = hidden.shape, out_ids.shape[0]
    k = num_flat_tokens // max(1, num_rows)
    check("prepare_parallel_draft_inputs: tokens", tokens, (num_rows, tokens.shape[1]), torch.int32, rows=True)
    for name, vector in (
        ("num_tokens", num_tokens), ("live", live), ("out_kv_len", out_kv_len), ("out_draft_len", out_draft_len),
    ):
        check(f"prepare_parallel_draft_inputs: {name}", vector, (num_rows,), torch.int32)
    check("prepare_parallel_draft_inputs: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    check("prepare_parallel_draft_inputs: hidden", hidden, (num_rows, width), *FLOATS)
    check("prepare_parallel_draft_inputs: mask_hidden", mask_hidden, (width,), hidden.dtype)
    check("prepare_parallel_draft_inputs: out_ids", out_ids, (num_rows * max(1, k),), torch.int32)
    check("prepare_parallel_draft_inputs: out_hidden", out_hidden, (num_flat_tokens, width), hidden.dtype)
    check("prepare_parallel_draft_inputs: out_positions", out_positions, (num_flat_tokens,), torch.int64)
    check("prepare_parallel_draft_inputs: out_slot_mapping", out_slot_mapping, (num_flat_tokens,), torch.int64)
    if not (tokens.is_cuda or interpret):
        prepare_parallel_draft_inputs_reference(
            tokens, num_tokens, live, page_table, hidden, mask_hidden, mask_id=mask_id, page_size=page_size, out_ids=out_ids,
            out_hidden=out_hidden, out_positions=out_positions, out_slot_mapping=out_slot_mapping, out_kv_len=out_kv_len,
            out_draft_len=out_draft_len,
        )
    elif num_rows:
        block = triton.next_power_of_2(width)
        prepare_parallel_draft_inputs_kernel[(num_rows, k)](
            tokens,
            num_tokens,
            live,
            page_table,
            hidden,
            mask_hidden,
            out_ids,
            out_hidden,
            out_positions,
            out_slot_mapping,
            out_kv_len,
            out_draft_len,
            mask_id,
            tokens.stride(0),
            tokens.shape[1],
            page_table.shape[1],
            K=k,
            WIDTH=width,
            BLOCK=block,
            PAGE_SIZE=page_size,
            num_warps=min(16, max(1, block // (32 * VALUES_PER_THREAD))),
            **launch_args(hidden),
        )


def prepare_parallel_draft_inputs_reference(
    tokens: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    page_table: Tensor,
    hidden: Tensor,
    mask_hidden: Tensor,
    *,
    mask_id: int,
    page_size: int,
    out_ids: Tensor,
    out_hidden: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_kv_len: Tensor,
    out_draft_len: Tensor,
) -> None:
    """The same in plain torch."""
    num_rows = live.shape[0]
    k = out_ids.shape[0] // max(1, num_rows)
    alive = (live != 0) & (num_tokens > 1)
    ids, fed = out_ids.view(num_rows, k), out_hidden.view(num_rows, k, -1)
    ids.fill_(mask_id)
    ids[:, :1] = tokens.gather(1, (num_tokens - 1).clamp(min=0).long().unsqueeze(1))
    fed[:, 1:] = mask_hidden
    fed[:, 0] = hidden
    rows, steps = torch.arange(num_rows, device=live.device)[:, None], torch.arange(k, device=live.device)
    positions = (num_tokens[:, None] - 2 + steps) * alive[:, None]
    out_positions.copy_(positions.flatten())
    out_slot_mapping.copy_(slot_of_reference(page_table, rows, positions, alive[:, None] & (steps > 0), page_size).flatten())
    out_kv_len.copy_((num_tokens + k - 2).clamp(max=tokens.shape[1]) * alive)
    out_draft_len.copy_(alive * k)
