"""Prefill attention for what FlashAttention has no kernels for, heads of more than 256 values and images whose tokens attend to
each other: causal but for these, with windows and sinks.

    out[t] = softmax over the keys k of t's row, up to its position or last key, within the window, of (scale * q[t] . K[k]) @ V

K and V of all rows are concatenated, gathered from their pages. One program for each tile of (query, head) pairs of a row and K/V
head; where a tile's sums [TILE, D] take too many registers, V's columns are divided between several programs, each of which
computes the scores anew. The tiles with the most keys start first. The softmax is online, in base 2.
Bound by tensor cores. Source: Dao 2023 (FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.attention.tile import lanes_of, sink_share
from batchspec.kernels.common.card import Card, card_of
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

DTYPES = (torch.bfloat16, torch.float16)
TILE, BLOCK, V_PARTS, WARPS, STAGES = 128, 32, 2, 8, 2
"""With heads of 512 values nothing spills, and 184 of the 227 KiB of shared memory that a block has on Hopper are used. Not
measured."""


@triton.jit
def add_keys(
    query, k, v, at, end, position, last_key, peak, mass, acc, scale, k_stride, v_stride, first_column, WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SEEN: tl.constexpr, WIDE: tl.constexpr,
):
    """(peak, mass, acc) with the keys at .. at + BLOCK - 1 added. SEEN: all queries attend to all of them."""
    key = at + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    column = first_column + tl.arange(0, COLUMNS)
    exists = (key < end)[:, None]
    keys = tl.load(k + key.to(tl.int64)[:, None] * k_stride + d[None, :], mask=exists & (d < HEAD_DIM)[None, :], other=0.0)
    values = tl.load(
        v + key.to(tl.int64)[:, None] * v_stride + column[None, :], mask=exists & (column < HEAD_DIM)[None, :], other=0.0
    )
    if WIDE:
        keys, values = keys.to(tl.float32), values.to(tl.float32)
    s = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if not SEEN:
        seen = key[None, :] <= tl.minimum(last_key, end - 1)[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    shrink = tl.exp2(peak - new_peak)
    p = tl.exp2(s - new_peak[:, None])
    mass = mass * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_peak, mass, acc


@triton.jit(do_not_specialize=["num_tiles"])
def ragged_prefill_kernel(
    q, k, v, cu_seqlens_q, cu_seqlens_k, sink_logits, last_keys, out, scale, num_tiles, q_stride_t, q_stride_h, k_stride,
    v_stride, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, V_PARTS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):
    """Program (row, tile from the last one on, K/V head, part of V)."""
    v_part = tl.program_id(0) % V_PARTS
    head = tl.program_id(0) // V_PARTS % KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // V_PARTS // KV_HEADS % num_tiles
    row = tl.program_id(0) // V_PARTS // KV_HEADS // num_tiles
    COLUMNS: tl.constexpr = DIM // V_PARTS
    await_earlier(PDL)
    begin = tl.load(cu_seqlens_q + row)
    count = tl.load(cu_seqlens_q + row + 1) - begin
    if tile * TILE >= count * HEADS:
        return
    first_key = tl.load(cu_seqlens_k + row)
    num_keys = tl.load(cu_seqlens_k + row + 1) - first_key
    lane, _, first_place, _, inside = lanes_of(
        tile, row, begin, count, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k, 1, HEADS, TILE, False
    )
    position = num_keys - count + lane // HEADS
    token = (first_place + lane // HEADS).to(tl.int64)
    q_head = head * HEADS + lane % HEADS
    d = tl.arange(0, DIM)
    within = inside[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + (token * q_stride_t + q_head * q_stride_h)[:, None] + d[None, :], mask=within, other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    own_k = k + first_key.to(tl.int64) * k_stride + head * HEAD_DIM
    own_v = v + first_key.to(tl.int64) * v_stride + head * HEAD_DIM
    earliest = num_keys - count + tile * TILE // HEADS
    end = tl.minimum(num_keys, num_keys - count + (tile * TILE + TILE - 1) // HEADS + 1)
    last_key = position
    if last_keys is not None:
        last_key = tl.load(last_keys + token, mask=inside, other=0)
        end = tl.minimum(num_keys, tl.max(last_key, 0) + 1)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(earliest - (WINDOW - 1), 0) // BLOCK * BLOCK
    peak = tl.full([TILE], -1e30, tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, COLUMNS], tl.float32)
    middle = low
    if WINDOW == 0:  # all queries of the tile attend to the keys up to the first query's position
        middle = (earliest + 1) // BLOCK * BLOCK
        for at in range(0, middle, BLOCK):
            peak, mass, acc = add_keys(
                query, own_k, own_v, at, end, position, last_key, peak, mass, acc, scale, k_stride, v_stride, v_part * COLUMNS,
                WINDOW, HEAD_DIM, DIM, COLUMNS, BLOCK, True, WIDE,
            )
    for at in range(middle, end, BLOCK):
        peak, mass, acc = add_keys(
            query, own_k, own_v, at, end, position, last_key, peak, mass, acc, scale, k_stride, v_stride, v_part * COLUMNS,
            WINDOW, HEAD_DIM, DIM, COLUMNS, BLOCK, False, WIDE,
        )
    mass = tl.maximum(mass, 1e-30)
    acc = acc / mass[:, None]
    if sink_logits is not None:
        acc = acc * sink_share(sink_logits, q_head, inside, peak + tl.log2(mass))[:, None]
    column = v_part * COLUMNS + tl.arange(0, COLUMNS)
    place = token * (KV_HEADS * HEADS) + q_head
    tl.store(
        out + place[:, None] * HEAD_DIM + column[None, :], acc.to(out.dtype.element_ty),
        mask=inside[:, None] & (column < HEAD_DIM)[None, :],
    )


def tile_of(dim: int, dtype: torch.dtype, card: Card) -> int:
    """TILE, or the half or quarter of it that fits into the card's shared memory together with a block of keys and a block of
    values."""
    room = card.block_shared_bytes // dtype.itemsize - 2 * BLOCK * dim
    return next((tile for tile in (TILE, TILE // 2) if tile * dim < room), TILE // 4)


def ragged_prefill(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, scale: float, max_q: int, out: Tensor,
    window: int = 0, sink_logits: Tensor | None = None, last_keys: Tensor | None = None, interpret: bool = False,
) -> None:
    """Causal attention of T queries over the keys of their rows, for one layer.

    q             bf16 or fp16 [T, NH, D]  any strides over T and NH
    k, v          [N, KVH, D] of q's dtype, contiguous: of all rows, one after another
    cu_seqlens_q  int32 [R+1]  row r's queries are cu_seqlens_q[r] .. cu_seqlens_q[r+1]-1, at its last positions
    cu_seqlens_k  int32 [R+1]  the same for its keys, at least as many
    max_q         no row has more queries
    window        a query at position p attends to keys p-window+1 .. p; 0: 0 .. p
    sink_logits   fp32 [NH]  joins the denominator of each softmax once, not scaled
    last_keys     int32 [T]  a query attends to keys up to this one of its row, not before its own position; None: up to its own
    out           [T, NH, D] of q's dtype, contiguous; not written after the last row

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_tokens, num_heads, head_dim), (num_keys, kv_heads, _) = q.shape, k.shape
    num_rows = cu_seqlens_q.shape[0] - 1
    check("ragged_prefill: q", q, (num_tokens, num_heads, head_dim), *DTYPES, rows=True)
    check("ragged_prefill: k", k, (num_keys, kv_heads, head_dim), q.dtype)
    check("ragged_prefill: v", v, (num_keys, kv_heads, head_dim), q.dtype)
    check("ragged_prefill: cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), torch.int32)
    check("ragged_prefill: cu_seqlens_k", cu_seqlens_k, (num_rows + 1,), torch.int32)
    check("ragged_prefill: out", out, (num_tokens, num_heads, head_dim), q.dtype)
    if sink_logits is not None:
        check("ragged_prefill: sink_logits", sink_logits, (num_heads,), torch.float32)
    if last_keys is not None:
        check("ragged_prefill: last_keys", last_keys, (num_tokens,), torch.int32)
    if not (q.is_cuda or interpret):
        ragged_prefill_reference(
            q, k, v, cu_seqlens_q, cu_seqlens_k, scale=scale, out=out, window=window, sink_logits=sink_logits, last_keys=last_keys
        )
    elif num_tokens:
        heads, dim = num_heads // kv_heads, max(32, triton.next_power_of_2(head_dim))
        tile = tile_of(dim, q.dtype, card_of(q.device))
        num_tiles = triton.cdiv(max_q * heads, tile)
        ragged_prefill_kernel[(num_rows * num_tiles * kv_heads * V_PARTS,)](
            q, k, v, cu_seqlens_q, cu_seqlens_k, sink_logits, last_keys, out, scale * math.log2(math.e), num_tiles, q.stride(0),
            q.stride(1), k.stride(0), v.stride(0), KV_HEADS=kv_heads, HEADS=heads, HEAD_DIM=head_dim,
            DIM=dim, WINDOW=window, TILE=tile, BLOCK=BLOCK, V_PARTS=V_PARTS,
            WIDE=not q.is_cuda, num_warps=WARPS, num_stages=STAGES, **launch_args(q),
        )


def ragged_prefill_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, scale: float, out: Tensor, window: int = 0,
    sink_logits: Tensor | None = None, last_keys: Tensor | None = None,
) -> None:
    """The same in plain torch, row by row: softmax over the whole row in fp32."""
    queries, ends, heads = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), q.shape[1] // k.shape[1]
    for begin, stop, first, end in zip(queries, queries[1:], ends, ends[1:], strict=False):
        keys = torch.arange(end - first, device=q.device)
        position = keys[end - first - (stop - begin) :, None]
        own_k, own_v = (x[first:end].float().repeat_interleave(heads, 1) for x in (k, v))
        seen = keys <= (position if last_keys is None else last_keys[begin:stop, None])
        seen = seen if not window else seen & (keys > position - window)
        scores = torch.einsum("thd,khd->htk", q[begin:stop].float(), own_k).mul(scale).masked_fill(~seen, float("-inf"))
        if sink_logits is not None:
            scores = torch.cat((scores, sink_logits[:, None, None].expand(-1, stop - begin, 1)), 2)
        weights = scores.softmax(2)[:, :, : end - first]
        out[begin:stop] = torch.einsum("htk,khd->thd", weights, own_v).to(out.dtype)
