"""Which path of a draft tree stands, in one launch: from the root on, the child that is the target's own choice at its parent.

    path[0] = 0      path[d] = the child of path[d-1] with ids == target_ids[path[d-1]], as long as there is one

The target chooses at every node, with the noise of its position: the path is that of the target's own draws, whatever drafted.
Behind the path the log goes on like that of a chain: the walk writes the path's drafts, -1 behind them, for `accept`.
One program a row. Bound by launch latency: a few loads a level, one after another.
Source: the verification of Miao et al. 2023, SpecInfer (arXiv 2305.09781), with coupled noise in place of rejection.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.attempt import attempt
from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args


@triton.jit
def tree_walk_kernel(
    ids, parents, target_ids, draft_len, out_path, out_places, out_draft_ids, ids_stride, parents_stride, draft_stride,
    NODES: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    exists = lane < NODES
    token = tl.load(ids + row * ids_stride + lane, mask=exists, other=-1)
    parent = tl.load(parents + row * parents_stride + lane, mask=exists, other=-1)
    depth = tl.zeros([LANES], tl.int32)
    above = parent
    for _ in range(DEPTH):
        depth += (above >= 0).to(tl.int32)
        above = tl.load(parents + row * parents_stride + above, mask=(above >= 0) & exists, other=-1)
    deepest = tl.max(depth, 0)
    tl.store(draft_len + row, tl.minimum(tl.load(draft_len + row), deepest))

    level = tl.arange(0, LEVELS)
    path = tl.zeros([LEVELS], tl.int32)
    drafts = tl.full([LEVELS], -1, tl.int32)
    if WHOLE:
        node = tl.min(tl.where((depth == deepest) & exists, lane, LANES), 0)
        path = tl.where(level >= deepest, node, path)
        for back in range(DEPTH):
            at = deepest - back
            if at > 0:
                path = tl.where(level == at, node, path)
                drafts = tl.where(level == at - 1, tl.load(ids + row * ids_stride + node), drafts)
                node = tl.load(parents + row * parents_stride + node)
    else:
        node = tl.program_id(0) * 0
        for d in range(DEPTH):
            wanted = tl.load(target_ids + row * NODES + node)
            child = tl.min(tl.where((parent == node) & (token == wanted) & exists, lane, LANES), 0)
            drafts = tl.where((level == d) & (child < LANES), wanted, drafts)
            node = tl.where(child < LANES, child, node)
            path = tl.where(level > d, node, path)
    tl.store(out_path + row * (DEPTH + 1) + level, path, mask=level <= DEPTH)
    tl.store(out_places + row * (DEPTH + 1) + level, row * NODES + path, mask=level <= DEPTH)
    tl.store(out_draft_ids + row * draft_stride + level, drafts, mask=level < DEPTH)


def tree_walk(
    ids: Tensor,
    parents: Tensor,
    target_ids: Tensor,
    *,
    whole: bool,
    draft_len: Tensor,
    out_path: Tensor,
    out_places: Tensor,
    out_draft_ids: Tensor,
    interpret: bool = False,
) -> None:
    """Write the path of each of R rows through its tree of S nodes and at most D levels.

    ids            int32 [R, S]    tokens; node 0 is the newest committed one; rows may be slices of wider ones
    parents        int32 [R, S]    the node above each, of a lower number; -1 of node 0
    target_ids     int32 [R * S]   the target's choice behind each node
    whole          the path to the first of the deepest nodes, whatever the target says: for made-up acceptance
    draft_len      int32 [R]       in/out: lowered to the depth of the tree
    out_path       int32 [R, D+1]  node of each level, the last one again behind the path's end
    out_places     int64 [R, D+1]  the same as flat places r * S + node
    out_draft_ids  int32 [R, D]    tokens of levels 1..D, -1 behind the path's end; rows may be slices of wider ones

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, num_nodes), depth = ids.shape, out_path.shape[1] - 1
    check("tree_walk: ids", ids, (num_rows, num_nodes), torch.int32, rows=True)
    check("tree_walk: parents", parents, (num_rows, num_nodes), torch.int32, rows=True)
    check("tree_walk: target_ids", target_ids, (num_rows * num_nodes,), torch.int32)
    check("tree_walk: draft_len", draft_len, (num_rows,), torch.int32)
    check("tree_walk: out_path", out_path, (num_rows, depth + 1), torch.int32)
    check("tree_walk: out_places", out_places, (num_rows, depth + 1), torch.int64)
    check("tree_walk: out_draft_ids", out_draft_ids, (num_rows, depth), torch.int32, rows=True)
    if not (ids.is_cuda or interpret):
        tree_walk_reference(
            ids, parents, target_ids, whole=whole, draft_len=draft_len, out_path=out_path, out_places=out_places,
            out_draft_ids=out_draft_ids,
        )  # fmt: skip
    elif num_rows:
        tree_walk_kernel[(num_rows,)](
            ids, parents, target_ids, draft_len, out_path, out_places, out_draft_ids, ids.stride(0), parents.stride(0),
            out_draft_ids.stride(0), NODES=num_nodes, DEPTH=depth, WHOLE=whole,
            LANES=triton.next_power_of_2(max(2, num_nodes)), LEVELS=triton.next_power_of_2(depth + 1), num_warps=1,
            **launch_args(ids),
        )  # fmt: skip


def tree_walk_reference(
    ids: Tensor,
    parents: Tensor,
    target_ids: Tensor,
    *,
    whole: bool,
    draft_len: Tensor,
    out_path: Tensor,
    out_places: Tensor,
    out_draft_ids: Tensor,
) -> None:
    """The same in plain torch."""
    (num_rows, num_nodes), max_depth = ids.shape, out_path.shape[1] - 1
    above, depth = parents.long(), torch.zeros_like(parents)
    for _ in range(max_depth):
        depth += above >= 0
        above = torch.where(above >= 0, parents.gather(1, above.clamp(min=0)).long(), above)
    deepest = depth.amax(1)
    torch.minimum(draft_len, deepest, out=draft_len)
    out_draft_ids.fill_(-1)
    if whole:
        node = depth.argmax(1, keepdim=True)  # the first of equals
        out_path.copy_(node.expand_as(out_path))
        for level in range(max_depth, 0, -1):
            there = deepest[:, None] >= level
            out_path[:, level : level + 1] = node
            out_draft_ids[:, level - 1 : level] = torch.where(there, ids.gather(1, node), -1)
            node = torch.where(there, parents.gather(1, node).long(), node)
        out_path[:, 0] = 0
    else:
        choices, numbers = target_ids.view(num_rows, num_nodes), torch.arange(num_nodes, device=ids.device)
        node = torch.zeros(num_rows, 1, dtype=torch.int64, device=ids.device)
        out_path.zero_()
        for level in range(max_depth):
            wanted = choices.gather(1, node)
            child = torch.where((parents == node) & (ids == wanted), numbers, num_nodes).amin(1, keepdim=True)
            found = child < num_nodes
            out_draft_ids[:, level : level + 1] = torch.where(found, wanted, -1)
            node = torch.where(found, child, node)
            out_path[:, level + 1 : level + 2] = node
    out_places.copy_(torch.arange(num_rows, device=ids.device)[:, None] * num_nodes + out_path)


def main() -> None:
    bench = Bench("tree_walk")
    for rows, nodes, depth in ((1, 61, 6), (32, 61, 6), (64, 17, 4)):
        with attempt(f"R={rows} S={nodes}"):
            bench_shape(bench, rows, nodes, depth)


def bench_shape(bench: Bench, rows: int, nodes: int, depth: int) -> None:
    device, branches = bench.device, -(-(nodes - 1) // depth)
    parents = torch.arange(nodes, dtype=torch.int32, device=device).sub_(branches).clamp_(min=0)
    parents[0] = -1
    ints = partial(torch.randint, dtype=torch.int32, device=device)
    inputs = (ints(0, 3, (rows, nodes)), parents.repeat(rows, 1), ints(0, 3, (rows * nodes,)))
    outs: list[dict[str, Any]] = []
    for _ in range(2):
        outs.append({
            "whole": False, "draft_len": torch.full((rows,), depth, dtype=torch.int32, device=device),
            "out_path": torch.full((rows, depth + 1), -7, dtype=torch.int32, device=device),
            "out_places": torch.full((rows, depth + 1), -7, dtype=torch.int64, device=device),
            "out_draft_ids": torch.full((rows, depth), -7, dtype=torch.int32, device=device),
        })  # fmt: skip
    shape, num_bytes = f"R={rows} S={nodes} depth {depth}", rows * (8 + 12 * nodes + 16 * depth)
    bench.same_row(shape, tree_walk, tree_walk_reference, [inputs], outs, num_bytes=num_bytes)


if __name__ == "__main__":
    main()
