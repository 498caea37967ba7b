"""Attention of sequences that see all of themselves, such as the patches of images, packed one after another.

    out[t] = softmax over all k of t's sequence of (scale * q[t] . K[k]) @ V

One program for each tile of queries of a sequence and each head; the tiles of a head run side by side and share its K and V in
the L2 cache. A head is held in two parts, a power of two and the rest (72 = 64 + 8, computed as 64 + 16), so that it is not
padded to the next power. The softmax is online, in base 2. Bound by tensor cores and by exponentials: heads of 64 need one for
every 256 operations. Source: Dao 2023 (FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 128


class Settings(NamedTuple):
    """How the kernel is launched. The usual ones were the fastest of 18 at all five shapes of its benchmark on an H200, 2 to 9 %
    faster than with 4 warps."""

    tile: int = 128
    """Queries of a program."""
    block: int = 64
    """Keys of a step."""
    warps: int = 8
    stages: int = 3


USUAL = Settings()


def parts_of(head_dim: int) -> tuple[int, int]:
    """The powers of two in which a head's values are held: the largest that is not larger, and one for the rest, 0 if none is
    left. Both are at least 16, the least of a tensor core."""
    first = max(16, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - first
    return first, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


def tiles_of(cu_seqlens: Sequence[int], settings: Settings = USUAL) -> list[tuple[int, int, int]]:
    """Of each tile of queries its first one, and where its sequence begins and ends; cu_seqlens as in `attend_within`. Tiles of
    long sequences come first, as they take longest."""
    sequences = sorted(pairwise(cu_seqlens), key=lambda own: own[0] - own[1])
    return [(first, begin, end) for begin, end in sequences for first in range(begin, end, settings.tile)]


@triton.jit
def add_keys(
    query, query_rest, k, v, at, end, peak, mass, acc, acc_rest, scale, stride, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    REST: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):
    """(peak, mass, acc, acc_rest) with the keys at .. at + BLOCK - 1 added. WHOLE: all of them are of the sequence."""
    key = at + tl.arange(0, BLOCK)
    row = key.to(tl.int64)[:, None] * stride
    d = tl.arange(0, DIM)[None, :]
    exists = (key < end)[:, None] & (d < HEAD_DIM)
    if WHOLE:
        exists = tl.broadcast_to(d < HEAD_DIM, [BLOCK, DIM])
    keys, values = tl.load(k + row + d, mask=exists, other=0.0), tl.load(v + row + d, mask=exists, other=0.0)
    if WIDE:
        keys, values = keys.to(tl.float32), values.to(tl.float32)
    s = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if REST > 0:
        rest = DIM + tl.arange(0, REST)[None, :]
        exists_rest = (key < end)[:, None] & (rest < HEAD_DIM)
        if WHOLE:
            exists_rest = tl.broadcast_to(rest < HEAD_DIM, [BLOCK, REST])
        keys_rest = tl.load(k + row + rest, mask=exists_rest, other=0.0)
        values_rest = tl.load(v + row + rest, mask=exists_rest, other=0.0)
        if WIDE:
            keys_rest, values_rest = keys_rest.to(tl.float32), values_rest.to(tl.float32)
        s = tl.dot(query_rest, tl.trans(keys_rest), s, input_precision="ieee")
    if not WHOLE:
        s = tl.where((key < end)[None, :], s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
    shrink = tl.exp2(peak - new_peak)
    p = tl.exp2(s * scale - new_peak[:, None])
    mass = mass * shrink + tl.sum(p, 1)
    weights = p.to(values.dtype)
    acc = tl.dot(weights, values, acc * shrink[:, None], input_precision="ieee")
    if REST > 0:
        acc_rest = tl.dot(weights, values_rest, acc_rest * shrink[:, None], input_precision="ieee")
    return new_peak, mass, acc, acc_rest


@triton.jit
def bidirectional_kernel(
    q, k, v, tiles, out, scale, stride, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):
    """Program (tile, head)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    first, begin, end = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    await_earlier(PDL)
    lane = first + tl.arange(0, TILE)
    inside = (lane < end)[:, None]
    token = lane.to(tl.int64)[:, None]
    d = tl.arange(0, DIM)[None, :]
    rest = DIM + tl.arange(0, max(REST, 1))[None, :]
    at_head = head * HEAD_DIM
    query = tl.load(q + token * stride + at_head + d, mask=inside & (d < HEAD_DIM), other=0.0)
    query_rest = tl.load(q + token * stride + at_head + rest, mask=inside & (rest < HEAD_DIM), other=0.0)
    if WIDE:
        query, query_rest = query.to(tl.float32), query_rest.to(tl.float32)
    peak = tl.full([TILE], -1e30, tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, DIM], tl.float32)
    acc_rest = tl.zeros([TILE, max(REST, 1)], tl.float32)
    whole = begin + (end - begin) // BLOCK * BLOCK
    for at in range(begin, whole, BLOCK):
        peak, mass, acc, acc_rest = add_keys(
            query, query_rest, k + at_head, v + at_head, at, end, peak, mass, acc, acc_rest, scale, stride, HEAD_DIM, DIM, REST,
            BLOCK, True, WIDE,
        )
    if whole < end:
        peak, mass, acc, acc_rest = add_keys(
            query, query_rest, k + at_head, v + at_head, whole, end, peak, mass, acc, acc_rest, scale, stride, HEAD_DIM, DIM,
            REST, BLOCK, False, WIDE,
        )
    place = token * (HEADS * HEAD_DIM) + at_head
    tl.store(out + place + d, (acc / mass[:, None]).to(out.dtype.element_ty), mask=inside & (d < HEAD_DIM))
    if REST > 0:
        tl.store(out + place + rest, (acc_rest / mass[:, None]).to(out.dtype.element_ty), mask=inside & (rest < HEAD_DIM))


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, *, scale: float, out: Tensor, settings: Settings = USUAL,
    interpret: bool = False,
) -> None:
    """Attention of N tokens within their sequences, for one layer.

    q, k, v  bf16 or fp16 [N, NH, D], D at most 128  slices of one tensor, or other ones with equal strides; heads contiguous
    tiles    int32 [tiles, 3] `tiles_of` the sequences' bounds, for these settings
    out      [N, NH, D] of q's dtype, contiguous

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, num_heads, head_dim = q.shape
    if head_dim > MAX_HEAD_DIM or not q.stride() == k.stride() == v.stride() or q.stride(1) != head_dim:
        raise ValueError(
            f"bidirectional_attention: q, k, v have strides {q.stride()}, {k.stride()}, {v.stride()} and heads of {head_dim}; "
            f"must be equal, with heads side by side, of at most {MAX_HEAD_DIM} values"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check(f"bidirectional_attention: {name}", tensor, (num_tokens, num_heads, head_dim), *DTYPES, rows=True)
    check("bidirectional_attention: tiles", tiles, (len(tiles), 3), torch.int32)
    check("bidirectional_attention: out", out, (num_tokens, num_heads, head_dim), q.dtype)
    if not (q.is_cuda or interpret):
        bidirectional_attention_reference(q, k, v, tiles, scale=scale, out=out)
    elif num_tokens:
        dim, rest = parts_of(head_dim)
        bidirectional_kernel[(len(tiles), num_heads)](
            q, k, v, tiles, out, scale * math.log2(math.e), q.stride(0), HEADS=num_heads, HEAD_DIM=head_dim, DIM=dim, REST=rest,
            TILE=settings.tile, BLOCK=settings.block, WIDE=not q.is_cuda, num_warps=settings.warps, num_stages=settings.stages,
            **launch_args(q),
        )


def bidirectional_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, *, scale: float, out: Tensor
) -> None:
    """The same in plain torch, sequence by sequence, in fp32."""
    for begin, end in sorted({(begin, end) for _, begin, end in tiles.tolist()}):
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k[begin:end].float()).mul(scale)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[begin:end].float()).to(out.dtype)
