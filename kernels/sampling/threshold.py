"""The search of `cutoff`: the largest logit that weighs enough together with all above it, a weight being 1 or a logit's mass.

A pass over the row sums the weights above three thresholds and lists the logits between the ends of the bracket, lane by lane;
the bracket shrinks until the list fits (two passes usually, four on flat rows); then the list, which stays in the first-level
cache, is bisected in the order-preserving integer image of fp32. No sort; sums have one fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """int32 that orders as the fp32 does; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, top, inverse_heat, COUNT: tl.constexpr):
    if COUNT:
        return tl.zeros_like(x) + 1.0
    else:
        return tl.exp((x - top) * inverse_heat)


@triton.jit
def ends_of(row, vocab, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Largest and smallest finite logit of a row, and how many are finite."""
    lanes = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        x = tl.load(row + first + lanes, mask=first + lanes < vocab, other=float("-inf"))
        most = tl.maximum(most, x)
        finite = x > float("-inf")
        least = tl.minimum(least, tl.where(finite, x, float("inf")))
        count += finite.to(tl.int32)
    return tl.max(most, 0), tl.min(least, 0), tl.sum(count, 0)


@triton.jit
def bisect(listed, length, low, high, above, wanted, top, inverse_heat, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest v of a list whose logits x >= v weigh at least `wanted` together with `above`; v is in [low, high).

    listed  [depth, BLOCK] of which lane i holds length[i] logits
    """
    lanes = tl.arange(0, BLOCK)
    depth = tl.max(length, 0)
    low_key, high_key = key_of(low).to(tl.int64), key_of(high).to(tl.int64)
    while high_key - low_key > 1:
        key = (low_key + high_key) >> 1
        threshold = value_of(key.to(tl.int32))
        sums = tl.zeros([BLOCK], tl.float32)
        for d in range(0, depth):
            x = tl.load(listed + d * BLOCK + lanes, mask=d < length, other=float("-inf"))
            sums += tl.where(x >= threshold, weight_of(x, top, inverse_heat, COUNT), 0.0)
        if above + tl.sum(sums, 0) >= wanted:
            low_key = key
        else:
            high_key = key
    # The lower end may be a threshold of the passes that rounding kept from being raised: answer with a logit of the list.
    threshold = value_of(low_key.to(tl.int32))
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for d in range(0, depth):
        x = tl.load(listed + d * BLOCK + lanes, mask=d < length, other=float("-inf"))
        least = tl.minimum(least, tl.where(x >= threshold, x, float("inf")))
    return tl.min(least, 0)


@triton.jit
def smallest_kept(
    row, listed, vocab, floor, low, top, inverse_heat, goal,
    COUNT: tl.constexpr, MAX_PASSES: tl.constexpr, STAGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest v of the row whose logits x >= v weigh at least `goal` (COUNT), or `goal` of what x >= floor weighs.

    low is finite and not above v. The bracket [low, high) holds v; `above` is the weight of x >= high, which is below the goal.
    """
    lanes = tl.arange(0, BLOCK)
    high = tl.where(top == 0, 1.1754944e-38, value_of(key_of(top) + 1))  # a card may take denormals for zero
    above = tl.zeros([], tl.float32)
    wanted = goal + above
    length = tl.zeros([BLOCK], tl.int32)
    passes = tl.zeros([], tl.int32)
    active = passes + 1
    while active > 0:
        # Weighted means: the difference of the ends may overflow.
        first_quarter = tl.maximum(low * 0.75 + high * 0.25, low)
        middle = tl.maximum(low * 0.5 + high * 0.5, first_quarter)
        last_quarter = tl.maximum(low * 0.25 + high * 0.75, middle)
        whole = tl.zeros([BLOCK], tl.float32)
        sum1, sum2, sum3 = whole, whole, whole
        length = tl.zeros([BLOCK], tl.int32)
        for first in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            x = tl.load(row + first + lanes, mask=first + lanes < vocab, other=float("-inf"))
            weight = weight_of(x, top, inverse_heat, COUNT)
            whole += tl.where(x >= floor, weight, 0.0)
            sum1 += tl.where(x >= first_quarter, weight, 0.0)
            sum2 += tl.where(x >= middle, weight, 0.0)
            sum3 += tl.where(x >= last_quarter, weight, 0.0)
            inside = (x >= low) & (x < high)
            tl.store(listed + length * BLOCK + lanes, x, mask=inside & (length < DEPTH))
            length += inside.to(tl.int32)
        if not COUNT:
            wanted = goal * tl.sum(whole, 0)
        passes += 1
        crowded = (tl.max(length, 0) > DEPTH) & (passes < MAX_PASSES) & (value_of(key_of(low) + 1) < high)
        active = crowded.to(tl.int32)
        if active > 0:
            weight1, weight2, weight3 = tl.sum(sum1, 0), tl.sum(sum2, 0), tl.sum(sum3, 0)
            if weight3 >= wanted:
                low = last_quarter
            elif weight2 >= wanted:
                low, high, above = middle, last_quarter, weight3
            elif weight1 >= wanted:
                low, high, above = first_quarter, middle, weight2
            else:
                high, above = first_quarter, weight1

    tl.debug_barrier()  # other threads may have written what a thread reads from the list
    if tl.max(length, 0) <= DEPTH:
        kept = bisect(listed, length, low, high, above, wanted, top, inverse_heat, COUNT, BLOCK)
    else:  # the row itself has the layout of a list
        rest = (vocab - lanes + BLOCK - 1) // BLOCK
        kept = bisect(row, rest, low, high, tl.zeros([], tl.float32), wanted, top, inverse_heat, COUNT, BLOCK)
    return kept
