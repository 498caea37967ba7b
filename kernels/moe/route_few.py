"""`route` for few tokens in one launch, which also copies rows of activations into the order of the list of pairs.

Every program chooses the experts of all tokens and finds the place of every pair by comparing all pairs with each other, in
registers: that takes less time than a launch. Program t copies row t of x to the places of its pairs, and one more program writes
the lists. Nothing is read back from memory and no program waits for another. Bound by launch latency. Sums over pairs run along
the first dimension of a block, which mostly lies in one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.choose import choose
from batchspec.kernels.moe.units import Routing

FEW_TOKENS, FEW_PAIRS = 16, 64
"""Maximum tokens and pairs of a launch, tokens and slots padded to powers of two. Each token has a warp, see `choose`."""


@triton.jit
def find_places(expert, pair, exists):
    """For each pair: a number that sorts like the list, its index there, its rank in its expert, the expert's number of pairs."""
    key = tl.where(exists, expert * 65536 + pair, 0x7FFFFFFF)
    less = (key[:, None] < key[None, :]).to(tl.int32)
    same = (expert[:, None] == expert[None, :]).to(tl.int32)
    found = tl.sum(less + same * less * 256 + same * 65536, 0)  # one reduction; each part is at most FEW_PAIRS
    return key, found & 255, (found >> 8) & 255, found >> 16


@triton.jit
def write_lists(
    expert, pair, exists, key, place, rank, count, out_pairs, out_places, out_offsets, out_units, out_num_read, num_units,
    NUM_EXPERTS: tl.constexpr, UNIT_PAIRS: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr,
):
    """Write the lists of `Routing` but for experts and weights, from what `find_places` returns."""
    tl.store(out_pairs + place, pair, mask=exists)
    tl.store(out_places + pair, place, mask=exists)
    routed = exists & (expert < NUM_EXPERTS)
    begins = routed & (rank % UNIT_PAIRS == 0)
    unit = tl.sum(((key[:, None] < key[None, :]) & begins[:, None]).to(tl.int32), 0)
    at = out_units + unit * 4
    tl.store(at, expert, mask=begins)
    tl.store(at + 1, place - rank, mask=begins)
    tl.store(at + 2, count, mask=begins)
    tl.store(at + 3, rank // UNIT_PAIRS, mask=begins)
    for base in range(tl.sum(begins.to(tl.int32), 0) * 4, num_units * 4, PAIRS):
        rest = base + tl.arange(0, PAIRS)
        tl.store(out_units + rest, tl.zeros([PAIRS], tl.int32), mask=rest < num_units * 4)
    CHUNK: tl.constexpr = min(LANES, 128)
    for base in tl.static_range(0, LANES, CHUNK):
        lane = base + tl.arange(0, CHUNK)
        earlier = tl.sum((expert[:, None] < lane[None, :]).to(tl.int32), 0)
        tl.store(out_offsets + lane, earlier, mask=lane < NUM_EXPERTS)
    tl.store(out_offsets + NUM_EXPERTS, tl.sum(routed.to(tl.int32), 0))
    if out_num_read is not None:
        tl.store(out_num_read, tl.sum((routed & (rank == 0)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_tokens", "num_units"])
def route_few_kernel(
    logits, bias, factors, live, x, out_ids, out_weights, out_pairs, out_places, out_offsets, out_units, out_rows, out_num_read,
    num_tokens, num_units, stride, stride_x, width,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORM: tl.constexpr, SUM_EPS: tl.constexpr,
    SCALE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, UNIT_PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    LANES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """x [num_tokens, width] or None; TOKENS: num_tokens padded to a power of two."""
    PAIRS: tl.constexpr = TOKENS * SLOTS
    own = tl.program_id(0)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    await_earlier(PDL)
    if x is not None:  # arrives while experts are chosen
        row = tl.load(x + own.to(tl.int64) * stride_x + column, mask=column < tl.where(own < num_tokens, width, 0))
    ids, weights, slots = choose(
        logits, bias, factors, live, token, num_tokens, stride, NUM_EXPERTS, TOP_K, SIGMOID, NORM, SUM_EPS, SCALE, GROUPS,
        TOP_GROUPS, LANES, SLOTS
    )
    pairs = token[:, None] * TOP_K + slots
    used = (token < num_tokens)[:, None] & (tl.arange(0, SLOTS) < TOP_K)[None, :]
    exists = used.reshape(PAIRS)
    pair = pairs.reshape(PAIRS)
    expert = tl.where(exists, ids.reshape(PAIRS), NUM_EXPERTS + 1)  # after dead tokens' NUM_EXPERTS
    key, place, rank, count = find_places(expert, pair, exists)
    if own == tl.num_programs(0) - 1:
        tl.store(out_ids + pairs, ids, mask=used)
        tl.store(out_weights + pairs, weights, mask=used)
        write_lists(
            expert, pair, exists, key, place, rank, count, out_pairs, out_places, out_offsets, out_units, out_num_read, num_units,
            NUM_EXPERTS, UNIT_PAIRS, LANES, PAIRS,
        )
    elif x is not None:
        slot = pair - own * TOP_K
        for first in tl.static_range(0, TOP_K, 4):  # four places in one reduction
            mine = exists & (slot >= first) & (slot < min(first + 4, TOP_K))
            packed = tl.sum(tl.where(mine, place << ((slot & 3) * 8), 0), 0)
            for part in tl.static_range(4):
                if first + part < TOP_K:
                    at = ((packed >> (8 * part)) & 255).to(tl.int64)
                    tl.store(out_rows + at * width + column, row, mask=column < width)


def launch_few(
    logits: Tensor, x: Tensor | None, bias: Tensor | None, factors: Tensor | None, live: Tensor | None, routing: Routing,
    out_num_read: Tensor | None, *, sigmoid: bool, norm_topk: bool, sum_eps: float, scale: float, groups: tuple[int, int],
) -> None:
    """Start the kernel with the arguments of `route`, which has checked them; it fills `routing`, with x also its rows."""
    (num_tokens, num_experts), top_k = logits.shape, routing.expert_ids.shape[1]
    tokens, width = padded(num_tokens), 0 if x is None else x.shape[1]
    route_few_kernel[(1 if x is None else num_tokens + 1,)](
        logits, bias, factors, live, x if num_tokens else None, routing.expert_ids, routing.weights, routing.pairs,
        routing.places, routing.offsets, routing.units, routing.rows if num_tokens else None, out_num_read, num_tokens,
        len(routing.units),
        logits.stride(0), 0 if x is None else x.stride(0), width,
        NUM_EXPERTS=num_experts, TOP_K=top_k, SIGMOID=sigmoid, NORM=norm_topk, SUM_EPS=sum_eps, SCALE=scale,
        GROUPS=groups[0], TOP_GROUPS=groups[1], UNIT_PAIRS=routing.unit_pairs, TOKENS=tokens,
        LANES=max(16, triton.next_power_of_2(num_experts)), SLOTS=triton.next_power_of_2(top_k),
        BLOCK=max(16, triton.next_power_of_2(width)), num_warps=tokens, **launch_args(logits),
    )


def is_few(num_tokens: int, top_k: int) -> bool:
    """Whether `launch_few` supports `num_tokens` tokens."""
    tokens = padded(num_tokens)
    return tokens <= FEW_TOKENS and tokens * triton.next_power_of_2(top_k) <= FEW_PAIRS


def padded(num_tokens: int) -> int:
    return int(triton.next_power_of_2(max(1, num_tokens)))
