"""Merge partial results of attention over disjoint sets of keys by log-sum-exp:

    out = sum over parts of 2**(lse[part] - peak) * part_out[part] / sum over parts of 2**(lse[part] - peak),   peak = max lse

with lse = log2 of a part's softmax denominator; times `sink_share` of the whole if heads have sinks.
Line row_parts[r, 0] + part * n + i is (query, head) pair i of row r's n pairs.
Bound by launch latency and by reading the partial results, most of which are still in the L2 cache.
Source: Dao et al. 2023 ("Flash-Decoding for long-context inference"), the second kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.attention.tile import sink_share
from batchspec.kernels.attention.work_list import AttentionWork
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

LINES, PARTS = 4, 4
"""Lines of a program, half as many with heads of more than 256 values, and parts that it reads at once. They fit into the
registers of one warp, so that no sum crosses warps."""


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """Buffers for the partial results of split rows; all layers of a batch share them."""

    out: Tensor
    """fp32 [lines, KVH, D]"""
    lse: Tensor
    """fp32 [lines, KVH] log2 of the softmax denominator"""


def partials_of(work: AttentionWork, head_dim: int) -> Partials:
    """Buffers for all partial results of this work list."""
    size = (max(1, work.num_lines), work.shape.kv_heads)
    out = torch.empty(*size, head_dim, dtype=torch.float32, device=work.kv_len.device)
    return Partials(out, torch.empty(size, dtype=torch.float32, device=work.kv_len.device))


@triton.jit
def merge_states_kernel(
    part_out, part_lse, row_parts, cu_seqlens_q, sink_logits, out, KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):
    """Program (row, tile of LINES pairs, K/V head); the loads of PARTS * AHEAD parts are in flight at once."""
    await_earlier(PDL)
    head = tl.program_id(0) % KV_HEADS
    row = tl.program_id(0) // KV_HEADS // TILES
    first = tl.load(row_parts + 2 * row)  # all four loads are issued before one is used: one latency
    parts = tl.load(row_parts + 2 * row + 1)
    begin = tl.load(cu_seqlens_q + row)
    num_lanes = (tl.load(cu_seqlens_q + row + 1) - begin) * HEADS
    if parts == 0:
        return
    lane = tl.program_id(0) // KV_HEADS % TILES * LINES + tl.arange(0, LINES)
    d = tl.arange(0, DIM)
    within = (lane < num_lanes)[:, None] & (d < HEAD_DIM)[None, :]
    peak = tl.full([LINES], -1e30, tl.float32)
    mass = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, DIM], tl.float32)
    for at in tl.range(0, parts, PARTS, loop_unroll_factor=AHEAD):
        part = at + tl.arange(0, PARTS)
        line = (first + part[:, None] * num_lanes + lane[None, :]).to(tl.int64) * KV_HEADS + head
        exists = (part < parts)[:, None] & (lane < num_lanes)[None, :]
        lse = tl.load(part_lse + line, mask=exists, other=float("-inf"))
        values = tl.load(
            part_out + line[:, :, None] * HEAD_DIM + d[None, None, :], mask=exists[:, :, None] & (d < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weight = tl.exp2(lse - new_peak[None, :])
        shrink = tl.exp2(peak - new_peak)
        mass = mass * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], 0)
        peak = new_peak
    mass = tl.maximum(mass, 1e-30)
    acc = acc / mass[:, None]
    q_head = head * HEADS + lane % HEADS
    if sink_logits is not None:
        acc = acc * sink_share(sink_logits, q_head, lane < num_lanes, peak + tl.log2(mass))[:, None]
    target = (begin + lane // HEADS).to(tl.int64) * (KV_HEADS * HEADS) + q_head
    tl.store(out + target[:, None] * HEAD_DIM + d[None, :], acc.to(out.dtype.element_ty), mask=within)


def merge_states(
    part_out: Tensor,
    part_lse: Tensor,
    row_parts: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_q: int,
    out: Tensor,
    sink_logits: Tensor | None = None,
    in_order: bool = False,
    interpret: bool = False,
) -> None:
    """Write the output of every row that was computed in parts; other rows of `out` stay unchanged.

    part_out   fp32 [lines, KVH, D]
    part_lse   fp32 [lines, KVH]  log2; for a part without keys a large negative number, never -inf
    row_parts  int32 [R, 2]       first line of the row, number of parts (0: not in parts)
    cu_seqlens_q  int32 [R+1]     row r's flat tokens in `out`
    max_q      maximum number of flat tokens of a row
    sink_logits  fp32 [NH] or None: joins the denominator of each softmax once (`verify_attention`)
    in_order   add one part after another, as `ordered_prefill.py` does: further parts without keys change no bit
    out        fp32, bf16 or fp16 [T, NH, D]  NH a multiple of KVH: a row has NH / KVH pairs for each flat token and K/V head

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_lines, kv_heads, head_dim), num_rows = part_out.shape, row_parts.shape[0]
    heads = out.shape[1] // kv_heads
    check("merge_states: part_out", part_out, (num_lines, kv_heads, head_dim), torch.float32)
    check("merge_states: part_lse", part_lse, (num_lines, kv_heads), torch.float32)
    check("merge_states: row_parts", row_parts, (num_rows, 2), torch.int32)
    check("merge_states: cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), torch.int32)
    check("merge_states: out", out, (out.shape[0], heads * kv_heads, head_dim), torch.float32, torch.bfloat16, torch.float16)
    if sink_logits is not None:
        check("merge_states: sink_logits", sink_logits, (out.shape[1],), torch.float32)
    if not (out.is_cuda or interpret):
        merge_states_reference(part_out, part_lse, row_parts, cu_seqlens_q, out=out, sink_logits=sink_logits)
    elif num_rows:
        lines = LINES if head_dim <= 256 else LINES // 2
        tiles = triton.cdiv(max_q * heads, lines)
        merge_states_kernel[(num_rows * tiles * kv_heads,)](
            part_out, part_lse, row_parts, cu_seqlens_q, sink_logits, out, KV_HEADS=kv_heads, HEADS=heads, HEAD_DIM=head_dim,
            DIM=max(16, triton.next_power_of_2(head_dim)), TILES=tiles, LINES=lines, PARTS=1 if in_order else PARTS,
            AHEAD=PARTS if in_order else 1, num_warps=1, enable_fp_fusion=not in_order, **launch_args(out),
        )


def merge_states_reference(
    part_out: Tensor, part_lse: Tensor, row_parts: Tensor, cu_seqlens_q: Tensor, *, out: Tensor, sink_logits: Tensor | None = None
) -> None:
    """The same in plain torch."""
    begins, (kv_heads, head_dim) = cu_seqlens_q.tolist(), part_out.shape[1:]
    for (first, parts), begin, stop in zip(row_parts.tolist(), begins, begins[1:], strict=False):
        lines = slice(first, first + parts * (stop - begin) * (out.shape[1] // kv_heads))
        if parts and stop > begin:
            lse = part_lse[lines].view(parts, -1, kv_heads, 1).mul(0.6931471805599453)
            merged = (part_out[lines].view(parts, -1, kv_heads, head_dim) * lse.softmax(0)).sum(0)
            merged, lse = (
                x.view(stop - begin, -1, kv_heads, x.shape[-1]).transpose(1, 2).flatten(1, 2) for x in (merged, lse.logsumexp(0))
            )
            if sink_logits is not None:
                merged = merged * torch.sigmoid(lse - sink_logits[:, None])
            out[begin:stop] = merged.to(out.dtype)
