"""Latent attention of rounds: the few queries of each row over its long paged latents, in the absorbed form.

    s[h, t, k] = scale * (q_latent[t, h] . c[k] + q_rope[t, h] . r[k])    over the keys 0 .. position[t], or those in the window
    out[t, h] = sum over k of softmax(s)[k] * c[k]                        and the sink

A page holds c, of R numbers, and r, of P numbers, of each token. All heads have the same keys, and values are the latents again:
a block of c is read once, for both products. The (query, head) pairs of a row are the lines of tiles: of 64 on Hopper, or of 16
or 32 if a row has no more (`latent_step.py`). The work list is that of verify attention with one K/V head
(`attention/split_kv_schedule.py`), as are partial results and their merge.
Bytes: K (R + P) itemsize a row. Operations: 2 L (2 R + P) K, with L lines. With 64 lines of R = 512, P = 64 they are 121 a
byte in bf16, and an H200 computes 184 in the time of one. 64 rows of 8192 keys take 170 us with 20 lines, 198 with 60: 83 and
71 % of the time by bytes, and 3 % less if L2 holds the keys: a step's products, softmax and loads wait for each other. 80 lines
are two tiles, which compute all of it again (366 us, 38 %).
Source: DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), section 2.1; for the split over keys see `verify_attention.py`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.attention.merge_states import Partials, merge_states
from batchspec.kernels.attention.settings import Config
from batchspec.kernels.attention.softmax_step import page_of
from batchspec.kernels.attention.tile import lanes_of, write_lines, zero_tokens
from batchspec.kernels.attention.work_list import AttentionWork
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.latent.e4m3_latents import Fp8Latents, check_pages, strides
from batchspec.kernels.latent.latent_step import attend_latents, load_lines
from batchspec.kernels.latent.settings import DTYPES, keys_first, latent_config, slice_of


@triton.jit(do_not_specialize=["max_pages", "max_q"])
def verify_latents_kernel(
    q_latent, q_rope, latents, rotated, scales, page_table, positions, cu_seqlens_q, kv_len, items, num_items, row_parts, out,
    part_out, part_lse, scale, max_pages, max_q, latent_stride_t, latent_stride_h, rope_stride_t, rope_stride_h, page_stride,
    rope_stride, scale_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, ROPE: tl.constexpr,
    ROPE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):
    if not EARLY:
        await_earlier(PDL)
    index = tl.program_id(0)
    item = items + index * 8
    row = tl.load(item)
    tile = tl.load(item + 1)
    first = tl.load(item + 2)
    end = tl.load(item + 3)
    part = tl.load(item + 4)
    begin = tl.load(item + 6)
    count = tl.load(item + 7)
    if index >= tl.load(num_items):
        await_earlier(EARLY)
        return
    if end == 0:  # a dead row, or the padding after the last row
        await_earlier(EARLY)
        zero_tokens(out, begin, begin + count, 0, HEADS, 1, TILE, LATENT, SLICES * SLICE)
        return
    lane, row, first_place, num_lanes, inside = lanes_of(
        tile, row, begin, count, cu_seqlens_q, kv_len, cu_seqlens_q, max_q, HEADS, TILE, False
    )
    table = page_table + row.to(tl.int64) * max_pages
    key = tl.arange(0, BLOCK)
    page = page_of(table, first + key, end, PAGE_SIZE)
    token = (first_place + lane // HEADS).to(tl.int64)
    head = (lane % HEADS).to(tl.int64)  # heads may be outermost in memory, far apart
    position = tl.load(positions + token, mask=inside, other=-1).to(tl.int32)
    await_earlier(EARLY)

    of_rope = load_lines(
        q_rope + token * rope_stride_t + head * rope_stride_h, inside, tl.arange(0, ROPE_DIM), ROPE, KEYS, WIDE
    )
    of_token = q_latent + token * latent_stride_t + head * latent_stride_h
    of_latent = ()
    acc = ()
    for i in tl.static_range(SLICES):
        of_latent += (load_lines(of_token, inside, i * SLICE + tl.arange(0, SLICE), LATENT, KEYS, WIDE),)  # type: ignore[assignment]
        acc += (tl.zeros([SLICE, TILE] if KEYS == 0 else [TILE, SLICE], tl.float32),)  # type: ignore[assignment]
    listed = end
    end = tl.minimum(end, tl.max(position, 0) + 1)
    peak = tl.full([TILE], -1e30, tl.float32)  # finite, so that a query without a key in this item does not get NaN
    mass = tl.zeros([BLOCK, TILE] if KEYS == 0 else [TILE, BLOCK], tl.float32)  # of each place in a block: added up at the end
    if SINK > 0:
        sinks = tl.load(item + 5)
        for at in tl.range(0, sinks, BLOCK, num_stages=STAGES):
            page_at = page_of(table, at + key, sinks, PAGE_SIZE)
            peak, mass, acc = attend_latents(
                of_latent, of_rope, peak, mass, acc, page_at, at + key, sinks, listed, latents, rotated, scales, position, scale,
                page_stride, rope_stride, scale_stride, WINDOW, SINK, PAGE_SIZE, LATENT, SLICE, ROPE, ROPE_DIM, KEYS, WIDE,
                INTERPRETED,
            )
    for at in tl.range(first, end, BLOCK, num_stages=STAGES):
        next_page = page_of(table, at + BLOCK + key, listed, PAGE_SIZE)  # one step ahead: see `verify_attention.py`
        peak, mass, acc = attend_latents(
            of_latent, of_rope, peak, mass, acc, page, at + key, end, listed, latents, rotated, scales, position, scale,
            page_stride, rope_stride, scale_stride, WINDOW, SINK, PAGE_SIZE, LATENT, SLICE, ROPE, ROPE_DIM, KEYS, WIDE,
            INTERPRETED,
        )
        page = next_page
    # Computed again from the item: keeping the lines' addresses would cost registers in the loop.
    lane, row, first_place, num_lanes, inside = lanes_of(
        tl.load(item + 1, volatile=True), row, begin, count, cu_seqlens_q, kv_len, cu_seqlens_q, max_q, HEADS, TILE, False
    )
    token = (first_place + lane // HEADS).to(tl.int64)
    total = tl.sum(mass, KEYS)
    for i in tl.static_range(SLICES):
        d = i * SLICE + tl.arange(0, SLICE)
        write_lines(
            out, part_out, part_lse, row_parts, None, peak, total, tl.trans(acc[i]) if KEYS == 0 else acc[i], part, token,
            lane % HEADS, lane, row, num_lanes, 0, d, inside, inside[:, None] & (d < LATENT)[None, :], 1, HEADS, LATENT,
        )


def verify_latents(
    q_latent: Tensor, q_rope: Tensor, latents: Tensor | Fp8Latents, page_table: Tensor, positions: Tensor, work: AttentionWork,
    partials: Partials, *, scale: float, out: Tensor, config: Config | None = None, early: bool = False, interpret: bool = False,
) -> None:
    """Attention of T queries of NH heads over the pages of their rows, for one layer.

    q_latent    fp32, bf16 or fp16 [T, NH, R]  queries times the keys' matrix; any strides over T and NH
    q_rope      the same dtype [T, NH, P]      rotated parts of queries; any strides over T and NH
    latents     the same dtype [pages, page_size, R + P], contiguous, with the queries' own already written: finite in the first R
                numbers, NaN in a last number if only queries that attend to it are to get NaN. Unwritten slots are never read.
                Or in e4m3: a number is read as `Fp8Latents.read` returns it
    page_table  int32 [rows, max pages a row]
    positions   int64 [T]  a query attends to keys 0 .. its position, below kv_len, within the work list's window
    work        from `split_kv_schedule` with one K/V head, no groups
    partials    from `partials_of(work, R)`
    out         [T, NH, R] of q's dtype, contiguous: the softmax's mean of latents; zeros for dead rows and padding
    config      warps and stages other than those of `settings.py`, for measurements
    early       the previous launch has not written work, page_table or positions

    Products and sums in fp32, weights rounded to the dtype. Does not synchronise on a GPU. Raises ValueError for other shapes,
    dtypes or strides.
    """
    shape, (num_tokens, num_heads, latent_dim), rope_dim = work.shape, q_latent.shape, q_rope.shape[2]
    num_rows = work.kv_len.shape[0]
    check("verify_latents: q_latent", q_latent, (num_tokens, shape.heads_per_kv, latent_dim), *DTYPES, rows=True)
    check("verify_latents: q_rope", q_rope, (num_tokens, num_heads, rope_dim), q_latent.dtype, rows=True)
    parts = check_pages("verify_latents", latents, latent_dim, rope_dim, q_latent.dtype)
    check("verify_latents: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    check("verify_latents: positions", positions, (num_tokens,), torch.int64)
    check("verify_latents: out", out, (num_tokens, num_heads, latent_dim), q_latent.dtype)
    if shape.kv_heads != 1 or work.shared is not None:
        raise ValueError("verify_latents: the work list has several K/V heads or shared prefixes; latents have neither")
    if not (q_latent.is_cuda or interpret):
        verify_latents_reference(q_latent, q_rope, latents, page_table, positions, work, scale=scale, out=out)
        return
    args, card = launch_args(q_latent), card_of(q_latent.device)
    fp8 = isinstance(latents, Fp8Latents)
    choice = config or latent_config(latent_dim, shape.tile, q_latent.dtype, card, fp8=fp8)
    width = max(16, triton.next_power_of_2(latent_dim))
    columns = slice_of(width, q_latent.dtype, card)
    verify_latents_kernel[(len(work.items),)](
        q_latent, q_rope, *parts, page_table, positions, work.cu_seqlens_q, work.kv_len, work.items, work.counts, work.row_parts,
        out, partials.out, partials.lse, scale * math.log2(math.e), page_table.shape[1], shape.max_q, q_latent.stride(0),
        q_latent.stride(1), q_rope.stride(0), q_rope.stride(1), *strides(parts), HEADS=num_heads, LATENT=latent_dim,
        SLICES=width // columns, SLICE=columns, ROPE=rope_dim, ROPE_DIM=max(16, triton.next_power_of_2(rope_dim)),
        PAGE_SIZE=shape.page_size, WINDOW=shape.window, SINK=shape.sink, TILE=shape.tile, BLOCK=shape.block,
        STAGES=choice.num_stages, KEYS=0 if keys_first(shape.tile, q_latent.dtype, card, fp8=fp8) else 1,
        WIDE=not q_latent.is_cuda and q_latent.dtype == torch.bfloat16, INTERPRETED=not q_latent.is_cuda,
        EARLY=early and args["PDL"], num_warps=choice.num_warps, num_stages=choice.num_stages, **args,
    )
    if work.num_lines:
        merge_states(
            partials.out, partials.lse, work.row_parts, work.cu_seqlens_q, max_q=shape.max_q, out=out, interpret=interpret
        )


def verify_latents_reference(
    q_latent: Tensor, q_rope: Tensor, latents: Tensor | Fp8Latents, page_table: Tensor, positions: Tensor, work: AttentionWork, *,
    scale: float, out: Tensor,
) -> None:
    """The same in plain torch, row by row: every key gathered, softmax over the whole row in fp32."""
    shape, begins, latent_dim = work.shape, work.cu_seqlens_q.tolist(), q_latent.shape[2]
    out.zero_()
    queries = torch.cat((q_latent, q_rope), 2)
    for row, (begin, stop, length) in enumerate(zip(begins, begins[1:], work.kv_len.tolist(), strict=False)):
        if not (length and stop > begin):
            continue
        keys = torch.arange(length, device=out.device)
        page, place = page_table[row, keys // shape.page_size].long(), keys % shape.page_size
        if isinstance(latents, Fp8Latents):
            own = torch.cat(latents.read(page * shape.page_size + place), 1).float()
        else:
            own = latents[page, place].float()
        position = positions[begin:stop, None]
        seen = keys <= position
        if shape.window:
            seen = seen & ((keys > position - shape.window) | (keys < shape.sink))
        scores = torch.einsum("thd,kd->htk", queries[begin:stop].float(), own).mul(scale).masked_fill(~seen, float("-inf"))
        out[begin:stop] = torch.einsum("htk,kd->thd", scores.softmax(2), own[:, :latent_dim]).to(out.dtype)
