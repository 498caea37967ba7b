"""Greedy token of each row: out_ids[r] = argmax of logits[r, :vocab], the lowest id of a tie, mapped through map_ids if given.

Draft tokens: NaN counts as -inf, and a row of nothing but -inf gives 0, so the id is below `vocab` whatever the model computed.
Emitted tokens must not come from such a row: with `flag_nonfinite` a row that holds NaN or +inf, or no finite logit, gives
NO_TOKEN.

How sure the choice is, where it is asked for: the logarithm of the odds of the token against all others, in 32 steps,

    bin = floor(4 (3 - ln(sum over the others of exp(logit - largest logit)))), at least 0 and at most 31

so that bin 0 is a probability below 0.06 and bin 31 one above 0.991. Summed in the same pass.
Bound by memory: every logit is read once and one int32 a row is written. One program of 1024 threads a row, so few rows leave
SMs idle; an H200 takes 47.6 us for 1024 x 49152 fp32 (99 % of its copy bandwidth), 6.1 us for 64 rows, 3.7 us for 16.
Source: a draft of one candidate needs an argmax, not softmax and top-k (https://github.com/sgl-project/sglang/pull/26235).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args

GROUP = 128
BLOCK = 4096
NUM_WARPS = 32
CONFIDENCE_BINS = 32
PROBABILITIES = tuple(1 / (1 + math.exp(3 - (i + 0.5) / 4)) for i in range(CONFIDENCE_BINS))
"""The probability in the middle of each bin of confidence."""
NO_TOKEN = -1
"""Returned instead of a token id if the logits are not finite: no token may be emitted."""


@triton.jit
def add_exponentials(total, best, x, terms):
    """A running sum of exp(logit - best), relative to the larger of best and x from now on, and `terms` exp(x - it) more. NaN and
    -inf in x add nothing."""
    known = x > float("-inf")  # not NaN either
    above = tl.where(known, tl.maximum(best, x), best)
    total = tl.where(best > float("-inf"), total * tl.exp(best - above), 0)
    return total + tl.where(known, terms * tl.exp(x - above), 0)


@triton.jit
def sum_of_lanes(total, best, largest):
    """The sum of exp(logit - largest logit), from the running sums of all lanes and the largest logit of each."""
    return tl.sum(tl.where(best > float("-inf"), total * tl.exp(best - largest), 0), 0)


@triton.jit
def confidence_bin(largest, total):
    """The bin of a choice, from its logit and the sum of exp(logit - largest logit)."""
    others = total - 1
    odds = tl.where(others > 0, -tl.log(tl.maximum(others, 1e-9)), 32.0)
    step = tl.minimum(tl.maximum(tl.floor(4 * (odds + 3)), 0), 31).to(tl.int32)
    return tl.where(tl.abs(largest) < float("inf"), step, 0)


@triton.jit
def argmax_kernel(
    logits, map_ids, out_ids, out_top, out_total, out_confidence, stride_row, out_stride, confidence_stride, vocab,
    FLAG: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), ACC)
    best_ids = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], ACC)
    await_earlier(PDL)
    for first in range(0, vocab, BLOCK):
        ids = first + lanes
        x = tl.load(logits + row * stride_row + ids, mask=ids < vocab, other=float("-inf")).to(ACC)
        if FLAG:
            x = tl.where(x == x, x, float("inf"))  # tl.max ignores NaN: turn it into +inf, which is flagged too
        if (out_confidence is not None) | (out_total is not None):
            total = add_exponentials(total, best, x, 1.0)
        better = x > best  # false for NaN and for a tie: the lane keeps its lowest id
        best = tl.where(better, x, best)
        best_ids = tl.where(better, ids, best_ids)
    top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, best_ids, vocab), 0)
    if FLAG:
        winner = tl.where(tl.abs(top) < float("inf"), winner, -1)
    if map_ids is not None:
        winner = tl.load(map_ids + winner)
    tl.store(out_ids + row * out_stride, winner.to(tl.int32))
    if out_top is not None:
        tl.store(out_top + row, top)
    if out_total is not None:
        tl.store(out_total + row, sum_of_lanes(total, best, top))
    if out_confidence is not None:
        tl.store(out_confidence + row * confidence_stride, confidence_bin(top, sum_of_lanes(total, best, top)))


def argmax(
    logits: Tensor, *, out_ids: Tensor, vocab: int | None = None, map_ids: Tensor | None = None, flag_nonfinite: bool = False,
    out_top: Tensor | None = None, out_total: Tensor | None = None, out_confidence: Tensor | None = None, interpret: bool = False,
) -> None:
    """Write the token with the largest logit of each row.

    logits   fp32, bf16, fp16 or fp64 [R, V]  rows may be slices of wider ones
    out_ids  int32 [R]  any stride, for example one column of a matrix of draft tokens
    vocab    number of valid columns, 1..V (None: V); padding columns after them are never chosen
    map_ids  int32 or int64 [V]  draft id -> target id of a draft vocabulary, or None
    flag_nonfinite  give NO_TOKEN for a row with NaN, +inf or no finite logit among the valid columns; not with map_ids

    out_top  [R] of logits' dtype or None: the largest logit; NaN counts as -inf, with flag_nonfinite as +inf
    out_total  [R] fp32, fp64 for fp64 logits, or None: the sum of exp(logit - largest logit); 0 if no logit is above -inf
    out_confidence  int32 [R] of any stride, or None: the bin of the log odds, 0..31; 0 for logits that are not finite

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, width = logits.shape
    vocab = width if vocab is None else vocab
    check("argmax: logits", logits, (num_rows, width), *FLOATS, rows=True)
    check("argmax: out_ids", out_ids, (num_rows,), torch.int32, strided=True)
    if out_top is not None:
        check("argmax: out_top", out_top, (num_rows,), logits.dtype)
    if out_total is not None:
        check("argmax: out_total", out_total, (num_rows,), torch.float64 if logits.dtype is torch.float64 else torch.float32)
    if out_confidence is not None:
        check("argmax: out_confidence", out_confidence, (num_rows,), torch.int32, strided=True)
    if map_ids is not None:
        check("argmax: map_ids", map_ids, (width,), torch.int32, torch.int64)
        if flag_nonfinite:
            raise ValueError("argmax: map_ids with flag_nonfinite; drafts are mapped and not flagged")
    if not 1 <= vocab <= width:
        raise ValueError(f"argmax: vocab is {vocab}; must be 1..{width}, the columns of logits")
    if not (logits.is_cuda or interpret):
        argmax_reference(
            logits, out_ids=out_ids, vocab=vocab, map_ids=map_ids, flag_nonfinite=flag_nonfinite, out_top=out_top,
            out_total=out_total, out_confidence=out_confidence,
        )
    elif num_rows:
        acc = tl.float64 if logits.dtype == torch.float64 else tl.float32
        block = min(BLOCK, max(16, triton.next_power_of_2(vocab)))
        argmax_kernel[(num_rows,)](
            logits, map_ids, out_ids, out_top, out_total, out_confidence, logits.stride(0), out_ids.stride(0),
            0 if out_confidence is None else out_confidence.stride(0), vocab, FLAG=flag_nonfinite, ACC=acc, BLOCK=block,
            num_warps=NUM_WARPS, **launch_args(logits),
        )


def argmax_reference(
    logits: Tensor, *, out_ids: Tensor, vocab: int | None = None, map_ids: Tensor | None = None, flag_nonfinite: bool = False,
    out_top: Tensor | None = None, out_total: Tensor | None = None, out_confidence: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    if out_top is not None or out_total is not None or out_confidence is not None:
        x = torch.where(logits.isnan(), float("inf") if flag_nonfinite else float("-inf"), logits)[:, :vocab]
        x = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
        largest = x.amax(1)
        total = torch.where(x > float("-inf"), torch.exp(x - largest.unsqueeze(1)), 0).sum(1)
        if out_top is not None:
            out_top.copy_(largest)
        if out_total is not None:
            out_total.copy_(total)
        if out_confidence is not None:
            out_confidence.copy_(torch.where(largest.isfinite(), confidence_of(total), 0))
    ids = first_max(logits[:, :vocab], flag_nonfinite=flag_nonfinite)
    out_ids.copy_(ids if map_ids is None else map_ids[ids])


def confidence_of(total: Tensor) -> Tensor:
    """int32 [R] the bins of the log odds, from the sums of exp(logit - largest logit), floating point [R]."""
    others = total - 1
    odds = torch.where(others > 0, -others.clamp(min=1e-9).log(), 32.0)
    return (4 * (odds + 3)).floor().clamp(min=0, max=CONFIDENCE_BINS - 1).int()


def first_max(x: Tensor, *, flag_nonfinite: bool = False) -> Tensor:
    """int64 [R] lowest column of the largest value of x [R, V]; NaN counts as -inf, or is flagged as in `argmax`.

    Two levels (amax of groups of columns, then argmax of the groups), because torch's argmax is not vectorised on the CPU and
    amax is: 8 times faster at V = 49152.
    """
    width = x.shape[1]
    num_groups = width // GROUP
    tops = torch.unflatten(x[:, : num_groups * GROUP], 1, (num_groups, GROUP)).amax(2)
    if num_groups * GROUP < width:
        tops = torch.cat([tops, x[:, num_groups * GROUP :].amax(1, keepdim=True)], 1)
    top = tops.amax(1, keepdim=True)  # amax propagates NaN
    if top.isnan().any():
        winner = first_max(torch.where(x.isnan(), float("-inf"), x)).unsqueeze(1)
    else:
        winner = _first_of_groups(x, tops)
    if flag_nonfinite:
        winner = torch.where(top.isfinite(), winner, NO_TOKEN)
    return winner.squeeze(1)


def _first_of_groups(x: Tensor, tops: Tensor) -> Tensor:
    """int64 [R, 1] lowest column of the largest value of x [R, V]; tops [R, groups] is the largest value of each group."""
    columns = tops.argmax(1, keepdim=True) * GROUP + torch.arange(GROUP, device=x.device)
    # The last group may be short: indices past its end repeat the last column, and argmax takes the first of equal values.
    columns.clamp_(max=x.shape[1] - 1)
    return columns.gather(1, x.gather(1, columns).argmax(1, keepdim=True))
