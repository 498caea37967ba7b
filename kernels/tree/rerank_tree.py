"""Keep the N best of the C nodes expanded in a row's tree, in one launch: their tokens, and their parents by new node ids.

    kept = the N of the highest scores, of equal ones the lowest ids      new id = 1 + number of kept nodes before it
    parent = new id of the old parent, 0 below the root

A node has a higher id than its parent and no higher score, so the parent of a kept node is always kept.
One program a row counts for each node how many are better. Bound by launch latency: C^2 comparisons, a quarter of a million for
the largest useful trees (C = 510).
Source: the reranking phase of Li et al. 2024, EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

OTHERS = 16
"""Number of other nodes that a node is compared with at once."""


@triton.jit
def rerank_tree_kernel(
    scores, ids, parents, out_ids, out_parents, scratch, ids_stride, parents_stride,
    NUM_NODES: tl.constexpr, NUM_KEPT: tl.constexpr, LANES: tl.constexpr, OTHERS: tl.constexpr, PDL: tl.constexpr,
):
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    exists = lane < NUM_NODES
    own = tl.load(scores + row * NUM_NODES + lane, mask=exists, other=float("-inf"))
    better = tl.zeros([LANES], tl.int32)
    for first in range(0, NUM_NODES, OTHERS):
        other = first + tl.arange(0, OTHERS)
        score = tl.load(scores + row * NUM_NODES + other, mask=other < NUM_NODES, other=float("-inf"))
        is_better = (score[None, :] > own[:, None]) | ((score[None, :] == own[:, None]) & (other[None, :] < lane[:, None]))
        better += tl.sum((is_better & (other < NUM_NODES)[None, :]).to(tl.int32), 1)
    kept = exists & (better < NUM_KEPT)
    new_id = tl.cumsum(kept.to(tl.int32), 0)
    tl.store(scratch + row * NUM_NODES + lane, new_id, mask=exists)
    tl.debug_barrier()  # `scratch`, stored by other threads of the program, is read below
    parent = tl.load(parents + row * NUM_NODES + lane, mask=kept, other=-1)
    parent = tl.load(scratch + row * NUM_NODES + parent, mask=kept & (parent >= 0), other=0)
    token = tl.load(ids + row * NUM_NODES + lane, mask=kept, other=0)
    tl.store(out_ids + row * ids_stride + new_id - 1, token, mask=kept)
    tl.store(out_parents + row * parents_stride + new_id, parent, mask=kept)


def rerank_tree(
    scores: Tensor, ids: Tensor, parents: Tensor, *, out_ids: Tensor, out_parents: Tensor, interpret: bool = False
) -> None:
    """Keep N nodes of each of R rows' trees, in the order of their ids.

    scores       fp32 or fp64 [R, C]  no NaN; none higher than its parent's
    ids          int32 [R, C]         tokens
    parents      int32 [R, C]         node id 0..C-1 of the parent, lower than the node's own; -1: the root
    out_ids      int32 [R, N]         N <= C; rows of out_ids and out_parents may be slices of wider ones
    out_parents  int32 [R, N+1]       from column 1 on the parent of each kept node: 1..N, or 0 for the root; column 0 stays

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, num_nodes), kept = scores.shape, out_ids.shape[1]
    check("rerank_tree: scores", scores, (num_rows, num_nodes), torch.float32, torch.float64)
    check("rerank_tree: ids", ids, (num_rows, num_nodes), torch.int32)
    check("rerank_tree: parents", parents, (num_rows, num_nodes), torch.int32)
    check("rerank_tree: out_ids", out_ids, (num_rows, kept), torch.int32, rows=True)
    check("rerank_tree: out_parents", out_parents, (num_rows, kept + 1), torch.int32, rows=True)
    if kept > num_nodes:
        raise ValueError(f"rerank_tree: {kept} nodes to keep of {num_nodes}; at most all expanded nodes can be kept")
    if not (scores.is_cuda or interpret):
        rerank_tree_reference(scores, ids, parents, out_ids=out_ids, out_parents=out_parents)
    elif num_rows:
        rerank_tree_kernel[(num_rows,)](
            scores, ids, parents, out_ids, out_parents, torch.empty_like(ids), out_ids.stride(0), out_parents.stride(0),
            NUM_NODES=num_nodes, NUM_KEPT=kept, LANES=triton.next_power_of_2(max(2, num_nodes)), OTHERS=OTHERS, num_warps=8,
            **launch_args(scores),
        )


def rerank_tree_reference(scores: Tensor, ids: Tensor, parents: Tensor, *, out_ids: Tensor, out_parents: Tensor) -> None:
    """The same in plain torch."""
    num_rows, kept = out_ids.shape
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
    new_id = torch.zeros(num_rows, scores.shape[1] + 1, dtype=torch.int32, device=scores.device)
    new_id.scatter_(1, chosen + 1, torch.arange(1, kept + 1, dtype=torch.int32, device=scores.device).expand(num_rows, -1))
    out_ids.copy_(ids.gather(1, chosen))
    out_parents[:, 1:] = new_id.gather(1, parents.gather(1, chosen).long() + 1)
