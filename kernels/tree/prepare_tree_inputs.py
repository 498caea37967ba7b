"""Inputs of a pass over draft trees, in one launch: positions by depth, slot_mapping by node, and the tree mask.

    depth[0] = 0, depth[i] = depth[parent[i]] + 1      position = num_tokens - 1 + depth      slot: that of num_tokens - 1 + i
    ancestors[i] = bit i and the bits of its ancestors       kv_len = num_tokens - 1 + S, the keys of the last node

Nodes are stored in the order of their ids after the row's committed K/V, and a parent has a lower id than its children.
One program a row; dead rows get position 0, the scratch slot 0, only their own bit and no keys. Bound by launch latency: some
hundred bytes a row.
Source: the tree masks of Li et al. 2024, EAGLE-2 (arXiv 2406.16858), as bits of ancestors instead of a matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.kv_cache.slot_mapping import slot_of, slot_of_reference

MAX_NODES = 64
"""Maximum number of nodes in a row's tree, including the root: the tree mask has 64 bits."""


@triton.jit(do_not_specialize=["max_pages"])
def prepare_tree_inputs_kernel(
    parents, num_tokens, live, page_table, out_positions, out_slot_mapping, out_ancestors, out_kv_len, parents_stride, max_pages,
    NODES: tl.constexpr, DEPTH: tl.constexpr, PAGE_SIZE: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    alive = tl.load(live + row) != 0
    num = tl.load(num_tokens + row)
    lane = tl.arange(0, LANES)
    exists = lane < NODES
    one = tl.full([LANES], 1, tl.int64)
    mask = one << lane.to(tl.int64)
    parent = tl.load(parents + row * parents_stride + lane, mask=exists, other=-1)
    depth = tl.zeros([LANES], tl.int32)
    for _ in range(DEPTH):
        has_parent = parent >= 0
        mask = tl.where(has_parent, mask | (one << tl.maximum(parent, 0).to(tl.int64)), mask)
        depth += has_parent.to(tl.int32)
        parent = tl.load(parents + row * parents_stride + parent, mask=has_parent & exists, other=-1)
    start = tl.where(alive, num - 1, 0)
    index = row * NODES + lane
    inside = lane < tl.where(alive, NODES, 0)
    slot = slot_of(page_table, row, (start + lane).to(tl.int64), inside, max_pages, PAGE_SIZE)
    tl.store(out_positions + index, tl.where(inside, start + depth, 0).to(tl.int64), mask=exists)
    tl.store(out_slot_mapping + index, slot, mask=exists)
    tl.store(out_ancestors + index, tl.where(inside, mask, one << lane.to(tl.int64)), mask=exists)
    tl.store(out_kv_len + row, tl.where(alive, tl.minimum(num - 1 + NODES, max_pages * PAGE_SIZE), 0))


def prepare_tree_inputs(
    parents: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    max_depth: int,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_ancestors: Tensor,
    out_kv_len: Tensor,
    interpret: bool = False,
) -> None:
    """Write positions, slot_mapping and tree masks of the S <= 64 nodes of each of R rows, dead rows included.

    parents        int32 [R, S]     parent of each node, a lower id; -1: none. May be one row expanded to all
    num_tokens     int32 [R]        committed tokens; the newest one is node 0 and not in K/V yet
    live           int32 [R]
    page_table     int32 [R, max pages a row]
    max_depth      maximum depth of a node
    out_positions  int64 [R * S]
    out_slot_mapping  int64 [R * S]  0 for dead rows and for nodes past the page table
    out_ancestors  int64 [R * S]    bit j: node j is the node itself or one of its ancestors
    out_kv_len     int32 [R]        keys up to the last node, at most as many as the page table holds; 0 for dead rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, num_nodes = parents.shape
    if num_nodes > MAX_NODES:
        raise ValueError(f"prepare_tree_inputs: parents has {num_nodes} columns; at most {MAX_NODES} nodes a row are supported")
    check("prepare_tree_inputs: parents", parents, (num_rows, num_nodes), torch.int32, rows=True)
    for name, vector in (("num_tokens", num_tokens), ("live", live), ("out_kv_len", out_kv_len)):
        check(f"prepare_tree_inputs: {name}", vector, (num_rows,), torch.int32)
    check("prepare_tree_inputs: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    for name, vector in (
        ("out_positions", out_positions),
        ("out_slot_mapping", out_slot_mapping),
        ("out_ancestors", out_ancestors),
    ):
        check(f"prepare_tree_inputs: {name}", vector, (num_rows * num_nodes,), torch.int64)
    if not (parents.is_cuda or interpret):
        prepare_tree_inputs_reference(
            parents, num_tokens, live, page_table, page_size=page_size, max_depth=max_depth, out_positions=out_positions,
            out_slot_mapping=out_slot_mapping, out_ancestors=out_ancestors, out_kv_len=out_kv_len,
        )
    elif num_rows:
        prepare_tree_inputs_kernel[(num_rows,)](
            parents, num_tokens, live, page_table, out_positions, out_slot_mapping, out_ancestors, out_kv_len, parents.stride(0),
            page_table.shape[1], NODES=num_nodes, DEPTH=max_depth, PAGE_SIZE=page_size,
            LANES=triton.next_power_of_2(max(2, num_nodes)), num_warps=2, **launch_args(parents),
        )


def prepare_tree_inputs_reference(
    parents: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    max_depth: int,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_ancestors: Tensor,
    out_kv_len: Tensor,
) -> None:
    """The same in plain torch."""
    num_rows, num_nodes = parents.shape
    alive = (live != 0)[:, None]
    node = torch.arange(num_nodes, device=parents.device)
    own = torch.ones_like(node) << node
    masks, depth, ancestor = own.repeat(num_rows, 1), torch.zeros_like(parents), parents.long()
    for _ in range(max_depth):
        has_parent = ancestor >= 0
        masks |= torch.where(has_parent, own[ancestor.clamp(min=0)], 0)
        depth += has_parent
        ancestor = torch.where(has_parent, parents.gather(1, ancestor.clamp(min=0)).long(), ancestor)
    start = ((num_tokens - 1) * (live != 0))[:, None].long()
    rows = torch.arange(num_rows, device=parents.device)[:, None]
    out_positions.copy_(((start + depth) * alive).flatten())
    out_slot_mapping.copy_(slot_of_reference(page_table, rows, start + node, alive, page_size).flatten())
    out_ancestors.copy_(torch.where(alive, masks, own).flatten())
    out_kv_len.copy_((num_tokens - 1 + num_nodes).clamp(max=page_table.shape[1] * page_size) * (live != 0))
