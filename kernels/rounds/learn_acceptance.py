"""How often drafts of each position and confidence are accepted, learnt from each round, one launch.

A draft that was verified counts if all drafts before it were accepted: others were compared with tokens that follow another text.
It does not count after the row's end, nor where the target made no choice (`accept`).

    tried, accepted = what they were * 2^(-n / half_life) + the n drafts of this round, and those of them that were accepted
    cost            = -32 log2((accepted + weight * prior) / (tried + weight)), rounded and at most 255

Counts and costs are by position in the round and by bin of confidence, so a drafter's confidence may mean anything: what it is
worth is measured. Whether the costs were right is told by totals that do not fade: the drafts, those accepted, and the sum of the
chances 2^(-cost / 32) with which they had been chosen. Bound by launch latency: one program a position reads R integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.rounds.accept import HELD_AFTER_DRAFT
from batchspec.kernels.rounds.allocate_drafts import LEVELS, PER_HALF

ROWS = 128
"""Rows that a program reads at once."""


@triton.jit
def learn_acceptance_kernel(
    confidence, log, prior, tried, accepted, costs, totals, num_rows, num_cells, confidence_stride, log_stride, weight, decay,
    BINS: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, PER_HALF: tl.constexpr, AFTER_DRAFT: tl.constexpr,
    PDL: tl.constexpr,
):
    position = tl.program_id(0)
    bins = tl.arange(0, BINS)
    count = tl.zeros([BINS], tl.float32)
    kept = tl.zeros([BINS], tl.float32)
    await_earlier(PDL)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < num_rows
        line = log + row * log_stride
        right = tl.load(line, mask=is_row, other=-1)
        length = tl.load(line + 1, mask=is_row, other=0)
        decided = tl.minimum(length, tl.load(line + 2, mask=is_row, other=0))
        right += (tl.load(line + 3, mask=is_row, other=0) == AFTER_DRAFT).to(tl.int32)
        counts = (right >= position) & (position < decided)
        own = tl.load(confidence + row * confidence_stride + position, mask=counts, other=-1)
        hit = own[:, None] == bins[None, :]
        count += tl.sum(hit.to(tl.float32), 0)
        kept += tl.sum((hit & (right > position)[:, None]).to(tl.float32), 0)
    at = position * BINS + bins
    chance = tl.exp2(tl.load(costs + at).to(tl.float32) / -PER_HALF)
    tl.store(totals + at, tl.load(totals + at) + count)
    tl.store(totals + num_cells + at, tl.load(totals + num_cells + at) + kept)
    tl.store(totals + 2 * num_cells + at, tl.load(totals + 2 * num_cells + at) + count * chance)
    left = tl.exp2(-decay * count)
    tries = tl.load(tried + at) * left + count
    hits = tl.load(accepted + at) * left + kept
    tl.store(tried + at, tries)
    tl.store(accepted + at, hits)
    rate = (hits + weight * tl.load(prior + bins)) / (tries + weight)
    cost = tl.minimum(-PER_HALF * tl.log2(tl.maximum(rate, 1e-6)) + 0.5, LEVELS - 1)
    tl.store(costs + at, tl.maximum(cost, 0).to(tl.int32))


def learn_acceptance(
    confidence: Tensor, log: Tensor, prior: Tensor, *, tried: Tensor, accepted: Tensor, costs: Tensor, totals: Tensor,
    weight: float, half_life: float, interpret: bool = False,
) -> None:
    """Count the verified drafts of R rows, and compute what a draft of each bin costs from now on.

    confidence  int32 [R, K]    bin of each draft, 0..B-1; rows may be slices of wider ones
    log         int32 [R, K+5]  as `accept` writes it
    prior       fp32 [B]        share that is taken to be accepted before any was counted
    tried, accepted  fp32 [P, B]  in/out, P >= K: counts by position and bin
    costs       int32 [P, B]    in: those by which these drafts were chosen; out, of the first K positions
    totals      fp64 [3, P, B]  in/out: drafts that counted, those accepted, sum of their chances
    weight      how many drafts the prior counts as
    half_life   drafts of a bin after which a count weighs half

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, width = confidence.shape
    positions, bins = costs.shape
    check("learn_acceptance: confidence", confidence, (num_rows, width), torch.int32, rows=True)
    check("learn_acceptance: log", log, (num_rows, width + 5), torch.int32)
    check("learn_acceptance: prior", prior, (bins,), torch.float32)
    check("learn_acceptance: tried", tried, (positions, bins), torch.float32)
    check("learn_acceptance: accepted", accepted, (positions, bins), torch.float32)
    check("learn_acceptance: costs", costs, (positions, bins), torch.int32)
    check("learn_acceptance: totals", totals, (3, positions, bins), torch.float64)
    if positions < width:
        raise ValueError(f"learn_acceptance: costs has {positions} positions; {width} drafts a row need as many")
    if not (confidence.is_cuda or interpret):
        learn_acceptance_reference(
            confidence, log, prior, tried=tried, accepted=accepted, costs=costs, totals=totals, weight=weight,
            half_life=half_life,
        )
    elif num_rows and width:
        learn_acceptance_kernel[(width,)](
            confidence, log, prior, tried, accepted, costs, totals, num_rows, costs.numel(), confidence.stride(0), log.stride(0),
            weight, 1 / half_life, BINS=bins, ROWS=ROWS, LEVELS=LEVELS, PER_HALF=PER_HALF,
            AFTER_DRAFT=HELD_AFTER_DRAFT, num_warps=4, **launch_args(confidence),
        )


def learn_acceptance_reference(
    confidence: Tensor, log: Tensor, prior: Tensor, *, tried: Tensor, accepted: Tensor, costs: Tensor, totals: Tensor,
    weight: float, half_life: float,
) -> None:
    """The same in plain torch."""
    width, bins = confidence.shape[1], costs.shape[1]
    right = log[:, :1] + (log[:, 3:4] == HELD_AFTER_DRAFT)
    decided = torch.minimum(log[:, 1:2], log[:, 2:3])
    position = torch.arange(width, device=log.device)
    counts = (right >= position) & (position < decided)
    hit = (confidence[:, :, None] == torch.arange(bins, device=log.device)) & counts[:, :, None]
    count, kept = hit.sum(0), (hit & (right > position)[:, :, None]).sum(0)
    chance = torch.exp2(costs[:width] / -PER_HALF)
    totals[:, :width] += torch.stack((count, kept, count * chance))
    left = torch.exp2(-count / half_life)
    tried[:width] = tried[:width] * left + count
    accepted[:width] = accepted[:width] * left + kept
    rate = (accepted[:width] + weight * prior) / (tried[:width] + weight)
    costs[:width] = (-PER_HALF * rate.clamp(min=1e-6).log2() + 0.5).clamp(min=0, max=LEVELS - 1).int()
