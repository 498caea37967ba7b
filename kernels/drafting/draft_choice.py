"""Each row has two proposals a round, a head's and a lookup's: pick the one of which more tokens are expected to be accepted.

    pick      E = p + p^2 + .. + p^n for n drafts, each accepted with probability p if those before it are; the lookup is picked
              if its E is larger. p = kept / tried over the job, of both proposals by the length of the lookup's match
    observe   after the commit both proposals are compared with the emitted tokens: n' = min(n, emitted) of them can be judged,
              m agree up to the first that does not; tried += min(m + 1, n'), kept += m, older counts fade

What the target emits does not depend on what was proposed, so the proposal that was not picked is judged as well as the other,
and no row needs to try one only to learn about it. Counts fade to a prior: prior + (old - prior) * max(0, 1 - tried / memory).

The head's rate is by match length too: the head predicts text with a long match better than other text. Its rate in the row, in
place of that rate or combined with it, picked the lookup too often. Whether both proposals begin with the same token, and rates
by position, added nothing. Tokens a round by replay of SmolLM2-135M's rows, 128 of GSM8K and 72 of Spec-Bench, K = 3 / 5: the
head alone 3.102 / 3.935 and 2.203 / 2.414, lookup 1.558 / 1.624 and 1.455 / 1.513, by row 3.068 / 3.880 and 2.246 / 2.494, by
match length 3.102 / 3.934 and 2.267 / 2.514, the better one each time 3.208 / 4.090 and 2.351 / 2.621.
Bound by launch latency.
Source: expected accepted tokens of a chain, Leviathan et al. 2023 (arXiv 2211.17192), by measured rates.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import check

MEMORY = 4096.0
"""Drafts of a kind after which a count is forgotten."""
BLOCK = 64


@triton.jit(do_not_specialize=["head_width", "width"])
def pick_kernel(
    head_ids, lookup_ids, lookup_len, match_len, head_odds, lookup_odds, live, draft_ids, draft_len, picked, head_stride,
    lookup_stride,
    draft_stride, head_width, width, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(lookup_len + row)
    match = tl.load(match_len + row)
    head_rate = tl.load(head_odds + 2 * match) / tl.load(head_odds + 2 * match + 1)
    lookup_rate = tl.load(lookup_odds + 2 * match) / tl.load(lookup_odds + 2 * match + 1)
    head_tokens = tl.full([], 0.0, tl.float32)
    for _ in range(head_width):
        head_tokens = (head_tokens + 1.0) * head_rate
    lookup_tokens = tl.full([], 0.0, tl.float32)
    for _ in range(count):
        lookup_tokens = (lookup_tokens + 1.0) * lookup_rate
    from_lookup = lookup_tokens > head_tokens
    lane = tl.arange(0, LANES)
    of_head = tl.load(head_ids + row * head_stride + lane, mask=lane < head_width, other=0)
    of_lookup = tl.load(lookup_ids + row * lookup_stride + lane, mask=lane < width, other=0)
    tl.store(draft_ids + row * draft_stride + lane, tl.where(from_lookup, of_lookup, of_head), mask=lane < width)
    tl.store(draft_len + row, tl.where(tl.load(live + row) != 0, tl.where(from_lookup, count, head_width), 0))
    tl.store(picked + row, from_lookup.to(tl.int32))


@triton.jit
def judged(ids, came, lane, count, emitted):
    """How many of the first drafts agree with the tokens that came, and how many could be judged."""
    most = tl.minimum(count, emitted)
    kept = tl.min(tl.where((ids == came) & (lane < most[:, None]), 1 << 20, lane), 1)
    kept = tl.minimum(kept, most)
    return kept.to(tl.float32), tl.minimum(kept + 1, most).to(tl.float32)


@triton.jit
def learn(odds, prior, kept, tried, memory, kinds, known):
    """Fade the counts [KINDS] of one proposal and add what the round kept and tried of it."""
    left = tl.maximum(0.0, 1.0 - tried / memory)
    old_kept = tl.load(odds + 2 * kinds, mask=known, other=0.0)
    old_tried = tl.load(odds + 2 * kinds + 1, mask=known, other=1.0)
    prior_kept = tl.load(prior)
    prior_tried = tl.load(prior + 1)
    tl.store(odds + 2 * kinds, prior_kept + (old_kept - prior_kept) * left + kept, mask=known)
    tl.store(odds + 2 * kinds + 1, prior_tried + (old_tried - prior_tried) * left + tried, mask=known)


@triton.jit(do_not_specialize=["num_rows", "head_width", "width", "num_kinds"])
def observe_kernel(
    tokens, num_tokens, live, accepted_len, head_ids, lookup_ids, lookup_len, match_len, picked, head_prior, lookup_prior,
    head_odds,
    lookup_odds, counts, num_rows, token_stride, head_stride, lookup_stride, head_width, width, num_kinds, memory,
    LANES: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES)[None, :]
    kinds = tl.arange(0, KINDS)
    head_kept = tl.zeros([KINDS], tl.float32)
    head_tried = tl.zeros([KINDS], tl.float32)
    lookup_kept = tl.zeros([KINDS], tl.float32)
    lookup_tried = tl.zeros([KINDS], tl.float32)
    head_rounds = tl.zeros([BLOCK], tl.int64)
    lookup_rounds = tl.zeros([BLOCK], tl.int64)
    head_accepted = tl.zeros([BLOCK], tl.int64)
    lookup_accepted = tl.zeros([BLOCK], tl.int64)
    for first in range(0, num_rows, BLOCK):
        row = (first + tl.arange(0, BLOCK)).to(tl.int64)
        there = row < num_rows
        lives = there & (tl.load(live + row, mask=there, other=0) != 0)
        accepted = tl.load(accepted_len + row, mask=lives, other=-1)
        emitted = accepted + 1
        start = tl.load(num_tokens + row, mask=lives, other=0) - emitted
        at = tokens + row[:, None] * token_stride + start[:, None] + lane
        came = tl.load(at, mask=lane < emitted[:, None], other=-1)
        mine = (tl.load(match_len + row, mask=lives, other=0)[:, None] == kinds[None, :]) & lives[:, None]
        ids = tl.load(head_ids + row[:, None] * head_stride + lane, mask=lives[:, None] & (lane < head_width), other=-2)
        kept, tried = judged(ids, came, lane, tl.zeros_like(emitted) + head_width, emitted)
        head_kept += tl.sum(tl.where(mine, kept[:, None], 0.0), 0)
        head_tried += tl.sum(tl.where(mine, tried[:, None], 0.0), 0)
        ids = tl.load(lookup_ids + row[:, None] * lookup_stride + lane, mask=lives[:, None] & (lane < width), other=-2)
        kept, tried = judged(ids, came, lane, tl.load(lookup_len + row, mask=lives, other=0), emitted)
        lookup_kept += tl.sum(tl.where(mine, kept[:, None], 0.0), 0)
        lookup_tried += tl.sum(tl.where(mine, tried[:, None], 0.0), 0)
        from_lookup = tl.load(picked + row, mask=lives, other=0)
        head_rounds += tl.where(lives & (from_lookup == 0), 1, 0)
        lookup_rounds += tl.where(lives & (from_lookup != 0), 1, 0)
        head_accepted += tl.where(lives & (from_lookup == 0), accepted, 0)
        lookup_accepted += tl.where(lives & (from_lookup != 0), accepted, 0)
    known = kinds < num_kinds
    learn(head_odds, head_prior, head_kept, head_tried, memory, kinds, known)
    learn(lookup_odds, lookup_prior, lookup_kept, lookup_tried, memory, kinds, known)
    tl.store(counts, tl.load(counts) + tl.sum(head_rounds, 0))
    tl.store(counts + 1, tl.load(counts + 1) + tl.sum(lookup_rounds, 0))
    tl.store(counts + 2, tl.load(counts + 2) + tl.sum(head_accepted, 0))
    tl.store(counts + 3, tl.load(counts + 3) + tl.sum(lookup_accepted, 0))


def pick_drafts(
    head_ids: Tensor, lookup_ids: Tensor, lookup_len: Tensor, match_len: Tensor, head_odds: Tensor, lookup_odds: Tensor,
    live: Tensor,
    *, out_draft_ids: Tensor, out_draft_len: Tensor, out_picked: Tensor, interpret: bool = False,
) -> None:  # fmt: skip
    """The proposal of each row from which more is expected; the head's where both promise the same.

    head_ids   int32 [R, KH], KH <= K  rows may be slices of wider ones, as those of lookup_ids and out_draft_ids
    lookup_ids   int32 [R, K] with lookup_len int32 [R] in 0..K and match_len int32 [R] in 0..M-1
    head_odds  fp32 [M, 2] and lookup_odds fp32 [M, 2] by match_len: kept and tried, tried above 0
    live       int32 [R]     0: nothing is proposed
    out_draft_ids int32 [R, K], out_draft_len int32 [R]; out_picked int32 [R] 0: the head's, 1: the lookup's

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, head_width), (_, width) = head_ids.shape, lookup_ids.shape
    check("pick_drafts: head_ids", head_ids, (num_rows, min(head_width, width)), torch.int32, rows=True)
    check("pick_drafts: lookup_ids", lookup_ids, (num_rows, width), torch.int32, rows=True)
    check("pick_drafts: out_draft_ids", out_draft_ids, (num_rows, width), torch.int32, rows=True)
    check("pick_drafts: head_odds", head_odds, (lookup_odds.shape[0], 2), torch.float32)
    check("pick_drafts: lookup_odds", lookup_odds, (lookup_odds.shape[0], 2), torch.float32)
    each = {
        "lookup_len": lookup_len,
        "match_len": match_len,
        "live": live,
        "out_draft_len": out_draft_len,
        "out_picked": out_picked,
    }
    for name, tensor in each.items():
        check(f"pick_drafts: {name}", tensor, (num_rows,), torch.int32)
    inputs = (head_ids, lookup_ids, lookup_len, match_len, head_odds, lookup_odds, live)
    if not (live.is_cuda or interpret):
        pick_drafts_reference(*inputs, out_draft_ids=out_draft_ids, out_draft_len=out_draft_len, out_picked=out_picked)
    elif num_rows:
        pick_kernel[(num_rows,)](
            *inputs, out_draft_ids, out_draft_len, out_picked, head_ids.stride(0), lookup_ids.stride(0), out_draft_ids.stride(0),
            head_width, width, LANES=max(2, triton.next_power_of_2(width)), num_warps=1,
        )  # fmt: skip


def observe_drafts(
    tokens: Tensor, num_tokens: Tensor, live: Tensor, accepted_len: Tensor, head_ids: Tensor, lookup_ids: Tensor,
    lookup_len: Tensor,
    match_len: Tensor, picked: Tensor, *, head_prior: Tensor, lookup_prior: Tensor, head_odds: Tensor, lookup_odds: Tensor,
    counts: Tensor, interpret: bool = False,
) -> None:  # fmt: skip
    """Judge both proposals of a round by the tokens that came, behind its commit. Rows that are not live are left out.

    tokens        int32 [R, L], num_tokens int32 [R]: accepted_len int32 [R] + 1 of them are new
    head_ids ..   and match_len, picked: as `pick_drafts` had and gave them
    head_prior    fp32 [2] and lookup_prior fp32 [2]: kept and tried that counts fade to
    head_odds     fp32 [M, 2] and lookup_odds fp32 [M, 2] by match_len, changed
    counts        int64 [4], added to: rounds of rows with the head's drafts, with the lookup's; drafts accepted of the two

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, head_width), (_, width), (num_kinds, _) = head_ids.shape, lookup_ids.shape, lookup_odds.shape
    check("observe_drafts: tokens", tokens, (num_rows, tokens.shape[1]), torch.int32, rows=True)
    check("observe_drafts: head_ids", head_ids, (num_rows, head_width), torch.int32, rows=True)
    check("observe_drafts: lookup_ids", lookup_ids, (num_rows, width), torch.int32, rows=True)
    each = {"num_tokens": num_tokens, "live": live, "accepted_len": accepted_len, "lookup_len": lookup_len}
    for name, tensor in (each | {"match_len": match_len, "picked": picked}).items():
        check(f"observe_drafts: {name}", tensor, (num_rows,), torch.int32)
    for name, tensor in {"head_prior": head_prior, "lookup_prior": lookup_prior}.items():
        check(f"observe_drafts: {name}", tensor, (2,), torch.float32)
    for name, tensor in {"head_odds": head_odds, "lookup_odds": lookup_odds}.items():
        check(f"observe_drafts: {name}", tensor, (num_kinds, 2), torch.float32)
    check("observe_drafts: counts", counts, (4,), torch.int64)
    inputs = (tokens, num_tokens, live, accepted_len, head_ids, lookup_ids, lookup_len, match_len, picked)
    if not (live.is_cuda or interpret):
        observe_drafts_reference(
            *inputs, head_prior=head_prior, lookup_prior=lookup_prior, head_odds=head_odds, lookup_odds=lookup_odds, counts=counts
        )
    elif num_rows:
        observe_kernel[(1,)](
            *inputs, head_prior, lookup_prior, head_odds, lookup_odds, counts, num_rows, tokens.stride(0), head_ids.stride(0),
            lookup_ids.stride(0), head_width, width, num_kinds, MEMORY,
            LANES=max(2, triton.next_power_of_2(width)), KINDS=max(2, triton.next_power_of_2(num_kinds)), BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip


def pick_drafts_reference(
    head_ids: Tensor, lookup_ids: Tensor, lookup_len: Tensor, match_len: Tensor, head_odds: Tensor, lookup_odds: Tensor,
    live: Tensor,
    *, out_draft_ids: Tensor, out_draft_len: Tensor, out_picked: Tensor,
) -> None:  # fmt: skip
    """The same in plain torch."""
    width, head_width = lookup_ids.shape[1], head_ids.shape[1]
    kind = match_len.long()
    from_lookup = _expected(lookup_odds[kind], lookup_len, width) > _expected(head_odds[kind], head_width, head_width)
    of_head = torch.zeros_like(out_draft_ids)
    of_head[:, :head_width] = head_ids
    out_draft_ids.copy_(torch.where(from_lookup[:, None], lookup_ids, of_head))
    out_draft_len.copy_(torch.where(from_lookup, lookup_len, head_width) * (live != 0))
    out_picked.copy_(from_lookup)


def _expected(odds: Tensor, count: Tensor | int, most: int) -> Tensor:
    rate, tokens = odds[:, 0] / odds[:, 1], torch.zeros_like(odds[:, 0])
    for k in range(most):
        tokens = torch.where(torch.as_tensor(count, device=odds.device) > k, (tokens + 1) * rate, tokens)
    return tokens


def observe_drafts_reference(
    tokens: Tensor, num_tokens: Tensor, live: Tensor, accepted_len: Tensor, head_ids: Tensor, lookup_ids: Tensor,
    lookup_len: Tensor,
    match_len: Tensor, picked: Tensor, *, head_prior: Tensor, lookup_prior: Tensor, head_odds: Tensor, lookup_odds: Tensor,
    counts: Tensor,
) -> None:  # fmt: skip
    """The same in plain torch."""
    lives, emitted = live != 0, torch.where(live != 0, accepted_len + 1, 0)
    at = (num_tokens - emitted).long()[:, None] + torch.arange(lookup_ids.shape[1], device=tokens.device)
    came = tokens.gather(1, at.clamp(min=0, max=tokens.shape[1] - 1))

    def judge(ids: Tensor, count: Tensor | int) -> tuple[Tensor, Tensor]:
        most = emitted.clamp(max=count) if isinstance(count, int) else torch.minimum(emitted, count)
        lane = torch.arange(ids.shape[1], device=ids.device)
        kept = ((ids == came[:, : ids.shape[1]]) & (lane < most[:, None])).long().cumprod(1).sum(1)
        return kept.float(), torch.minimum(kept + 1, most).float()

    sides = ((head_ids, head_ids.shape[1], head_odds, head_prior), (lookup_ids, lookup_len, lookup_odds, lookup_prior))
    for ids, count, odds, prior in sides:
        fresh = torch.zeros_like(odds).index_add_(0, match_len.long(), torch.stack(judge(ids, count), 1) * lives[:, None])
        odds.copy_(prior + (odds - prior) * (1 - fresh[:, 1:] / MEMORY).clamp(min=0) + fresh)
    from_lookup = picked != 0
    for place, mine in enumerate((lives & ~from_lookup, lives & from_lookup)):
        counts[place] += mine.sum()
        counts[2 + place] += (accepted_len * mine).sum()


def main() -> None:
    bench = Bench("draft_choice")
    for rows in (16, 256, 1024):
        device = bench.device
        draw = partial(torch.randint, dtype=torch.int32, device=device)
        tokens, head, look = draw(0, 4, (rows, 512)), draw(0, 4, (rows, 3)), draw(0, 4, (rows, 8))
        lens, match, ones = draw(0, 9, (rows,)), draw(0, 13, (rows,)), torch.ones(rows, dtype=torch.int32, device=device)
        prior = torch.tensor([4.0, 8.0], device=device)
        odds: dict[str, Any] = {"head_odds": prior.repeat(13, 1), "lookup_odds": prior.repeat(13, 1)}
        out: dict[str, Any] = {"out_draft_ids": torch.empty_like(look), "out_draft_len": ones.clone(), "out_picked": ones.clone()}
        given = (head, look, lens, match, *odds.values(), ones)
        bench.row(
            f"pick R={rows} K=8 KH=3", [partial(pick_drafts, *given, **out)], [partial(pick_drafts_reference, *given, **out)],
            num_bytes=rows * 4 * 24,
        )  # fmt: skip
        came = (tokens, 500 * ones, ones, ones, head, look, lens, match, out["out_picked"])
        odds |= {"head_prior": prior, "lookup_prior": prior, "counts": torch.zeros(4, dtype=torch.int64, device=device)}
        bench.row(
            f"observe R={rows} K=8 KH=3", [partial(observe_drafts, *came, **odds)],
            [partial(observe_drafts_reference, *came, **odds)], num_bytes=rows * 4 * 36,
        )  # fmt: skip


if __name__ == "__main__":
    main()
