"""The best `count` columns of each row, in descending order; of equals the lowest column comes first, and NaN counts as -inf.

Two kernels. The first writes the largest logit of each group of columns, and is bound by memory: every logit is read once. The
second, one program a row, takes the `count` groups of the largest maxima, of equals the first, and the best columns of these. No
other group can hold one of the best: each of the groups taken holds a column that comes before all of its columns. It reads
count * GROUP logits of a row, and is bound by latency: 2 * count maxima over numbers in registers.
torch.topk selects by radix, in several passes over the row, and leaves the order of equals open.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

MOST = 32
"""Highest count."""
GROUP, MOST_GROUPS = 128, 2048
GROUPS_AT_ONCE = 32
"""Groups of one program of the first kernel."""


@triton.jit
def _keys(x, ids):
    """int64 keys in the order of the columns: by value, then by id from the highest to the lowest. x holds no NaN."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _id_of(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def group_maxima_kernel(
    logits, out, stride_row, vocab, num_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    await_earlier(PDL)
    x = tl.load(logits + row * stride_row + ids, mask=ids < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    tl.store(out + row * num_groups + group, tl.max(x, 1), mask=group < num_groups)


@triton.jit
def top_candidates_kernel(
    logits, maxima, out_values, out_ids, stride_row, vocab, num_groups, COUNT: tl.constexpr, LANES: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane, group = tl.arange(0, LANES), tl.arange(0, GROUPS)
    nothing = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
    await_earlier(PDL)
    top = tl.load(maxima + row * num_groups + group, mask=group < num_groups, other=float("-inf"))
    keys = tl.where(group < num_groups, _keys(top, group), nothing)
    taken = tl.full([LANES], 0, tl.int32) + num_groups  # columns of this group do not exist
    for i in tl.static_range(COUNT):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, nothing, keys)
        taken = tl.where((lane == i) & (best != nothing), _id_of(best), taken)
    ids = taken[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * stride_row + ids, mask=ids < vocab, other=float("-inf"))
    keys = tl.where(ids < vocab, _keys(tl.where(x == x, x, float("-inf")), ids), nothing)
    found = tl.full([LANES], 0, tl.int64)
    for i in tl.static_range(COUNT):
        best = tl.max(tl.max(keys, 1), 0)
        keys = tl.where(keys == best, nothing, keys)
        found = tl.where(lane == i, best, found)
    ordered = (found >> 32).to(tl.int32)
    values = tl.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    tl.store(out_values + row * COUNT + lane, values, mask=lane < COUNT)
    tl.store(out_ids + row * COUNT + lane, _id_of(found).to(tl.int64), mask=lane < COUNT)


def top_candidates(logits: Tensor, count: int, *, out_values: Tensor, out_ids: Tensor, interpret: bool = False) -> None:
    """Write the largest logits of each row and their columns.

    logits      fp32, or fp64 in plain torch, [N, V]  rows may be slices of wider ones
    count       1..32, at most V
    out_values  like logits [N, count]  -inf for NaN
    out_ids     int64 [N, count]  all different

    Does not synchronise on a GPU, but for fp64. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, vocab = logits.shape
    check("top_candidates: logits", logits, (num_rows, vocab), torch.float32, torch.float64, rows=True)
    check("top_candidates: out_values", out_values, (num_rows, count), logits.dtype)
    check("top_candidates: out_ids", out_ids, (num_rows, count), torch.int64)
    if not 1 <= count <= min(MOST, vocab):
        raise ValueError(f"top_candidates: count is {count}; must be 1..{min(MOST, vocab)}")
    if not (logits.is_cuda or interpret) or logits.dtype is torch.float64:
        top_candidates_reference(logits, count, out_values=out_values, out_ids=out_ids)
    elif num_rows:
        group = max(GROUP, triton.next_power_of_2(triton.cdiv(vocab, MOST_GROUPS)))
        num_groups, lanes = triton.cdiv(vocab, group), triton.next_power_of_2(count)
        maxima = torch.empty(num_rows, num_groups, dtype=torch.float32, device=logits.device)
        sizes, options = (logits.stride(0), vocab, num_groups), launch_args(logits)
        group_maxima_kernel[num_rows, triton.cdiv(num_groups, GROUPS_AT_ONCE)](
            logits, maxima, *sizes, GROUP=group, GROUPS=GROUPS_AT_ONCE, num_warps=4, **options
        )
        top_candidates_kernel[(num_rows,)](
            logits, maxima, out_values, out_ids, *sizes, COUNT=count, LANES=lanes, GROUP=group,
            GROUPS=triton.next_power_of_2(num_groups), num_warps=4, **options,
        )


def top_candidates_reference(logits: Tensor, count: int, *, out_values: Tensor, out_ids: Tensor) -> None:
    """The same in plain torch."""
    x = torch.where(logits.isnan(), -torch.inf, logits)
    least = x.topk(count, dim=1).values[:, -1:]
    above, equal = x > least, x == least
    chosen = above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))
    ids = chosen.nonzero()[:, 1].view(-1, count)
    values, order = x.gather(1, ids).sort(dim=1, descending=True, stable=True)
    out_values.copy_(values)
    out_ids.copy_(ids.gather(1, order))
