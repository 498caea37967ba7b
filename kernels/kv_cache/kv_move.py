"""Move the K/V of a draft tree's accepted path to the slots that a chain would use, in all layers by one launch.

    kv[l, 0 | 1, chain_slots[r, d]] = kv[l, 0 | 1, tree_slots[r, path[r, d]]],   d = 1..accepted_len[r]

A node's id is at least its depth, and ids increase along a path, so a written slot is never the source of a deeper level. A
program still reads all of its levels before it writes one, because its threads do not run in lockstep.
Bound by launch latency at few rows, else by memory (bytes read + written: 4 * sum(accepted) * L * KVH * D * itemsize).
Source: the moves of accepted tokens in https://github.com/sgl-project/sglang (spec_utils).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.e4m3 import E4M3, movable
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.rounds.move_rows import WORDS

VALUES = 2048
"""Number of values that a program moves."""


@triton.jit
def kv_move_kernel(
    kv, tree_slots, path, chain_slots, accepted_len, stride_part, NODES: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    accepted = tl.load(accepted_len + row)
    if accepted > 0:
        level = tl.arange(0, LEVELS)
        moves = (level > 0) & (level <= accepted)
        node = tl.load(path + row * (DEPTH + 1) + level, mask=moves, other=0)
        source = tl.load(tree_slots + row * NODES + node, mask=moves, other=0)
        target = tl.load(chain_slots + row * (DEPTH + 1) + level, mask=moves, other=0)
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = (moves & (source != target))[:, None] & (column < WIDTH)[None, :]
        part = kv + tl.program_id(1).to(tl.int64) * stride_part
        values = tl.load(part + source[:, None] * WIDTH + column[None, :], mask=inside)
        tl.debug_barrier()
        tl.store(part + target[:, None] * WIDTH + column[None, :], values, mask=inside)


def kv_move(
    kv: Tensor, tree_slots: Tensor, path: Tensor, chain_slots: Tensor, accepted_len: Tensor, *, interpret: bool = False
) -> None:
    """Move K and V of R rows' accepted nodes, in place; S nodes a row, at most D levels.

    kv            fp32, bf16, fp16, fp64 or e4m3 [L, 2, P, page_size, KVH, D]
    tree_slots    int64 [R * S]      slot of each node
    path          int32 [R, D+1]     node of each level, ascending; node 0 for level 0
    chain_slots   int64 [R * (D+1)]  destination slot of each level: the slots of nodes 0..D
    accepted_len  int32 [R]          number of levels to move, 0..D

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, levels = path.shape
    check("kv_move: kv", kv, tuple(kv.shape), *FLOATS, E4M3)
    check("kv_move: tree_slots", tree_slots, (tree_slots.numel(),), torch.int64)
    check("kv_move: path", path, (num_rows, levels), torch.int32)
    check("kv_move: chain_slots", chain_slots, (num_rows * levels,), torch.int64)
    check("kv_move: accepted_len", accepted_len, (num_rows,), torch.int32)
    if kv.dim() != 6 or kv.shape[1] != 2:
        raise ValueError(f"kv_move: kv is {list(kv.shape)}; must be [layers, 2, pages, page_size, heads, head_dim]")
    if num_rows and tree_slots.numel() % num_rows:
        raise ValueError(f"kv_move: {tree_slots.numel()} tree_slots for {num_rows} rows; every row has as many nodes")
    if not (kv.is_cuda or interpret):
        kv_move_reference(kv, tree_slots, path, chain_slots, accepted_len)
    elif num_rows and kv.numel():
        width, lanes = kv.shape[4] * kv.shape[5], triton.next_power_of_2(levels)
        block = min(triton.next_power_of_2(width), max(32, VALUES // lanes))
        kv_move_kernel[(num_rows, 2 * kv.shape[0], triton.cdiv(width, block))](
            kv.view(WORDS[kv.itemsize]), tree_slots, path, chain_slots, accepted_len, kv.stride(1),
            NODES=tree_slots.numel() // num_rows, DEPTH=levels - 1, WIDTH=width, LEVELS=lanes, BLOCK=block, num_warps=4,
            **launch_args(kv),
        )


def kv_move_reference(kv: Tensor, tree_slots: Tensor, path: Tensor, chain_slots: Tensor, accepted_len: Tensor) -> None:
    """The same in plain torch."""
    num_rows, levels = path.shape
    level = torch.arange(levels, device=kv.device)
    moves = (level > 0) & (level <= accepted_len[:, None])
    source = tree_slots.view(num_rows, -1).gather(1, path.long())[moves]
    flat = movable(kv).flatten(2, 3)
    flat[:, :, chain_slots.view(num_rows, levels)[moves]] = flat[:, :, source]
