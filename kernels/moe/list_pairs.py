"""The lists of a routing whose experts are chosen (`Routing.pairs`, places, offsets and units).

Made without atomics, so that they are the same in every run. A program has two experts: it counts the pairs of earlier experts,
then writes each pair of its own after the earlier ones. One more counts the pairs of all experts and writes the units. Each reads
all pairs, from the L2 cache. From MANY_PAIRS on, where that takes too long, two launches have one program per block of pairs
(`list_many.py`). Bound by launch latency; by instructions where E times pairs is large.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.list_many import launch_many
from batchspec.kernels.moe.units import Routing, write_units

BLOCK = 2048
"""Pairs per iteration."""
MANY_PAIRS = 1 << 14
"""Not measured: an estimate of where eight iterations take as long as one more launch. At most 1 << 15: see `list_kernel`."""


@triton.jit
def count_pairs(expert_ids, num_pairs, NUM_EXPERTS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The number of pairs of each expert [LANES]; those of dead tokens are not counted."""
    counts = tl.zeros([LANES], tl.int32)
    for base in range(0, num_pairs, BLOCK):
        pair = base + tl.arange(0, BLOCK)
        expert = tl.load(expert_ids + pair, mask=pair < num_pairs, other=NUM_EXPERTS)
        counts += tl.histogram(expert, LANES, mask=expert < NUM_EXPERTS)
    return counts


@triton.jit(do_not_specialize=["num_pairs", "num_units"])
def list_kernel(
    expert_ids, out_pairs, out_places, out_offsets, out_units, out_num_read, num_pairs, num_units,
    NUM_EXPERTS: tl.constexpr, UNIT_PAIRS: tl.constexpr, LARGEST_FIRST: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 writes offsets and units. Program p writes the pairs of experts 2 p - 2 and 2 p - 1; expert E is that of dead
    tokens. Numbers of pairs of both, less than MANY_PAIRS, are in halves of one int32: a sum or a scan serves both."""
    own = tl.program_id(0)
    await_earlier(PDL)
    if own == 0:
        counts = count_pairs(expert_ids, num_pairs, NUM_EXPERTS, LANES, BLOCK)
        write_units(counts, out_offsets, out_units, out_num_read, num_units, NUM_EXPERTS, UNIT_PAIRS, LARGEST_FIRST, LANES)
        return
    first = (own - 1) * 2
    earlier = tl.zeros([BLOCK], tl.int32)
    for base in range(0, num_pairs, BLOCK):
        pair = base + tl.arange(0, BLOCK)
        expert = tl.load(expert_ids + pair, mask=pair < num_pairs, other=NUM_EXPERTS + 2)
        earlier += (expert < first).to(tl.int32) + ((expert <= first).to(tl.int32) << 16)
    places = tl.sum(earlier, 0)
    for base in range(0, num_pairs, BLOCK):
        pair = base + tl.arange(0, BLOCK)
        expert = tl.load(expert_ids + pair, mask=pair < num_pairs, other=NUM_EXPERTS + 2)
        second = expert == first + 1
        mine = (expert == first).to(tl.int32) + (second.to(tl.int32) << 16)
        at = places + tl.cumsum(mine, 0) - mine
        at = tl.where(second, at >> 16, at & 0xFFFF)
        tl.store(out_pairs + at, pair, mask=mine != 0)
        tl.store(out_places + pair, at, mask=mine != 0)
        places += tl.sum(mine, 0)


def launch_lists(
    routing: Routing, num_experts: int, out_num_read: Tensor | None, *, largest_first: bool, dead: bool
) -> None:
    """Fill the lists of `routing`, whose experts are chosen. largest_first: see `route`; dead: whether tokens may be dead"""
    num_pairs = len(routing.pairs)
    if num_pairs >= MANY_PAIRS:
        launch_many(routing, num_experts, out_num_read, largest_first=largest_first)
        return
    list_kernel[(1 + triton.cdiv(num_experts + dead, 2),)](
        routing.expert_ids, routing.pairs, routing.places, routing.offsets, routing.units, out_num_read, num_pairs,
        len(routing.units), NUM_EXPERTS=num_experts, UNIT_PAIRS=routing.unit_pairs, LARGEST_FIRST=largest_first,
        LANES=max(16, triton.next_power_of_2(num_experts)), BLOCK=BLOCK, num_warps=8, **launch_args(routing.pairs),
    )
