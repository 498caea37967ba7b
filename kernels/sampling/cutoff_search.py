"""The search of `cutoff`: the largest logit v such that the logits x >= v together reach a wanted weight.

The weight of a logit is 1 (top-k) or its probability mass (top-p). The search keeps a bracket [low, high) that contains v. One
pass over the row sums the weights above three thresholds that quarter the bracket, and lists the logits inside it, lane by lane.
Passes shrink the bracket until the list fits (usually two, four for flat distributions). The list then stays in the L1 cache and
is bisected over the integer keys of fp32, which have the order of the floats. No sort; sums have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """int32 key with the order of the fp32 values; -0.0 and 0.0 have the same key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The inverse of `key_of`."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, top, inverse_temp, COUNT: tl.constexpr):
    if COUNT:
        return tl.zeros_like(x) + 1.0
    else:
        return tl.exp((x - top) * inverse_temp)


@triton.jit
def finite_range(row, vocab, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Largest and smallest finite logit of a row, and the number of finite ones."""
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
def bisect(listed, length, low, high, above, wanted, top, inverse_temp, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest v in [low, high) such that `above` plus the weight of the listed logits x >= v is at least `wanted`.

    listed  [depth, BLOCK], lane i holds length[i] logits
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
            sums += tl.where(x >= threshold, weight_of(x, top, inverse_temp, COUNT), 0.0)
        if above + tl.sum(sums, 0) >= wanted:
            low_key = key
        else:
            high_key = key
    # Through rounding `low` may still be a threshold of an earlier pass, which is no logit: return the next logit of the list.
    threshold = value_of(low_key.to(tl.int32))
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for d in range(0, depth):
        x = tl.load(listed + d * BLOCK + lanes, mask=d < length, other=float("-inf"))
        least = tl.minimum(least, tl.where(x >= threshold, x, float("inf")))
    return tl.min(least, 0)


@triton.jit
def smallest_kept(
    row, listed, vocab, floor, low, top, inverse_temp, goal,
    COUNT: tl.constexpr, MAX_PASSES: tl.constexpr, STAGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """The largest logit v of the row such that the weight of the logits x >= v reaches the goal.

    COUNT  the weight is a count, and `goal` is that of top-k; else it is probability mass, and `goal` is the share of top-p in
           the mass of the logits x >= floor
    low    finite, at most v

    Invariant: v is in [low, high), and `above`, the weight of the logits x >= high, is below the goal.
    """
    lanes = tl.arange(0, BLOCK)
    high = tl.where(top == 0, 1.1754944e-38, value_of(key_of(top) + 1))  # not a denormal: a GPU may flush it to zero
    above = tl.zeros([], tl.float32)
    wanted = goal + above
    length = tl.zeros([BLOCK], tl.int32)
    passes = tl.zeros([], tl.int32)
    active = passes + 1
    while active > 0:
        # Weighted means, because high - low may overflow.
        first_quarter = tl.maximum(low * 0.75 + high * 0.25, low)
        middle = tl.maximum(low * 0.5 + high * 0.5, first_quarter)
        last_quarter = tl.maximum(low * 0.25 + high * 0.75, middle)
        whole = tl.zeros([BLOCK], tl.float32)
        sum1, sum2, sum3 = whole, whole, whole
        length = tl.zeros([BLOCK], tl.int32)
        for first in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            x = tl.load(row + first + lanes, mask=first + lanes < vocab, other=float("-inf"))
            weight = weight_of(x, top, inverse_temp, COUNT)
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

    tl.debug_barrier()  # a thread may read list entries that other threads wrote
    if tl.max(length, 0) <= DEPTH:
        kept = bisect(listed, length, low, high, above, wanted, top, inverse_temp, COUNT, BLOCK)
    else:  # too long for the list: bisect the row itself, which has the same layout
        rest = (vocab - lanes + BLOCK - 1) // BLOCK
        kept = bisect(row, rest, low, high, tl.zeros([], tl.float32), wanted, top, inverse_temp, COUNT, BLOCK)
    return kept
