"""Top-k, top-p and min-p as one threshold for each flat token: the smallest logit that may be drawn. One launch, no sort.

    top-k  the k-th largest logit (logits equal to it are kept)
    top-p  the largest v with mass{x >= v} >= top_p * mass of what top-k keeps,   mass = sum of exp((x - max) / temperature)
    min-p  max + temperature * log(min_p), a lower bound of the cutoff
    (Holtzman et al. 2020, arXiv 1904.09751; Nguyen et al. 2024, arXiv 2407.01082)

`cutoff_search.py` searches the unsorted row for both. Sums have a fixed order, so the cutoff of a token does not depend on the
rest of the batch. Bound by memory: three reads of the row (five for a flat distribution), from the L2 cache while the rows fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.sampling.cutoff_search import finite_range, smallest_kept

BLOCK = 4096
DEPTH = 8
"""Capacity of the candidate list in logits per lane; with BLOCK lanes 128 KB a row."""
NUM_WARPS = 32
STAGES = 4
"""Pipeline stages of the loads: one program occupies an SM alone, so no other program hides their latency."""
MAX_PASSES = 10
"""Each pass shrinks the bracket to a quarter. Logits that are still in one bracket after this many passes are equal or nearly so:
they are searched in the row itself."""
QUICK_TOP = 512
"""The reference first sorts only this many of the likeliest tokens: they nearly always contain everything that top-p keeps."""


@triton.jit
def cutoff_kernel(
    logits, row_ids, temperature, top_k, top_p, min_p, listed, out_cutoff, stride_row, vocab,
    MAX_PASSES: tl.constexpr, STAGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + t)
    temp = tl.load(temperature + row)
    k, p, p_floor = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    cutoff = tl.full([], float("-inf"), tl.float32)
    if (temp > 0) & (((k > 0) & (k < vocab)) | (p < 1) | (p_floor > 0)):
        source = logits + t * stride_row
        listed_of_t = listed + t * (DEPTH * BLOCK)
        top, bottom, num_finite = finite_range(source, vocab, STAGES, BLOCK)
        inverse_temp = 1.0 / temp
        if (k > 0) & (k < vocab) & (k <= num_finite):
            cutoff = smallest_kept(
                source, listed_of_t, vocab, cutoff, bottom, top, inverse_temp, k.to(tl.float32),
                True, MAX_PASSES, STAGES, DEPTH, BLOCK,
            )
        if (p < 1) & (num_finite > 0):
            # The logits below `low` together have less than half of 1 - p of the mass, so the nucleus ends above them.
            low = top + temp * tl.log((1.0 - p) * 0.5 / vocab)
            low = tl.maximum(tl.where(p < 0.99999, low, bottom), tl.maximum(bottom, cutoff))
            cutoff = smallest_kept(
                source, listed_of_t, vocab, cutoff, low, top, inverse_temp, p, False, MAX_PASSES, STAGES, DEPTH, BLOCK
            )
        if p_floor > 0:
            cutoff = tl.maximum(cutoff, top + temp * tl.log(p_floor))
    tl.store(out_cutoff + t, cutoff)


def cutoff(
    logits: Tensor,
    row_ids: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    out_cutoff: Tensor,
    interpret: bool = False,
) -> None:
    """Write the smallest kept logit of each flat token: every vocabulary entry at or above it is kept.

    logits       fp32 or fp64 [T, V]  without NaN and +inf; rows may be slices of wider ones
    row_ids      int32 or int64 [T]  row of each flat token
    temperature  fp32 [R]  0: greedy, the cutoff is -inf
    top_k        int32 [R]  0 or at least V: off
    top_p        fp32 [R]  1: off
    min_p        fp32 [R]  0: off
    out_cutoff   [T] of logits' dtype  -inf if nothing is cut; else a logit of the row, or the bound of min-p if that is higher

    Order: temperature, top-k, top-p (of what top-k keeps), min-p (relative to the likeliest token). The kernel works on fp32;
    fp64 logits take the reference on a GPU too. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or
    strides.
    """
    num_tokens, vocab = logits.shape
    num_rows = temperature.numel()
    check("cutoff: logits", logits, (num_tokens, vocab), torch.float32, torch.float64, rows=True)
    check("cutoff: row_ids", row_ids, (num_tokens,), torch.int32, torch.int64)
    check("cutoff: temperature", temperature, (num_rows,), torch.float32)
    check("cutoff: top_k", top_k, (num_rows,), torch.int32)
    check("cutoff: top_p", top_p, (num_rows,), torch.float32)
    check("cutoff: min_p", min_p, (num_rows,), torch.float32)
    check("cutoff: out_cutoff", out_cutoff, (num_tokens,), logits.dtype)
    if logits.dtype == torch.float64 or not (logits.is_cuda or interpret):
        cutoff_reference(logits, row_ids, temperature, top_k, top_p, min_p, out_cutoff=out_cutoff)
    elif num_tokens:
        block = min(BLOCK, max(16, triton.next_power_of_2(vocab)))
        listed = torch.empty(num_tokens * DEPTH * block, dtype=torch.float32, device=logits.device)
        cutoff_kernel[(num_tokens,)](
            logits, row_ids, temperature, top_k, top_p, min_p, listed, out_cutoff, logits.stride(0), vocab,
            MAX_PASSES=MAX_PASSES, STAGES=STAGES, DEPTH=DEPTH, BLOCK=block, num_warps=min(NUM_WARPS, max(1, block // 128)),
        )


def cutoff_reference(
    logits: Tensor, row_ids: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, out_cutoff: Tensor
) -> None:
    """The same in plain torch, by sorting the QUICK_TOP likeliest tokens, and the whole row if these are not enough.

    On a GPU the whole row is sorted at once, so that nothing is read back to the host.
    """
    vocab = logits.shape[1]
    quick = vocab if logits.is_cuda else min(QUICK_TOP, vocab)
    found = cutoff_of_largest(
        lambda num: logits.topk(num, dim=1).values,
        lambda temp: torch.logsumexp(logits / temp, 1),
        row_ids, temperature, top_k, top_p, min_p, nums=(quick, vocab), dtype=logits.dtype,
    )
    out_cutoff.copy_(found)


def cutoff_of_largest(
    largest: Callable[[int], Tensor], total_of: Callable[[Tensor], Tensor], row_ids: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor, *, nums: Sequence[int], dtype: torch.dtype,
) -> Tensor:
    """The cutoff [T] from as many of the largest logits as decide it.

    largest   num -> that many of the largest logits of each row, [T, num] in falling order
    total_of  temperature [T, 1] -> the log-sum-exp [T] of all logits divided by it
    nums      numbers to ask for, rising, the last one the number of all: each only if the one before does not decide every row
    """
    vocab = nums[-1]
    greedy = temperature[row_ids] <= 0
    temp = torch.where(greedy, 1, temperature[row_ids].to(dtype)).unsqueeze(1)
    k = top_k[row_ids]
    k = torch.where((k > 0) & (k < vocab), k, vocab)
    p, p_floor = top_p[row_ids].to(dtype), min_p[row_ids].to(dtype)
    total = total_of(temp)
    for num in nums:
        best = largest(num)
        cut, complete = _cut_of_sorted(best, total, temp, k, p, vocab)
        # On a GPU the first num is vocab, so `complete` is not read there.
        if num == vocab or bool(complete.all()):
            break
    floor = best[:, 0] + temp.squeeze(1) * p_floor.log()
    cut = torch.where(p_floor > 0, torch.maximum(cut, floor), cut)
    return torch.where(greedy, -torch.inf, cut)


def _cut_of_sorted(best: Tensor, total: Tensor, temp: Tensor, top_k: Tensor, top_p: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Cutoffs of top-k and top-p, and whether the N likeliest logits determine them: best [T, N] in falling order, total [T] the
    log-sum-exp of the whole scaled row."""
    num = best.shape[1]
    no_top_k, no_top_p = top_k >= vocab, top_p >= 1
    kth = best.gather(1, (top_k.clamp(max=num) - 1).long().unsqueeze(1))
    # If even the last column equals the k-th logit, more equal logits may follow it.
    ties_end = best[:, -1] < kth.squeeze(1) if num < vocab else torch.ones_like(no_top_k)
    k_fits = no_top_k | ((top_k <= num) & ties_end)
    in_k = best >= kth  # logits equal to the k-th are kept
    scaled = best / temp
    # top-p measures the mass of what top-k keeps; without top-k that of the whole vocabulary.
    mass = torch.where(no_top_k, total, torch.logsumexp(scaled.masked_fill(~in_k, -torch.inf), 1)).unsqueeze(1)
    before = (scaled - mass).exp().masked_fill(~in_k, 0).cumsum(1).roll(1, 1)
    before[:, 0] = 0
    num_kept = (in_k & (before < top_p.unsqueeze(1))).sum(1, keepdim=True).clamp(min=1)
    nucleus = best.gather(1, num_kept - 1).squeeze(1)
    without_top_p = torch.where(no_top_k, -torch.inf, kth.squeeze(1))
    nucleus_fits = (num_kept.squeeze(1) < num) | ~no_top_k
    return torch.where(no_top_p, without_top_p, nucleus), k_fits & (no_top_p | nucleus_fits)
