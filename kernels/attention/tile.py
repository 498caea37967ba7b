"""A tile of verify attention: the (query, head) pairs of its lines, and the writes of their results."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def zero_tokens(out, begin, finish, head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TILE: tl.constexpr,
                HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Write zeros for flat tokens begin .. finish - 1."""
    d = tl.arange(0, DIM)
    for lane in range(begin * HEADS, finish * HEADS, TILE):
        lanes = lane + tl.arange(0, TILE)
        line = (lanes // HEADS).to(tl.int64) * (KV_HEADS * HEADS) + head * HEADS + lanes % HEADS
        inside = (lanes < finish * HEADS)[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(out + line[:, None] * HEAD_DIM + d[None, :], tl.zeros([TILE, DIM], out.dtype.element_ty), mask=inside)


@triton.jit
def lanes_of(tile, unit, begin, count, cu_seqlens_q, kv_len, row_order, max_q, HEADS: tl.constexpr, TILE: tl.constexpr,
             GROUPED: tl.constexpr):
    """For each line of a tile: its (query, head) pair, its row, the row's first flat token and number of pairs, and whether it
    exists."""
    lane = tile * TILE + tl.arange(0, TILE)
    if GROUPED:
        member = begin + lane // (max_q * HEADS)
        lane = lane % (max_q * HEADS)
        inside = member < begin + count
        row = tl.load(row_order + member, mask=inside, other=0)
        inside = inside & (tl.load(kv_len + row, mask=inside, other=0) > 0)
        begin = tl.load(cu_seqlens_q + row)
        num_lanes = (tl.load(cu_seqlens_q + row + 1) - begin) * HEADS
    else:
        row = unit
        inside = lane >= 0
        num_lanes = count * HEADS
    return lane, row, begin, num_lanes, inside & (lane < num_lanes)


@triton.jit
def sink_share(sink_logits, q_head, exists, lse):
    """The share of the softmax that is not the sink's: 1 / (1 + e^sink / 2^lse), for the sink of each line's head."""
    sink = tl.load(sink_logits + q_head, mask=exists, other=float("-inf")) * 1.4426950408889634
    return 1.0 / (1.0 + tl.exp2(sink - lse))


@triton.jit
def write_lines(
    out, part_out, part_lse, row_parts, sink_logits, peak, mass, acc, part, token, q_head, lane, row, num_lanes, head, d,
    inside, within,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    """Finish the softmax of a tile and write it: to `out` if the item is a whole row (part < 0), else as a partial result,
    which has no sinks."""
    mass = tl.maximum(mass, 1e-30)
    acc = acc / mass[:, None]
    if part < 0:
        if sink_logits is not None:
            acc = acc * sink_share(sink_logits, q_head, inside, peak + tl.log2(mass))[:, None]
        place = token * (KV_HEADS * HEADS) + q_head
        tl.store(out + place[:, None] * HEAD_DIM + d[None, :], acc.to(out.dtype.element_ty), mask=within)
    else:
        line = tl.load(row_parts + 2 * row) + part * num_lanes + lane
        place = line.to(tl.int64) * KV_HEADS + head
        tl.store(part_out + place[:, None] * HEAD_DIM + d[None, :], acc, mask=within)
        tl.store(part_lse + place, peak + tl.log2(mass), mask=inside)
