"""Prompt lookup on the device: the tokens that followed the last earlier occurrence of the row's newest n-gram.

It takes the largest n in min_ngram .. max_ngram such that the row's n newest tokens occurred before, and the most recent of
these occurrences. The tokens after it are proposed, at most growth * n of them: a longer match gives more drafts. One pass scores
every earlier position e by (length of the common suffix of tokens[: e+1] and the row, at most max_ngram; e); the largest wins.
Bound by memory: max_ngram cached reads of a row's tokens, and by launch latency for short rows.
Source: prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check

BLOCK = 2048


@triton.jit(do_not_specialize=["max_draft_len", "growth", "width"])
def ngram_lookup_kernel(
    tokens, num_tokens, live, draft_ids, draft_len, match_len, stride_row, draft_stride, max_draft_len, growth, width,
    MIN_NGRAM: tl.constexpr, MAX_NGRAM: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = tokens + row * stride_row
    last = tl.where(tl.load(live + row) != 0, tl.load(num_tokens + row) - 1, 0)
    best = tl.full([], -1, tl.int64)
    for first in range(0, last, BLOCK):
        end = first + tl.arange(0, BLOCK)
        same = end < last
        length = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(MAX_NGRAM):
            newest = tl.load(base + last - back, mask=last >= back, other=-1)
            same = same & (end >= back)
            same = same & (tl.load(base + end - back, mask=same, other=-1) == newest)
            length += same.to(tl.int32)
        score = tl.where(length >= MIN_NGRAM, (length.to(tl.int64) << 32) + end, -1)
        best = tl.maximum(best, tl.max(score, 0))
    end = (best & 0xFFFFFFFF).to(tl.int32)
    max_count = tl.minimum(max_draft_len, growth * (best >> 32).to(tl.int32))
    count = tl.where(best >= 0, tl.minimum(last - end, max_count), 0)
    lane = tl.arange(0, LANES)
    ids = tl.load(base + end + 1 + lane, mask=lane < count, other=0)
    tl.store(draft_ids + row * draft_stride + lane, ids, mask=lane < width)
    tl.store(draft_len + row, count)
    if match_len is not None:
        tl.store(match_len + row, tl.where(best >= 0, (best >> 32).to(tl.int32), 0))


def ngram_lookup(
    tokens: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    *,
    max_draft_len: int,
    min_ngram: int,
    max_ngram: int,
    growth: int,
    out_draft_ids: Tensor,
    out_draft_len: Tensor,
    out_match_len: Tensor | None = None,
    interpret: bool = False,
) -> None:
    """Propose up to max_draft_len tokens for each row from its own committed tokens.

    tokens         int32 [R, L]  rows may be slices of wider ones
    num_tokens     int32 [R]     committed tokens of each row; later columns are not read
    live           int32 [R]     0: nothing is proposed
    out_draft_ids  int32 [R, K]  unused columns are 0; rows may be slices of wider ones
    out_draft_len  int32 [R]     0..max_draft_len; fewer if the committed tokens end earlier
    out_match_len  int32 [R] or None: number of matching tokens, 0 or min_ngram..max_ngram

    1 <= min_ngram <= max_ngram, growth >= 1, 0 <= max_draft_len <= K. Does not synchronise on a GPU. Raises ValueError for
    other values, shapes, dtypes or strides.
    """
    num_rows, width = out_draft_ids.shape
    check("ngram_lookup: tokens", tokens, (num_rows, tokens.shape[1]), torch.int32, rows=True)
    check("ngram_lookup: num_tokens", num_tokens, (num_rows,), torch.int32)
    check("ngram_lookup: live", live, (num_rows,), torch.int32)
    check("ngram_lookup: out_draft_ids", out_draft_ids, (num_rows, width), torch.int32, rows=True)
    check("ngram_lookup: out_draft_len", out_draft_len, (num_rows,), torch.int32)
    if out_match_len is not None:
        check("ngram_lookup: out_match_len", out_match_len, (num_rows,), torch.int32)
    if not 0 <= max_draft_len <= width:
        raise ValueError(f"ngram_lookup: max_draft_len is {max_draft_len}; must be 0..{width}, the columns of out_draft_ids")
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"ngram_lookup: min_ngram is {min_ngram} and max_ngram {max_ngram}; must be 1 <= min_ngram <= max_ngram")
    if growth < 1:
        raise ValueError(f"ngram_lookup: growth is {growth}; must be at least 1")
    if not (tokens.is_cuda or interpret):
        ngram_lookup_reference(
            tokens, num_tokens, live, max_draft_len=max_draft_len, min_ngram=min_ngram, max_ngram=max_ngram, growth=growth,
            out_draft_ids=out_draft_ids, out_draft_len=out_draft_len, out_match_len=out_match_len,
        )
    elif num_rows:
        ngram_lookup_kernel[(num_rows,)](
            tokens, num_tokens, live, out_draft_ids, out_draft_len, out_match_len, tokens.stride(0), out_draft_ids.stride(0),
            max_draft_len, growth, width,
            MIN_NGRAM=min_ngram, MAX_NGRAM=max_ngram, LANES=max(2, triton.next_power_of_2(width)), BLOCK=BLOCK, num_warps=8,
        )


def ngram_lookup_reference(
    tokens: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    *,
    max_draft_len: int,
    min_ngram: int,
    max_ngram: int,
    growth: int,
    out_draft_ids: Tensor,
    out_draft_len: Tensor,
    out_match_len: Tensor | None = None,
) -> None:
    """The same in plain torch: one pass finds the occurrences of the newest token, and only these are compared further."""
    last = torch.where(live != 0, num_tokens - 1, 0).clamp_(min=0).long()
    longest = int(last.max()) if len(last) else 0
    past = tokens[:, :longest]
    newest = tokens.gather(1, last[:, None])
    rows, ends = (past == newest).nonzero(as_tuple=True)
    earlier = ends < last[rows]
    rows, ends = rows[earlier], ends[earlier]
    same = torch.ones_like(rows, dtype=torch.bool)
    length = torch.ones_like(rows)
    for back in range(1, max_ngram):
        same &= (ends >= back) & (tokens[rows, (ends - back).clamp_(min=0)] == tokens[rows, (last[rows] - back).clamp_(min=0)])
        length += same
    score = torch.where(length >= min_ngram, (length << 32) + ends, -1)
    best = torch.full_like(last, -1).scatter_reduce_(0, rows, score, "amax")
    end = best & 0xFFFFFFFF
    max_count = (growth * (best >> 32)).clamp_(max=max_draft_len)
    count = torch.where(best >= 0, torch.minimum(last - end, max_count), 0)
    lane = torch.arange(out_draft_ids.shape[1], device=tokens.device)
    used = lane < count[:, None]
    out_draft_ids.copy_(tokens.gather(1, torch.where(used, end[:, None] + 1 + lane, 0)) * used)
    out_draft_len.copy_(count)
    if out_match_len is not None:
        out_match_len.copy_(torch.where(best >= 0, best >> 32, 0))
