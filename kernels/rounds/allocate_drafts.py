"""Which drafts a round verifies when it has fewer places than drafts: those that are most likely to be accepted, one launch.

    cost of draft j of a row  = -32 log2(chance that it is accepted if those before it were), by its position and confidence
    level of draft j          = sum of the costs up to j, at most 255: the draft survives with probability 2^(-level / 32)

The drafts of all rows with the lowest levels are taken. Levels do not fall along a row, and of equal levels the earlier position
is taken first, then the lower row: so the taken drafts of a row are its first ones, and the choice is the same on every rank.
Levels are integers: no sum depends on an order. The kernel also counts the drafts of each position and level, from which the host
knows what any number of places would be worth. A round with places for all drafts only counts them.

Tokens do not depend on what is taken: a round emits the target's own choices, which depend on the row's tokens and noise only.
Bound by launch latency: one program reads R * K integers twice, or once if it only counts.
Source: survival over the whole batch as in DSpark's Algorithm 1 (arXiv 2607.05147).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

LEVELS = 256
PER_HALF = 32
"""Levels after which the chance to survive is half as large."""


@triton.jit
def allocate_drafts_kernel(
    confidence, costs, live, draft_len, out_counts, num_places, num_rows, confidence_stride, CUT: tl.constexpr,
    K: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    levels = tl.arange(0, 2 * LEVELS)  # the upper half counts what is no draft
    await_earlier(PDL)
    alive = tl.load(live + row, mask=is_row, other=0) != 0
    length = tl.where(alive, tl.load(draft_len + row, mask=is_row, other=0), 0)

    level = tl.zeros([ROWS], tl.int32)
    total = tl.zeros([2 * LEVELS], tl.int32)
    for j in range(K):
        is_draft = j < length
        bins = tl.load(confidence + row * confidence_stride + j, mask=is_draft, other=0)
        level = tl.minimum(level + tl.load(costs + j * BINS + bins, mask=is_draft, other=0), LEVELS - 1)
        counts = tl.histogram(tl.where(is_draft, level, LEVELS), 2 * LEVELS)
        tl.store(out_counts + j * LEVELS + levels, counts, mask=levels < LEVELS)
        total += counts
    if CUT:
        left = num_places - tl.sum(alive.to(tl.int32), 0)
        total = tl.where(levels < LEVELS, total, 0)
        up_to = tl.cumsum(total, 0)
        last = tl.sum(((up_to < left) & (levels < LEVELS)).to(tl.int32), 0)  # the places end within this level
        wanted = left - tl.sum(tl.where(levels < last, total, 0), 0)

        level = tl.zeros([ROWS], tl.int32)
        taken = tl.zeros([ROWS], tl.int32)
        earlier = wanted * 0
        for j in range(K):
            is_draft = j < length
            bins = tl.load(confidence + row * confidence_stride + j, mask=is_draft, other=0)
            level = tl.minimum(level + tl.load(costs + j * BINS + bins, mask=is_draft, other=0), LEVELS - 1)
            at_last = (is_draft & (level == last)).to(tl.int32)
            rank = earlier + tl.cumsum(at_last, 0) - at_last
            taken += (is_draft & ((level < last) | ((at_last > 0) & (rank < wanted)))).to(tl.int32)
            earlier += tl.sum(at_last, 0)
        tl.store(draft_len + row, taken, mask=is_row)


def allocate_drafts(
    confidence: Tensor, costs: Tensor, live: Tensor, *, num_places: int | None, draft_len: Tensor, out_counts: Tensor,
    interpret: bool = False,
) -> None:
    """Cut the drafts of R rows to what fits into `num_places` places, of which each live row needs one for its newest token.

    confidence  int32 [R, K]  bin of each draft; rows may be slices of wider ones
    costs       int32 [P, B]  by position and bin, P >= K; not negative
    live        int32 [R]
    num_places  at least the number of live rows; None: there are places for all drafts, and draft_len stays what it is
    draft_len   int32 [R]  in: drafts of each row, 0..K; out: the first of them that are verified; 0 for dead rows
    out_counts  int32 [K, LEVELS]  drafts of live rows by position and level, those that are not taken too

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, width = confidence.shape
    check("allocate_drafts: confidence", confidence, (num_rows, width), torch.int32, rows=True)
    check("allocate_drafts: costs", costs, (costs.shape[0], costs.shape[1]), torch.int32)
    check("allocate_drafts: live", live, (num_rows,), torch.int32)
    check("allocate_drafts: draft_len", draft_len, (num_rows,), torch.int32)
    check("allocate_drafts: out_counts", out_counts, (width, LEVELS), torch.int32)
    if costs.shape[0] < width:
        raise ValueError(f"allocate_drafts: costs has {costs.shape[0]} positions; {width} drafts a row need as many")
    if not (confidence.is_cuda or interpret):
        allocate_drafts_reference(
            confidence, costs, live, num_places=num_places, draft_len=draft_len, out_counts=out_counts
        )
    elif num_rows:
        rows = max(16, triton.next_power_of_2(num_rows))
        allocate_drafts_kernel[(1,)](
            confidence, costs, live, draft_len, out_counts, num_places or 0, num_rows, confidence.stride(0),
            CUT=num_places is not None, K=width, BINS=costs.shape[1], ROWS=rows, LEVELS=LEVELS,
            num_warps=min(16, max(4, rows // 64)), **launch_args(confidence),
        )


def allocate_drafts_reference(
    confidence: Tensor, costs: Tensor, live: Tensor, *, num_places: int | None, draft_len: Tensor, out_counts: Tensor
) -> None:
    """The same in plain torch: a stable sort of all drafts by level, position and row."""
    num_rows, width = confidence.shape
    position = torch.arange(width, device=live.device)
    is_draft = position < (draft_len * (live != 0))[:, None]
    cost = torch.where(is_draft, costs[position, torch.where(is_draft, confidence, 0).long()], 0)
    level = cost.cumsum(1).clamp(max=LEVELS - 1)
    for j in range(width):
        out_counts[j] = torch.bincount(level[is_draft[:, j], j], minlength=LEVELS)
    if num_places is None:
        return
    by_position = torch.where(is_draft, level, LEVELS).t().flatten()
    order = by_position.argsort(stable=True)[: max(0, num_places - int((live != 0).sum()))]
    taken = torch.zeros(width * num_rows, dtype=torch.int32, device=live.device)
    taken[order] = 1
    draft_len.copy_((taken.view(width, num_rows).t() * is_draft).sum(1))
