"""The experts of a token and their weights, from its logits: what the kernels of `route.py` and `route_few.py` share."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-0x7FFFFFFF - 1)
"""Less than the `ordered` integer of -inf; scores are never NaN with the sign bit."""
UNIT = tl.constexpr(2.0**40)  # what 1 is when exponentials are summed as int64: exact in any order, to 2^-40 each


@triton.jit
def ordered(number):
    """An int32 that sorts like the fp32 number; -0 and 0 give the same."""
    bits = (number + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(key):
    """The fp32 number of an int32 from `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def in_best_groups(
    key, lane, NUM_EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, LANES: tl.constexpr
):
    """key [tokens, LANES] of `ordered` scores, with LEAST for experts outside the best groups; see `route.py`."""
    group = (lane // (NUM_EXPERTS // GROUPS))[None, :]
    score = tl.zeros(key.shape, tl.float32)
    for g in tl.static_range(GROUPS):
        own = tl.where(group == g, key, LEAST)
        best = tl.max(own, 1)
        first = tl.min(tl.where(own == best[:, None], lane[None, :], LANES), 1)
        second = tl.max(tl.where(lane[None, :] == first[:, None], LEAST, own), 1)
        score = tl.where(group == g, (number_of(best) + number_of(second))[:, None], score)
    rest = tl.where((lane < NUM_EXPERTS)[None, :], ordered(score), LEAST)
    kept = tl.zeros(key.shape, tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(rest, 1)
        first = tl.min(tl.where(rest == best[:, None], group, LANES), 1)
        chosen = group == first[:, None]
        kept |= chosen
        rest = tl.where(chosen, LEAST, rest)
    return tl.where(kept, key, LEAST)


@triton.jit
def scores_of(logits, tokens, experts, exist, stride, SIGMOID: tl.constexpr):
    """The scores of these experts of the tokens, in which they are compared and weighed; NaN counts as -inf."""
    logit = tl.load(logits + tokens.to(tl.int64)[:, None] * stride + experts, mask=exist, other=float("-inf"))
    score = tl.where(logit == logit, logit.to(tl.float32), float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    return score


@triton.jit
def of_slot(values, slot, s: tl.constexpr):
    """Column s of values [tokens, SLOTS], to the bit, also of a NaN: a maximum of one integer."""
    bits = tl.where((slot == s)[None, :], values.to(tl.int32, bitcast=True), LEAST)
    return tl.max(bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def choose(
    logits, bias, factors, live, tokens, num_tokens, stride, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, NORM: tl.constexpr, SUM_EPS: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
):
    """Experts int32, weights fp32 and places of the tokens with indices `tokens`: three blocks [tokens, SLOTS], see `route.py`.

    Column s of a token belongs to its slot `places`, which is s unless a bias reorders the slots. Columns from TOP_K on are
    unspecified. LANES, SLOTS: E and k padded to powers of two.

    A score is compared as an int32 that sorts like the number, and of those equal to the largest the lowest id wins: a warp finds
    a maximum of int32 in one instruction. The loop over slots finds ids alone; then the scores of the chosen experts are computed
    once more, from logits that the cache still has: that takes less time than to sum up a score in each turn.

    A token's weights have the same bits in every launch: no sum depends on how a launch divides a block among its threads. The
    chosen weights are added one by one, in the order of the choice; the sum of all experts is one of whole numbers.
    """
    lane = tl.arange(0, LANES)
    slot = tl.arange(0, SLOTS)
    inside = (tokens < num_tokens)[:, None] & (lane < NUM_EXPERTS)[None, :]
    score = scores_of(logits, tokens, lane[None, :], inside, stride, SIGMOID)
    choice = score
    if bias is not None:
        choice += tl.load(bias + lane, mask=lane < NUM_EXPERTS, other=0.0)[None, :]
    key = tl.where((lane < NUM_EXPERTS)[None, :], ordered(choice), LEAST)
    if GROUPS > 1:
        key = in_best_groups(key, lane, NUM_EXPERTS, GROUPS, TOP_GROUPS, LANES)
    ids = tl.zeros([tokens.shape[0], SLOTS], tl.int32)
    for s in range(TOP_K):  # many turns stay a loop, whose two reductions fit the cache of instructions
        best = tl.max(key, 1)
        first = tl.min(tl.where(key == best[:, None], lane[None, :], LANES), 1)
        ids = tl.where((slot == s)[None, :], first[:, None], ids)
        key = tl.where(lane[None, :] == first[:, None], LEAST, key)
    used = (slot < TOP_K)[None, :]
    values = scores_of(logits, tokens, ids, used & (tokens < num_tokens)[:, None], stride, SIGMOID)
    if not SIGMOID:
        largest = of_slot(values, slot, 0)
        values = tl.exp(values - largest[:, None])
        if not NORM:
            shares = (tl.exp(score - largest[:, None]) * UNIT).to(tl.int64)  # at most 1 each, and the largest is 1
            values = values / (tl.sum(shares, 1).to(tl.float32) / UNIT)[:, None]
    places = slot[None, :] + tl.zeros([tokens.shape[0], SLOTS], tl.int32)
    if bias is not None:  # slots were found by s + bias: sort them by s, before a division by 0 can make weights NaN
        before = (values[:, None, :] > values[:, :, None]) | (
            (values[:, None, :] == values[:, :, None]) & (ids[:, None, :] < ids[:, :, None])
        )
        places = tl.sum((before & used[:, None, :]).to(tl.int32), 2)
    if NORM:
        total = tl.zeros([tokens.shape[0]], tl.float32)
        for s in tl.static_range(TOP_K):
            total += of_slot(values, slot, s)
        if SUM_EPS != 0.0:
            total += SUM_EPS
        values = values / total[:, None]
    if SCALE != 1.0:
        values = values * SCALE
    if factors is not None:
        values = values * tl.load(factors + ids, mask=used & (ids < NUM_EXPERTS), other=0.0)
    if live is not None:
        dead = (tl.load(live + tokens, mask=tokens < num_tokens, other=0) == 0)[:, None]
        ids = tl.where(dead, NUM_EXPERTS, ids)
        values = tl.where(dead, 0.0, values)
    return ids, values, places
