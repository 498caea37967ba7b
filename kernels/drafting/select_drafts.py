"""For each row and round, choose the drafts of a head or of a lookup: those with more expected accepted tokens. The confidence in
each chosen draft says from which of them it is.

    select_drafts      E = p + p^2 + .. + p^n for n draft tokens, each accepted with probability p if those before it were;
                       the lookup is chosen if its E is larger. p = accepted / tried over the whole job, measured separately
                       for each match length of the lookup, for the head as well as for the lookup
    update_acceptance  after the commit both proposals are compared with the emitted tokens: n' = min(n, emitted) of them
                       can be judged, and the first m agree; tried += min(m + 1, n'), accepted += m, older counts decay

The emitted tokens do not depend on the drafts, so the proposal that was not chosen is judged too: no exploration is needed.
Counts decay to a prior: prior + (old - prior) * max(0, 1 - tried / memory).

The head's rate also depends on the match length: the head predicts text with a long match better than other text. A rate per
row, alone or combined with that per match length, chose the lookup too often; whether both proposals begin with the same token,
and rates by position, did not help. Tokens a round in a replay of SmolLM2-135M's rows, 128 of GSM8K and 72 of Spec-Bench,
K = 3 / 5: the head alone 3.102 / 3.935 and 2.203 / 2.414, lookup alone 1.558 / 1.624 and 1.455 / 1.513, rates by row
3.068 / 3.880 and 2.246 / 2.494, rates by match length 3.102 / 3.934 and 2.267 / 2.514, an oracle that always takes the better one
3.208 / 4.090 and 2.351 / 2.621.
Bound by launch latency.
Source: expected accepted tokens of a chain, Leviathan et al. 2023 (arXiv 2211.17192), here with measured rates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check

MEMORY = 4096.0
"""Draft tokens of one match length after which an older count has decayed to the prior."""
BLOCK = 64


@triton.jit(do_not_specialize=["head_width", "width"])
def select_drafts_kernel(
    head_ids, lookup_ids, lookup_len, match_len, head_counts, lookup_counts, live, draft_ids, draft_len, picked, head_stride,
    lookup_stride, draft_stride, head_width, width, head_confidence, confidence, head_confidence_stride, confidence_stride,
    HEAD_BINS: tl.constexpr, LOOKUP_BINS: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(lookup_len + row)
    match = tl.load(match_len + row)
    head_rate = tl.load(head_counts + 2 * match) / tl.load(head_counts + 2 * match + 1)
    lookup_rate = tl.load(lookup_counts + 2 * match) / tl.load(lookup_counts + 2 * match + 1)
    head_tokens = tl.full([], 0.0, tl.float32)
    for _ in range(head_width):
        head_tokens = (head_tokens + 1.0) * head_rate
    lookup_tokens = tl.full([], 0.0, tl.float32)
    for _ in range(count):
        lookup_tokens = (lookup_tokens + 1.0) * lookup_rate
    from_lookup = lookup_tokens > head_tokens
    lane = tl.arange(0, LANES)
    head_drafts = tl.load(head_ids + row * head_stride + lane, mask=lane < head_width, other=0)
    lookup_drafts = tl.load(lookup_ids + row * lookup_stride + lane, mask=lane < width, other=0)
    tl.store(draft_ids + row * draft_stride + lane, tl.where(from_lookup, lookup_drafts, head_drafts), mask=lane < width)
    tl.store(draft_len + row, tl.where(tl.load(live + row) != 0, tl.where(from_lookup, count, head_width), 0))
    tl.store(picked + row, from_lookup.to(tl.int32))
    if confidence is not None:
        of_head = tl.load(head_confidence + row * head_confidence_stride + lane, mask=lane < head_width, other=HEAD_BINS)
        of_lookup = HEAD_BINS + tl.minimum(match, LOOKUP_BINS - 1)
        tl.store(confidence + row * confidence_stride + lane, tl.where(from_lookup, of_lookup, of_head), mask=lane < width)


@triton.jit
def judge_drafts(ids, emitted_ids, lane, count, emitted):
    """For each row, the number of leading draft tokens that agree with the emitted tokens, and the number of drafts thereby
    tried."""
    max_judged = tl.minimum(count, emitted)
    num_accepted = tl.min(tl.where((ids == emitted_ids) & (lane < max_judged[:, None]), 1 << 20, lane), 1)
    num_accepted = tl.minimum(num_accepted, max_judged)
    return num_accepted.to(tl.float32), tl.minimum(num_accepted + 1, max_judged).to(tl.float32)


@triton.jit
def decay_and_add(counts, prior, num_accepted, num_tried, memory, match_lens, valid):
    """Decay the counts [MATCH_LENS, 2] of one proposal and add the round's accepted and tried draft tokens."""
    left = tl.maximum(0.0, 1.0 - num_tried / memory)
    old_accepted = tl.load(counts + 2 * match_lens, mask=valid, other=0.0)
    old_tried = tl.load(counts + 2 * match_lens + 1, mask=valid, other=1.0)
    prior_accepted = tl.load(prior)
    prior_tried = tl.load(prior + 1)
    tl.store(counts + 2 * match_lens, prior_accepted + (old_accepted - prior_accepted) * left + num_accepted, mask=valid)
    tl.store(counts + 2 * match_lens + 1, prior_tried + (old_tried - prior_tried) * left + num_tried, mask=valid)


@triton.jit(do_not_specialize=["num_rows", "head_width", "width", "num_match_lens"])
def update_acceptance_kernel(
    tokens, num_tokens, live, accepted_len, head_ids, lookup_ids, lookup_len, match_len, picked, head_prior, lookup_prior,
    head_counts, lookup_counts, totals, num_rows, token_stride, head_stride, lookup_stride, head_width, width, num_match_lens,
    memory, LANES: tl.constexpr, MATCH_LENS: tl.constexpr, BLOCK: tl.constexpr,
):
    lane = tl.arange(0, LANES)[None, :]
    match_lens = tl.arange(0, MATCH_LENS)
    head_num_accepted = tl.zeros([MATCH_LENS], tl.float32)
    head_tried = tl.zeros([MATCH_LENS], tl.float32)
    lookup_num_accepted = tl.zeros([MATCH_LENS], tl.float32)
    lookup_tried = tl.zeros([MATCH_LENS], tl.float32)
    head_rounds = tl.zeros([BLOCK], tl.int64)
    lookup_rounds = tl.zeros([BLOCK], tl.int64)
    head_accepted = tl.zeros([BLOCK], tl.int64)
    lookup_accepted = tl.zeros([BLOCK], tl.int64)
    for first in range(0, num_rows, BLOCK):
        row = (first + tl.arange(0, BLOCK)).to(tl.int64)
        exists = row < num_rows
        is_live = exists & (tl.load(live + row, mask=exists, other=0) != 0)
        accepted = tl.load(accepted_len + row, mask=is_live, other=-1)
        emitted = accepted + 1
        start = tl.load(num_tokens + row, mask=is_live, other=0) - emitted
        at = tokens + row[:, None] * token_stride + start[:, None] + lane
        emitted_ids = tl.load(at, mask=lane < emitted[:, None], other=-1)
        mine = (tl.load(match_len + row, mask=is_live, other=0)[:, None] == match_lens[None, :]) & is_live[:, None]
        ids = tl.load(head_ids + row[:, None] * head_stride + lane, mask=is_live[:, None] & (lane < head_width), other=-2)
        num_accepted, num_tried = judge_drafts(ids, emitted_ids, lane, tl.zeros_like(emitted) + head_width, emitted)
        head_num_accepted += tl.sum(tl.where(mine, num_accepted[:, None], 0.0), 0)
        head_tried += tl.sum(tl.where(mine, num_tried[:, None], 0.0), 0)
        ids = tl.load(lookup_ids + row[:, None] * lookup_stride + lane, mask=is_live[:, None] & (lane < width), other=-2)
        num_accepted, num_tried = judge_drafts(ids, emitted_ids, lane, tl.load(lookup_len + row, mask=is_live, other=0), emitted)
        lookup_num_accepted += tl.sum(tl.where(mine, num_accepted[:, None], 0.0), 0)
        lookup_tried += tl.sum(tl.where(mine, num_tried[:, None], 0.0), 0)
        from_lookup = tl.load(picked + row, mask=is_live, other=0)
        head_rounds += tl.where(is_live & (from_lookup == 0), 1, 0)
        lookup_rounds += tl.where(is_live & (from_lookup != 0), 1, 0)
        head_accepted += tl.where(is_live & (from_lookup == 0), accepted, 0)
        lookup_accepted += tl.where(is_live & (from_lookup != 0), accepted, 0)
    valid = match_lens < num_match_lens
    decay_and_add(head_counts, head_prior, head_num_accepted, head_tried, memory, match_lens, valid)
    decay_and_add(lookup_counts, lookup_prior, lookup_num_accepted, lookup_tried, memory, match_lens, valid)
    tl.store(totals, tl.load(totals) + tl.sum(head_rounds, 0))
    tl.store(totals + 1, tl.load(totals + 1) + tl.sum(lookup_rounds, 0))
    tl.store(totals + 2, tl.load(totals + 2) + tl.sum(head_accepted, 0))
    tl.store(totals + 3, tl.load(totals + 3) + tl.sum(lookup_accepted, 0))


def select_drafts(
    head_ids: Tensor, lookup_ids: Tensor, lookup_len: Tensor, match_len: Tensor, head_counts: Tensor, lookup_counts: Tensor,
    live: Tensor,
    *, out_draft_ids: Tensor, out_draft_len: Tensor, out_picked: Tensor, head_confidence: Tensor | None = None,
    out_confidence: Tensor | None = None, head_bins: int = 0, lookup_bins: int = 1, interpret: bool = False,
) -> None:
    """Write the proposal of each row with the larger expected number of accepted tokens; the head's in a tie.

    head_ids       int32 [R, KH], KH <= K  rows may be slices of wider ones, also those of lookup_ids and out_draft_ids
    lookup_ids     int32 [R, K] with lookup_len int32 [R] in 0..K and match_len int32 [R] in 0..M-1
    head_counts    fp32 [M, 2] by match_len: accepted and tried draft tokens; tried is above 0
    lookup_counts  fp32 [M, 2], the same for the lookup
    live           int32 [R]     0: nothing is proposed
    out_draft_ids  int32 [R, K], out_draft_len int32 [R]
    out_picked     int32 [R]     0: the head's drafts, 1: the lookup's
    head_confidence  int32 [R, KH] bin of each of the head's drafts, 0..head_bins-1; None: no confidence is written
    out_confidence   int32 [R, K]  head_confidence of the head's drafts, head_bins + match_len of the lookup's, at most
                                   head_bins + lookup_bins - 1; head_bins after the head's drafts, where a constraint may append
                                   tokens that it forces, as after a lookup without a match

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, head_width), (_, width) = head_ids.shape, lookup_ids.shape
    check("select_drafts: head_ids", head_ids, (num_rows, min(head_width, width)), torch.int32, rows=True)
    check("select_drafts: lookup_ids", lookup_ids, (num_rows, width), torch.int32, rows=True)
    check("select_drafts: out_draft_ids", out_draft_ids, (num_rows, width), torch.int32, rows=True)
    check("select_drafts: head_counts", head_counts, (lookup_counts.shape[0], 2), torch.float32)
    check("select_drafts: lookup_counts", lookup_counts, (lookup_counts.shape[0], 2), torch.float32)
    each = {"lookup_len": lookup_len, "match_len": match_len, "live": live}
    for name, tensor in (each | {"out_draft_len": out_draft_len, "out_picked": out_picked}).items():
        check(f"select_drafts: {name}", tensor, (num_rows,), torch.int32)
    if head_confidence is not None and out_confidence is not None:
        check("select_drafts: head_confidence", head_confidence, (num_rows, head_width), torch.int32, rows=True)
        check("select_drafts: out_confidence", out_confidence, (num_rows, width), torch.int32, rows=True)
    elif head_confidence is not None or out_confidence is not None:
        raise ValueError("select_drafts: head_confidence and out_confidence come together; give both or none")
    inputs = (head_ids, lookup_ids, lookup_len, match_len, head_counts, lookup_counts, live)
    if not (live.is_cuda or interpret):
        select_drafts_reference(
            *inputs, out_draft_ids=out_draft_ids, out_draft_len=out_draft_len, out_picked=out_picked,
            head_confidence=head_confidence, out_confidence=out_confidence, head_bins=head_bins, lookup_bins=lookup_bins,
        )
    elif num_rows:
        select_drafts_kernel[(num_rows,)](
            *inputs, out_draft_ids, out_draft_len, out_picked, head_ids.stride(0), lookup_ids.stride(0), out_draft_ids.stride(0),
            head_width, width, head_confidence, out_confidence, 0 if head_confidence is None else head_confidence.stride(0),
            0 if out_confidence is None else out_confidence.stride(0), HEAD_BINS=head_bins, LOOKUP_BINS=lookup_bins,
            LANES=max(2, triton.next_power_of_2(width)), num_warps=1,
        )


def update_acceptance(
    tokens: Tensor, num_tokens: Tensor, live: Tensor, accepted_len: Tensor, head_ids: Tensor, lookup_ids: Tensor,
    lookup_len: Tensor, match_len: Tensor, picked: Tensor, *, head_prior: Tensor, lookup_prior: Tensor, head_counts: Tensor,
    lookup_counts: Tensor,
    totals: Tensor, interpret: bool = False,
) -> None:
    """After the commit, compare both proposals of the round with the emitted tokens. Rows that are not live are ignored.

    tokens         int32 [R, L], num_tokens int32 [R]: the last accepted_len int32 [R] + 1 of them are new
    head_ids, lookup_ids, lookup_len, match_len, picked: inputs and output of `select_drafts`
    head_prior     fp32 [2] and lookup_prior fp32 [2]: accepted and tried to which counts decay
    head_counts    fp32 [M, 2] and lookup_counts fp32 [M, 2] by match_len, updated
    totals         int64 [4], added to: row rounds with the head's drafts, with the lookup's; accepted tokens of the two

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, head_width), (_, width), (num_match_lens, _) = head_ids.shape, lookup_ids.shape, lookup_counts.shape
    check("update_acceptance: tokens", tokens, (num_rows, tokens.shape[1]), torch.int32, rows=True)
    check("update_acceptance: head_ids", head_ids, (num_rows, head_width), torch.int32, rows=True)
    check("update_acceptance: lookup_ids", lookup_ids, (num_rows, width), torch.int32, rows=True)
    each = {"num_tokens": num_tokens, "live": live, "accepted_len": accepted_len, "lookup_len": lookup_len}
    for name, tensor in (each | {"match_len": match_len, "picked": picked}).items():
        check(f"update_acceptance: {name}", tensor, (num_rows,), torch.int32)
    for name, tensor in {"head_prior": head_prior, "lookup_prior": lookup_prior}.items():
        check(f"update_acceptance: {name}", tensor, (2,), torch.float32)
    for name, tensor in {"head_counts": head_counts, "lookup_counts": lookup_counts}.items():
        check(f"update_acceptance: {name}", tensor, (num_match_lens, 2), torch.float32)
    check("update_acceptance: totals", totals, (4,), torch.int64)
    inputs = (tokens, num_tokens, live, accepted_len, head_ids, lookup_ids, lookup_len, match_len, picked)
    if not (live.is_cuda or interpret):
        update_acceptance_reference(
            *inputs, head_prior=head_prior, lookup_prior=lookup_prior, head_counts=head_counts, lookup_counts=lookup_counts,
            totals=totals,
        )
    elif num_rows:
        update_acceptance_kernel[(1,)](
            *inputs, head_prior, lookup_prior, head_counts, lookup_counts, totals, num_rows, tokens.stride(0), head_ids.stride(0),
            lookup_ids.stride(0), head_width, width, num_match_lens, MEMORY,
            LANES=max(2, triton.next_power_of_2(width)), MATCH_LENS=max(2, triton.next_power_of_2(num_match_lens)), BLOCK=BLOCK,
            num_warps=4,
        )


def select_drafts_reference(
    head_ids: Tensor, lookup_ids: Tensor, lookup_len: Tensor, match_len: Tensor, head_counts: Tensor, lookup_counts: Tensor,
    live: Tensor,
    *, out_draft_ids: Tensor, out_draft_len: Tensor, out_picked: Tensor, head_confidence: Tensor | None = None,
    out_confidence: Tensor | None = None, head_bins: int = 0, lookup_bins: int = 1,
) -> None:
    """The same in plain torch."""
    width, head_width = lookup_ids.shape[1], head_ids.shape[1]
    match = match_len.long()
    from_lookup = _expected(lookup_counts[match], lookup_len, width) > _expected(head_counts[match], head_width, head_width)
    head_drafts = torch.zeros_like(out_draft_ids)
    head_drafts[:, :head_width] = head_ids
    out_draft_ids.copy_(torch.where(from_lookup[:, None], lookup_ids, head_drafts))
    out_draft_len.copy_(torch.where(from_lookup, lookup_len, head_width) * (live != 0))
    out_picked.copy_(from_lookup)
    if head_confidence is not None and out_confidence is not None:
        of_head = torch.full_like(out_confidence, head_bins)
        of_head[:, :head_width] = head_confidence
        of_lookup = head_bins + match_len.clamp(max=lookup_bins - 1)
        out_confidence.copy_(torch.where(from_lookup[:, None], of_lookup[:, None], of_head))


def _expected(counts: Tensor, count: Tensor | int, max_len: int) -> Tensor:
    rate, tokens = counts[:, 0] / counts[:, 1], torch.zeros_like(counts[:, 0])
    for k in range(max_len):
        tokens = torch.where(torch.as_tensor(count, device=counts.device) > k, (tokens + 1) * rate, tokens)
    return tokens


def update_acceptance_reference(
    tokens: Tensor, num_tokens: Tensor, live: Tensor, accepted_len: Tensor, head_ids: Tensor, lookup_ids: Tensor,
    lookup_len: Tensor, match_len: Tensor, picked: Tensor, *, head_prior: Tensor, lookup_prior: Tensor, head_counts: Tensor,
    lookup_counts: Tensor,
    totals: Tensor,
) -> None:
    """The same in plain torch."""
    is_live, emitted = live != 0, torch.where(live != 0, accepted_len + 1, 0)
    at = (num_tokens - emitted).long()[:, None] + torch.arange(lookup_ids.shape[1], device=tokens.device)
    emitted_ids = tokens.gather(1, at.clamp(min=0, max=tokens.shape[1] - 1))

    def judge(ids: Tensor, count: Tensor | int) -> tuple[Tensor, Tensor]:
        max_judged = emitted.clamp(max=count) if isinstance(count, int) else torch.minimum(emitted, count)
        lane = torch.arange(ids.shape[1], device=ids.device)
        num_accepted = ((ids == emitted_ids[:, : ids.shape[1]]) & (lane < max_judged[:, None])).long().cumprod(1).sum(1)
        return num_accepted.float(), torch.minimum(num_accepted + 1, max_judged).float()

    sides = ((head_ids, head_ids.shape[1], head_counts, head_prior), (lookup_ids, lookup_len, lookup_counts, lookup_prior))
    for ids, count, counts, prior in sides:
        judged = torch.stack(judge(ids, count), 1) * is_live[:, None]
        new_counts = torch.zeros_like(counts).index_add_(0, match_len.long(), judged)
        counts.copy_(prior + (counts - prior) * (1 - new_counts[:, 1:] / MEMORY).clamp(min=0) + new_counts)
    from_lookup = picked != 0
    for side, mine in enumerate((is_live & ~from_lookup, is_live & from_lookup)):
        totals[side] += mine.sum()
        totals[2 + side] += (accepted_len * mine).sum()
