"""Expand one level of the rows' draft trees, in one launch: scores of all children, and the best of them, which branch next.

    score[p, b] = score[p] + (best[p, b] - norm[p])
    next        = the B best children, the first of equal ones: tokens, scores, ancestors, and the index of the parent

p is the parent node, b the branch; `best` are the logits of the B likeliest draft tokens after each parent, `norm` is their
normaliser (log-sum-exp). NaN counts as -inf. If rounding makes a probability greater than 1 it is set to 1, so that no child
scores higher than its parent.
One program a row: B rounds of a maximum over its children. Bound by launch latency: some kilobytes a row.
Source: the expansion phase of Li et al. 2024, EAGLE-2 (arXiv 2406.16858), by sums of log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """The nodes of a level that branch, P in each of R rows: first the root alone, later the B best nodes of the level.

    scores        [R, P] scores of the paths from the root
    node_ids      int32 [R, P] index among all expanded nodes of the row; -1: the root
    ancestors     int64 [R, P] bit j: the j-th branching node of the row is the node itself or one of its ancestors
    token_ids     int32 [R * P] target ids
    parent_index  int64 [R * P] flat index r * P' + p' of the parent in the frontier of the level before
    """

    scores: Tensor
    node_ids: Tensor
    ancestors: Tensor
    token_ids: Tensor
    parent_index: Tensor


@triton.jit(do_not_specialize=["first_node_id", "first_bit"])
def expand_tree_kernel(
    best, norm, ids, map_ids, scores, node_ids, ancestors, all_scores, all_ids, all_parents,
    out_scores, out_node_ids, out_ancestors, out_token_ids, out_parent_index, num_nodes, first_node_id, first_bit,
    PARENTS: tl.constexpr, BRANCHES: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    exists = lane < PARENTS * BRANCHES
    parent = row * PARENTS + lane // BRANCHES
    child = row * (PARENTS * BRANCHES) + lane
    likely = tl.load(best + child, mask=exists, other=0.0) - tl.load(norm + parent, mask=exists, other=0.0)
    likely = tl.where(likely == likely, tl.minimum(likely, 0.0), float("-inf"))
    path = tl.load(scores + parent, mask=exists, other=0.0)
    score = path + likely
    score = tl.where(score == score, score, float("-inf"))  # -inf - -inf is NaN
    token = tl.load(ids + child, mask=exists, other=0)
    if map_ids is not None:
        token = tl.load(map_ids + token, mask=exists, other=0)
    token = token.to(tl.int32)
    parent_id = tl.load(node_ids + parent, mask=exists, other=0)
    column = row * num_nodes + first_node_id + lane
    tl.store(all_scores + column, score, mask=exists)
    tl.store(all_ids + column, token, mask=exists)
    tl.store(all_parents + column, parent_id, mask=exists)
    if out_scores is not None:
        mask = tl.load(ancestors + parent, mask=exists, other=0)
        left = exists
        for i in range(BRANCHES):
            top = tl.max(tl.where(left, score, float("-inf")), 0)
            winner = tl.min(tl.where(left & (score == top), lane, LANES), 0)
            here = lane == winner
            out_index = row * BRANCHES + i
            tl.store(out_scores + out_index, top)
            tl.store(out_node_ids + out_index, first_node_id + winner)
            tl.store(out_token_ids + out_index, tl.sum(tl.where(here, token, 0), 0))
            tl.store(out_parent_index + out_index, row * PARENTS + winner // BRANCHES)
            bit = tl.full([], 1, tl.int64) << (first_bit + i).to(tl.int64)
            tl.store(out_ancestors + out_index, tl.sum(tl.where(here, mask, 0), 0) | bit)
            left = left & (lane != winner)


def expand_tree(
    best: Tensor,
    norm: Tensor,
    ids: Tensor,
    map_ids: Tensor | None,
    frontier: Frontier,
    *,
    first_node_id: int,
    first_bit: int | None,
    all_scores: Tensor,
    all_ids: Tensor,
    all_parents: Tensor,
    interpret: bool = False,
) -> Frontier | None:
    """Write the children of P nodes in each of R rows, B each; returns the B best of them, or None without `first_bit`.

    best          fp32 or fp64 [R * P, B]  logits, falling
    norm          [R * P] of the same dtype  log of the sum of their exponentials over the draft vocabulary
    ids           int64 [R * P, B]  draft ids
    map_ids       int32 or int64 [draft vocabulary]  their target ids, or None: they are target ids
    frontier      the P parents; its scores have the dtype of best
    first_node_id  node id of the first child: the number of nodes expanded before
    first_bit     bit of the first node that branches next; None at the last level, where none does
    all_scores    [R, C] of best's dtype, all_ids int32 [R, C] target ids, all_parents int32 [R, C] node ids of the parents:
                  columns first_node_id .. first_node_id + P * B - 1 are written

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, parents), branches, num_nodes = frontier.scores.shape, best.shape[1], all_scores.shape[1]
    frontier_shape = (num_rows * parents,)
    check("expand_tree: best", best, (*frontier_shape, branches), torch.float32, torch.float64)
    check("expand_tree: norm", norm, frontier_shape, best.dtype)
    check("expand_tree: ids", ids, (*frontier_shape, branches), torch.int64)
    check("expand_tree: frontier.scores", frontier.scores, (num_rows, parents), best.dtype)
    check("expand_tree: frontier.node_ids", frontier.node_ids, (num_rows, parents), torch.int32)
    check("expand_tree: frontier.ancestors", frontier.ancestors, (num_rows, parents), torch.int64)
    for name, tensor, dtype in (
        ("all_scores", all_scores, best.dtype), ("all_ids", all_ids, torch.int32), ("all_parents", all_parents, torch.int32)
    ):
        check(f"expand_tree: {name}", tensor, (num_rows, num_nodes), dtype)
    if map_ids is not None:
        check("expand_tree: map_ids", map_ids, (map_ids.numel(),), torch.int32, torch.int64)
    if first_node_id + parents * branches > num_nodes:
        raise ValueError(f"expand_tree: {parents * branches} children from node id {first_node_id} on, but {num_nodes} columns")
    if first_bit is not None and first_bit + branches > 64:
        raise ValueError(f"expand_tree: bits {first_bit} .. {first_bit + branches - 1} exceed the 64 bits of a mask")
    if not (best.is_cuda or interpret):
        return expand_tree_reference(
            best, norm, ids, map_ids, frontier, first_node_id=first_node_id, first_bit=first_bit,
            all_scores=all_scores, all_ids=all_ids, all_parents=all_parents,
        )
    out = None if first_bit is None else _empty(num_rows, branches, best)
    if num_rows:
        written = (None,) * 5 if out is None else (out.scores, out.node_ids, out.ancestors, out.token_ids, out.parent_index)
        expand_tree_kernel[(num_rows,)](
            best, norm, ids, map_ids, frontier.scores, frontier.node_ids, frontier.ancestors, all_scores, all_ids, all_parents,
            *written, num_nodes, first_node_id, first_bit or 0, PARENTS=parents, BRANCHES=branches,
            LANES=triton.next_power_of_2(max(2, parents * branches)), num_warps=4 if parents * branches > 64 else 1,
            **launch_args(best),
        )
    return out


def _empty(num_rows: int, branches: int, like: Tensor) -> Frontier:
    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=like.device)

    return Frontier(
        empty(num_rows, branches, dtype=like.dtype),
        empty(num_rows, branches, dtype=torch.int32),
        empty(num_rows, branches, dtype=torch.int64),
        empty(num_rows * branches, dtype=torch.int32),
        empty(num_rows * branches, dtype=torch.int64),
    )


def expand_tree_reference(
    best: Tensor,
    norm: Tensor,
    ids: Tensor,
    map_ids: Tensor | None,
    frontier: Frontier,
    *,
    first_node_id: int,
    first_bit: int | None,
    all_scores: Tensor,
    all_ids: Tensor,
    all_parents: Tensor,
) -> Frontier | None:
    """The same in plain torch."""
    (num_rows, parents), branches = frontier.scores.shape, best.shape[1]
    likely = (best - norm.unsqueeze(1)).view(num_rows, parents, branches)
    likely = torch.where(likely.isnan(), -torch.inf, likely.clamp(max=0))
    paths = frontier.scores.unsqueeze(2) + likely
    paths = torch.where(paths.isnan(), -torch.inf, paths).flatten(1)
    tokens = (ids if map_ids is None else map_ids[ids]).view(num_rows, -1).int()
    columns = slice(first_node_id, first_node_id + parents * branches)
    all_scores[:, columns], all_ids[:, columns] = paths, tokens
    all_parents[:, columns] = frontier.node_ids.repeat_interleave(branches, 1)
    if first_bit is None:
        return None
    chosen = paths.sort(dim=1, descending=True, stable=True).indices[:, :branches]
    parent = chosen // branches
    own = torch.ones_like(chosen) << (first_bit + torch.arange(branches, device=best.device))
    parent_index = torch.arange(num_rows, device=best.device).unsqueeze(1) * parents + parent
    return Frontier(
        paths.gather(1, chosen), (first_node_id + chosen).int(), frontier.ancestors.gather(1, parent) | own,
        tokens.gather(1, chosen).flatten(), parent_index.flatten(),
    )
