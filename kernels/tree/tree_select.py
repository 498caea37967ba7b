"""The best N of all C nodes that grew in a row's tree, in one launch: their tokens, and which of them stands above which.

    kept = the N of the highest scores, of equals the lowest numbers      new number = 1 + how many kept ones come before
    parent = new number of the node above, 0 below the root

A node's number is higher than that of the one above it and its score is not, so that one is always kept with it.
One program a row counts for each node how many are better. Bound by launch latency: C^2 comparisons, a quarter of a million for
the largest trees of use (C = 510).
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.attempt import attempt
from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

OTHERS = 16
"""Nodes that all others are compared with at once."""


@triton.jit
def tree_select_kernel(
    scores, ids, above, out_ids, out_parents, scratch, ids_stride, parents_stride,
    GROWN: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr, OTHERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    exists = lane < GROWN
    own = tl.load(scores + row * GROWN + lane, mask=exists, other=float("-inf"))
    better = tl.zeros([LANES], tl.int32)
    for first in range(0, GROWN, OTHERS):
        other = first + tl.arange(0, OTHERS)
        score = tl.load(scores + row * GROWN + other, mask=other < GROWN, other=float("-inf"))
        ahead = (score[None, :] > own[:, None]) | ((score[None, :] == own[:, None]) & (other[None, :] < lane[:, None]))
        better += tl.sum((ahead & (other < GROWN)[None, :]).to(tl.int32), 1)
    kept = exists & (better < KEPT)
    number = tl.cumsum(kept.to(tl.int32), 0)
    tl.store(scratch + row * GROWN + lane, number, mask=exists)
    tl.debug_barrier()  # what other threads of the program stored is read below
    parent = tl.load(above + row * GROWN + lane, mask=kept, other=-1)
    parent = tl.load(scratch + row * GROWN + parent, mask=kept & (parent >= 0), other=0)
    token = tl.load(ids + row * GROWN + lane, mask=kept, other=0)
    tl.store(out_ids + row * ids_stride + number - 1, token, mask=kept)
    tl.store(out_parents + row * parents_stride + number, parent, mask=kept)


def tree_select(
    scores: Tensor, ids: Tensor, above: Tensor, *, out_ids: Tensor, out_parents: Tensor, interpret: bool = False
) -> None:
    """Keep N nodes of each of R rows' trees, in the order of their numbers.

    scores       fp32 or fp64 [R, C]  no NaN; none higher than that of the node above
    ids          int32 [R, C]         tokens
    above        int32 [R, C]         number 0..C-1 of the node above, lower than the node's own; -1: the root
    out_ids      int32 [R, N]         N <= C; rows may be slices of wider ones, here and of the next
    out_parents  int32 [R, N+1]       from column 1 on the node above each, 1..N, 0 the root; column 0 is left alone

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, grown), kept = scores.shape, out_ids.shape[1]
    check("tree_select: scores", scores, (num_rows, grown), torch.float32, torch.float64)
    check("tree_select: ids", ids, (num_rows, grown), torch.int32)
    check("tree_select: above", above, (num_rows, grown), torch.int32)
    check("tree_select: out_ids", out_ids, (num_rows, kept), torch.int32, rows=True)
    check("tree_select: out_parents", out_parents, (num_rows, kept + 1), torch.int32, rows=True)
    if kept > grown:
        raise ValueError(f"tree_select: {kept} nodes to keep of {grown}; no more can be kept than grew")
    if not (scores.is_cuda or interpret):
        tree_select_reference(scores, ids, above, out_ids=out_ids, out_parents=out_parents)
    elif num_rows:
        tree_select_kernel[(num_rows,)](
            scores, ids, above, out_ids, out_parents, torch.empty_like(ids), out_ids.stride(0), out_parents.stride(0),
            GROWN=grown, KEPT=kept, LANES=triton.next_power_of_2(max(2, grown)), OTHERS=OTHERS, num_warps=8,
            **launch_args(scores),
        )  # fmt: skip


def tree_select_reference(scores: Tensor, ids: Tensor, above: Tensor, *, out_ids: Tensor, out_parents: Tensor) -> None:
    """The same in plain torch."""
    num_rows, kept = out_ids.shape
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
    number = torch.zeros(num_rows, scores.shape[1] + 1, dtype=torch.int32, device=scores.device)
    number.scatter_(1, chosen + 1, torch.arange(1, kept + 1, dtype=torch.int32, device=scores.device).expand(num_rows, -1))
    out_ids.copy_(ids.gather(1, chosen))
    out_parents[:, 1:] = number.gather(1, above.gather(1, chosen).long() + 1)


def main() -> None:
    bench = Bench("tree_select")
    for rows, branches, depth, nodes in ((1, 10, 6, 60), (32, 10, 6, 60), (32, 4, 4, 16)):
        with attempt(f"R={rows} B={branches} D={depth}"):
            bench_shape(bench, rows, branches, depth, nodes)


def bench_shape(bench: Bench, rows: int, branches: int, depth: int, nodes: int) -> None:
    device, grown = bench.device, branches + (depth - 1) * branches**2
    above = (torch.arange(grown, dtype=torch.int32, device=device) - branches) // branches
    above = torch.where(above < 0, -1, above).int().repeat(rows, 1)
    scores = -torch.arange(grown, device=device).float().div(50).floor().repeat(rows, 1)  # falls along every path, many equal
    ids = torch.randint(0, 32000, (rows, grown), dtype=torch.int32, device=device)
    outs = [torch.full((rows, 2 * nodes + 1), -7, dtype=torch.int32, device=device) for _ in range(2)]
    calls = [
        partial(call, scores, ids, above, out_ids=out[:, :nodes], out_parents=out[:, nodes:])
        for call, out in zip((tree_select, tree_select_reference), outs, strict=True)
    ]
    for call in calls:
        call()
    torch.testing.assert_close(outs[0], outs[1], atol=0, rtol=0)
    bench.row(f"R={rows} B={branches} D={depth} N={nodes}", calls[:1], calls[1:], num_bytes=rows * (12 * grown + 8 * nodes))


if __name__ == "__main__":
    main()
