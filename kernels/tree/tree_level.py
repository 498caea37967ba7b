"""One level of growing draft trees, in one launch: scores of all children, and the best of them, which branch next.

    score[p, b] = score[p] + (best[p, b] - norm[p])     products: score[p] * exp(best[p, b] - norm[p])
    next        = the B best of all children, of equals the first: tokens, scores, ancestors, and the line of the node above

p is the node above, b its branch; `best` are the logits of the B likeliest draft tokens behind each node that branches, `norm` is
their normaliser. NaN counts as -inf; where rounding makes a token more than certain it is certain, so that no child comes out
above its parent.
One program a row: B rounds of a maximum over its children. Bound by launch latency: some kilobytes a row.
Source: Li et al. 2024, EAGLE-2 (arXiv 2406.16858), by sums of log-probabilities.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.attempt import attempt
from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """The nodes of a level that branch, P of each of R rows: the root alone, later the best B.

    scores     [R, P] of the path from the root
    numbers    int32 [R, P] among all grown nodes; -1 the root
    ancestors  int64 [R, P] bit j: place j of those that drafted is the node's own or above it
    token_ids  int32 [R * P] target ids
    lines      int64 [R * P] line of the level before, r * P' + p', that holds the node above
    """

    scores: Tensor
    numbers: Tensor
    ancestors: Tensor
    token_ids: Tensor
    lines: Tensor


@triton.jit(do_not_specialize=["first_number", "first_bit"])
def tree_level_kernel(
    best, norm, ids, map_ids, scores, numbers, ancestors, all_scores, all_ids, all_above,
    out_scores, out_numbers, out_ancestors, out_token_ids, out_lines, grown, first_number, first_bit,
    PARENTS: tl.constexpr, BRANCHES: tl.constexpr, LOGS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    exists = lane < PARENTS * BRANCHES
    above = row * PARENTS + lane // BRANCHES
    child = row * (PARENTS * BRANCHES) + lane
    likely = tl.load(best + child, mask=exists, other=0.0) - tl.load(norm + above, mask=exists, other=0.0)
    likely = tl.where(likely == likely, tl.minimum(likely, 0.0), float("-inf"))
    path = tl.load(scores + above, mask=exists, other=0.0)
    score = path + likely if LOGS else path * tl.exp(likely)
    score = tl.where(score == score, score, float("-inf"))  # -inf less -inf
    token = tl.load(ids + child, mask=exists, other=0)
    if map_ids is not None:
        token = tl.load(map_ids + token, mask=exists, other=0)
    token = token.to(tl.int32)
    number = tl.load(numbers + above, mask=exists, other=0)
    place = row * grown + first_number + lane
    tl.store(all_scores + place, score, mask=exists)
    tl.store(all_ids + place, token, mask=exists)
    tl.store(all_above + place, number, mask=exists)
    if out_scores is not None:
        mask = tl.load(ancestors + above, mask=exists, other=0)
        left = exists
        for i in range(BRANCHES):
            top = tl.max(tl.where(left, score, float("-inf")), 0)
            winner = tl.min(tl.where(left & (score == top), lane, LANES), 0)
            here = lane == winner
            at = row * BRANCHES + i
            tl.store(out_scores + at, top)
            tl.store(out_numbers + at, first_number + winner)
            tl.store(out_token_ids + at, tl.sum(tl.where(here, token, 0), 0))
            tl.store(out_lines + at, row * PARENTS + winner // BRANCHES)
            bit = tl.full([], 1, tl.int64) << (first_bit + i).to(tl.int64)
            tl.store(out_ancestors + at, tl.sum(tl.where(here, mask, 0), 0) | bit)
            left = left & (lane != winner)


def tree_level(
    best: Tensor,
    norm: Tensor,
    ids: Tensor,
    map_ids: Tensor | None,
    frontier: Frontier,
    *,
    logs: bool,
    first_number: int,
    first_bit: int | None,
    all_scores: Tensor,
    all_ids: Tensor,
    all_above: Tensor,
    interpret: bool = False,
) -> Frontier | None:
    """Grow the children of P nodes of each of R rows, B each; returns the B best of them, or None without `first_bit`.

    best          fp32 or fp64 [R * P, B]  logits, falling
    norm          [R * P] of the same dtype  log of the sum of their exponentials over the draft vocabulary
    ids           int64 [R * P, B]  draft ids
    map_ids       int32 or int64 [draft vocabulary]  their target ids, or None: they are target ids
    frontier      scores of the dtype of best
    logs          scores are sums of log-probabilities; else products of probabilities
    first_number  number of the first child: as many nodes have grown before
    first_bit     place of the first of those that branch next, None where the tree is as deep as it gets
    all_scores    [R, C] of best's dtype, all_ids int32 [R, C] target ids, all_above int32 [R, C] numbers of the nodes above:
                  columns first_number .. first_number + P * B - 1 are written

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, parents), branches, grown = frontier.scores.shape, best.shape[1], all_scores.shape[1]
    lines = (num_rows * parents,)
    check("tree_level: best", best, (*lines, branches), torch.float32, torch.float64)
    check("tree_level: norm", norm, lines, best.dtype)
    check("tree_level: ids", ids, (*lines, branches), torch.int64)
    check("tree_level: frontier.scores", frontier.scores, (num_rows, parents), best.dtype)
    check("tree_level: frontier.numbers", frontier.numbers, (num_rows, parents), torch.int32)
    check("tree_level: frontier.ancestors", frontier.ancestors, (num_rows, parents), torch.int64)
    for name, tensor, dtype in (
        ("all_scores", all_scores, best.dtype), ("all_ids", all_ids, torch.int32), ("all_above", all_above, torch.int32)
    ):  # fmt: skip
        check(f"tree_level: {name}", tensor, (num_rows, grown), dtype)
    if map_ids is not None:
        check("tree_level: map_ids", map_ids, (map_ids.numel(),), torch.int32, torch.int64)
    if first_number + parents * branches > grown:
        raise ValueError(f"tree_level: {parents * branches} children from number {first_number} on, but {grown} columns")
    if first_bit is not None and first_bit + branches > 64:
        raise ValueError(f"tree_level: places {first_bit} .. {first_bit + branches - 1} exceed the 64 bits of a mask")
    if not (best.is_cuda or interpret):
        return tree_level_reference(
            best, norm, ids, map_ids, frontier, logs=logs, first_number=first_number, first_bit=first_bit,
            all_scores=all_scores, all_ids=all_ids, all_above=all_above,
        )  # fmt: skip
    out = None if first_bit is None else _empty(num_rows, branches, best)
    if num_rows:
        written = (None,) * 5 if out is None else (out.scores, out.numbers, out.ancestors, out.token_ids, out.lines)
        tree_level_kernel[(num_rows,)](
            best, norm, ids, map_ids, frontier.scores, frontier.numbers, frontier.ancestors, all_scores, all_ids, all_above,
            *written, grown, first_number, first_bit or 0, PARENTS=parents, BRANCHES=branches, LOGS=logs,
            LANES=triton.next_power_of_2(max(2, parents * branches)), num_warps=4 if parents * branches > 64 else 1,
            **launch_args(best),
        )  # fmt: skip
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


def tree_level_reference(
    best: Tensor,
    norm: Tensor,
    ids: Tensor,
    map_ids: Tensor | None,
    frontier: Frontier,
    *,
    logs: bool,
    first_number: int,
    first_bit: int | None,
    all_scores: Tensor,
    all_ids: Tensor,
    all_above: Tensor,
) -> Frontier | None:
    """The same in plain torch."""
    (num_rows, parents), branches = frontier.scores.shape, best.shape[1]
    likely = (best - norm.unsqueeze(1)).view(num_rows, parents, branches)
    likely = torch.where(likely.isnan(), -torch.inf, likely.clamp(max=0))
    paths = frontier.scores.unsqueeze(2) + likely if logs else frontier.scores.unsqueeze(2) * likely.exp()
    paths = torch.where(paths.isnan(), -torch.inf, paths).flatten(1)
    tokens = (ids if map_ids is None else map_ids[ids]).view(num_rows, -1).int()
    columns = slice(first_number, first_number + parents * branches)
    all_scores[:, columns], all_ids[:, columns] = paths, tokens
    all_above[:, columns] = frontier.numbers.repeat_interleave(branches, 1)
    if first_bit is None:
        return None
    chosen = paths.sort(dim=1, descending=True, stable=True).indices[:, :branches]
    above = chosen // branches
    own = torch.ones_like(chosen) << (first_bit + torch.arange(branches, device=best.device))
    line = torch.arange(num_rows, device=best.device).unsqueeze(1) * parents + above
    return Frontier(
        paths.gather(1, chosen), (first_number + chosen).int(), frontier.ancestors.gather(1, above) | own,
        tokens.gather(1, chosen).flatten(), line.flatten(),
    )  # fmt: skip


def main() -> None:
    bench = Bench("tree_level")
    for rows, branches in ((1, 10), (32, 10), (32, 4)):
        with attempt(f"R={rows} B={branches}"):
            bench_shape(bench, rows, branches)


def bench_shape(bench: Bench, rows: int, branches: int) -> None:
    device, lines, grown = bench.device, rows * branches, branches + branches**2
    logits = torch.randn(lines, 32000, device=device) * 3
    best, norm = logits.topk(branches, dim=1), torch.logsumexp(logits, 1)
    frontier = Frontier(
        -torch.rand(rows, branches, device=device),
        torch.arange(branches, dtype=torch.int32, device=device).repeat(rows, 1),
        torch.ones(rows, branches, dtype=torch.int64, device=device) << torch.arange(branches, device=device),
        torch.zeros(lines, dtype=torch.int32, device=device),
        torch.zeros(lines, dtype=torch.int64, device=device),
    )
    inputs = (best.values, norm, best.indices, torch.arange(32000, device=device) + 7, frontier)
    calls, found = [], []
    for call in (tree_level, tree_level_reference):
        scores, ids = torch.zeros(rows, grown, device=device), torch.zeros(2, rows, grown, dtype=torch.int32, device=device)
        made = partial(call, *inputs, logs=True, first_number=branches, first_bit=branches,
                       all_scores=scores, all_ids=ids[0], all_above=ids[1])  # fmt: skip
        calls.append(made)
        following = made()
        assert following is not None
        found.append((scores, ids, *astuple(following)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0 if ours.dtype is not torch.float32 else 1e-6, rtol=0)
    bench.row(f"R={rows} B={branches}", calls[:1], calls[1:], num_bytes=rows * branches * (24 * branches + 60))


if __name__ == "__main__":
    main()
