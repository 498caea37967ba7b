"""Verify draft trees, in one launch: from the root on, follow the child whose token is the target's own choice at its parent.

    path[0] = 0      path[d] = the child of path[d-1] with ids == target_ids[path[d-1]], as long as there is one

The target chooses at every node, with the noise of its position: the path consists of the target's own draws, whatever was
drafted. After this the round continues like that of a chain: the path's drafts, followed by -1, are written for `accept`.
One program a row. Bound by launch latency: a few dependent loads a level.
Source: the verification of Miao et al. 2023, SpecInfer (arXiv 2305.09781), with shared noise instead of rejection sampling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args


@triton.jit
def find_accepted_path_kernel(
    ids, parents, target_ids, draft_len, out_path, out_flat_ids, out_draft_ids, ids_stride, parents_stride, draft_stride,
    NODES: tl.constexpr, DEPTH: tl.constexpr, TAKE_DEEPEST: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    exists = lane < NODES
    token = tl.load(ids + row * ids_stride + lane, mask=exists, other=-1)
    parent = tl.load(parents + row * parents_stride + lane, mask=exists, other=-1)
    depth = tl.zeros([LANES], tl.int32)
    ancestor = parent
    for _ in range(DEPTH):
        depth += (ancestor >= 0).to(tl.int32)
        ancestor = tl.load(parents + row * parents_stride + ancestor, mask=(ancestor >= 0) & exists, other=-1)
    deepest = tl.max(depth, 0)
    tl.store(draft_len + row, tl.minimum(tl.load(draft_len + row), deepest))

    level = tl.arange(0, LEVELS)
    path = tl.zeros([LEVELS], tl.int32)
    drafts = tl.full([LEVELS], -1, tl.int32)
    if TAKE_DEEPEST:
        node = tl.min(tl.where((depth == deepest) & exists, lane, LANES), 0)
        path = tl.where(level >= deepest, node, path)
        for back in range(DEPTH):
            level_of_node = deepest - back
            if level_of_node > 0:
                path = tl.where(level == level_of_node, node, path)
                drafts = tl.where(level == level_of_node - 1, tl.load(ids + row * ids_stride + node), drafts)
                node = tl.load(parents + row * parents_stride + node)
    else:
        node = tl.program_id(0) * 0
        for d in range(DEPTH):
            target_id = tl.load(target_ids + row * NODES + node)
            child = tl.min(tl.where((parent == node) & (token == target_id) & exists, lane, LANES), 0)
            drafts = tl.where((level == d) & (child < LANES), target_id, drafts)
            node = tl.where(child < LANES, child, node)
            path = tl.where(level > d, node, path)
    tl.store(out_path + row * (DEPTH + 1) + level, path, mask=level <= DEPTH)
    tl.store(out_flat_ids + row * (DEPTH + 1) + level, row * NODES + path, mask=level <= DEPTH)
    tl.store(out_draft_ids + row * draft_stride + level, drafts, mask=level < DEPTH)


def find_accepted_path(
    ids: Tensor,
    parents: Tensor,
    target_ids: Tensor,
    *,
    take_deepest: bool,
    draft_len: Tensor,
    out_path: Tensor,
    out_flat_ids: Tensor,
    out_draft_ids: Tensor,
    interpret: bool = False,
) -> None:
    """Write the accepted path of each of R rows through its tree of S nodes and at most D levels.

    ids            int32 [R, S]    tokens; node 0 is the newest committed one; rows may be slices of wider ones
    parents        int32 [R, S]    parent of each node, a lower id; -1 for node 0
    target_ids     int32 [R * S]   the target's choice after each node
    take_deepest   accept the path to the first of the deepest nodes, whatever the target chose: for simulated acceptance
    draft_len      int32 [R]       in/out: lowered to the depth of the tree
    out_path       int32 [R, D+1]  node of each level; past the path's end its last node is repeated
    out_flat_ids   int64 [R, D+1]  the same nodes as flat tokens r * S + node
    out_draft_ids  int32 [R, D]    tokens of levels 1..D, -1 past the path's end; rows may be slices of wider ones

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, num_nodes), depth = ids.shape, out_path.shape[1] - 1
    check("find_accepted_path: ids", ids, (num_rows, num_nodes), torch.int32, rows=True)
    check("find_accepted_path: parents", parents, (num_rows, num_nodes), torch.int32, rows=True)
    check("find_accepted_path: target_ids", target_ids, (num_rows * num_nodes,), torch.int32)
    check("find_accepted_path: draft_len", draft_len, (num_rows,), torch.int32)
    check("find_accepted_path: out_path", out_path, (num_rows, depth + 1), torch.int32)
    check("find_accepted_path: out_flat_ids", out_flat_ids, (num_rows, depth + 1), torch.int64)
    check("find_accepted_path: out_draft_ids", out_draft_ids, (num_rows, depth), torch.int32, rows=True)
    if not (ids.is_cuda or interpret):
        find_accepted_path_reference(
            ids, parents, target_ids, take_deepest=take_deepest, draft_len=draft_len, out_path=out_path,
            out_flat_ids=out_flat_ids, out_draft_ids=out_draft_ids,
        )
    elif num_rows:
        find_accepted_path_kernel[(num_rows,)](
            ids, parents, target_ids, draft_len, out_path, out_flat_ids, out_draft_ids, ids.stride(0), parents.stride(0),
            out_draft_ids.stride(0), NODES=num_nodes, DEPTH=depth, TAKE_DEEPEST=take_deepest,
            LANES=triton.next_power_of_2(max(2, num_nodes)), LEVELS=triton.next_power_of_2(depth + 1), num_warps=1,
            **launch_args(ids),
        )


def find_accepted_path_reference(
    ids: Tensor,
    parents: Tensor,
    target_ids: Tensor,
    *,
    take_deepest: bool,
    draft_len: Tensor,
    out_path: Tensor,
    out_flat_ids: Tensor,
    out_draft_ids: Tensor,
) -> None:
    """The same in plain torch."""
    (num_rows, num_nodes), max_depth = ids.shape, out_path.shape[1] - 1
    ancestor, depth = parents.long(), torch.zeros_like(parents)
    for _ in range(max_depth):
        depth += ancestor >= 0
        ancestor = torch.where(ancestor >= 0, parents.gather(1, ancestor.clamp(min=0)).long(), ancestor)
    deepest = depth.amax(1)
    torch.minimum(draft_len, deepest, out=draft_len)
    out_draft_ids.fill_(-1)
    if take_deepest:
        node = depth.argmax(1, keepdim=True)  # the first of equally deep nodes
        out_path.copy_(node.expand_as(out_path))
        for level in range(max_depth, 0, -1):
            on_path = deepest[:, None] >= level
            out_path[:, level : level + 1] = node
            out_draft_ids[:, level - 1 : level] = torch.where(on_path, ids.gather(1, node), -1)
            node = torch.where(on_path, parents.gather(1, node).long(), node)
        out_path[:, 0] = 0
    else:
        choices, node_ids = target_ids.view(num_rows, num_nodes), torch.arange(num_nodes, device=ids.device)
        node = torch.zeros(num_rows, 1, dtype=torch.int64, device=ids.device)
        out_path.zero_()
        for level in range(max_depth):
            target_id = choices.gather(1, node)
            child = torch.where((parents == node) & (ids == target_id), node_ids, num_nodes).amin(1, keepdim=True)
            found = child < num_nodes
            out_draft_ids[:, level : level + 1] = torch.where(found, target_id, -1)
            node = torch.where(found, child, node)
            out_path[:, level + 1 : level + 2] = node
    out_flat_ids.copy_(torch.arange(num_rows, device=ids.device)[:, None] * num_nodes + out_path)
