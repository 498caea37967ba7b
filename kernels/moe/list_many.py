"""The lists of a routing of many pairs, in two launches that read each pair once (`list_pairs.py` makes those of fewer).

    count_kernel   counts[b, e] = number of pairs of expert e among the PAIRS pairs of block b
    place_kernel   a pair's place = pairs of earlier experts + those of its expert in earlier blocks, and before it in its block

No atomics, so that the lists are the same in every run. Bound by reading the counts once per block from the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.units import Routing, write_units

PAIRS = 512
"""Pairs of a program: with 65,536, a program for each multiprocessor of an H200."""
MOST_BLOCKS = 256
"""Number of blocks up to which programs have PAIRS pairs, not a multiple of it: each program reads the counts of all blocks."""
CHUNK = 128
"""Pairs that a program compares with each other at once."""
ROWS = 16
"""Blocks whose counts a program reads at once."""


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(expert_ids, out_counts, num_pairs, LANES: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr):
    """Program b counts the pairs of each expert in block b; those of dead tokens as those of one more expert."""
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    await_earlier(PDL)
    expert = tl.load(expert_ids + pair, mask=pair < num_pairs, other=0)
    counts = tl.histogram(expert, LANES, mask=pair < num_pairs)
    tl.store(out_counts + block * LANES + tl.arange(0, LANES), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_units", "num_blocks"])
def place_kernel(
    expert_ids, counts, out_pairs, out_places, out_offsets, out_units, out_num_read, num_pairs, num_units, num_blocks,
    NUM_EXPERTS: tl.constexpr, UNIT_PAIRS: tl.constexpr, LARGEST_FIRST: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """Program b places the pairs of block b; the one after the last block writes offsets and units."""
    own = tl.program_id(0)
    lane = tl.arange(0, LANES)
    await_earlier(PDL)
    total = tl.zeros([LANES], tl.int32)
    place = tl.zeros([LANES], tl.int32)
    for base in range(0, num_blocks, ROWS):
        block = (base + tl.arange(0, ROWS))[:, None]
        read = tl.load(counts + block * LANES + lane[None, :], mask=block < num_blocks, other=0)
        total += tl.sum(read, 0)
        place += tl.sum(tl.where(block < own, read, 0), 0)
    if own == num_blocks:
        live = tl.where(lane < NUM_EXPERTS, total, 0)
        write_units(live, out_offsets, out_units, out_num_read, num_units, NUM_EXPERTS, UNIT_PAIRS, LARGEST_FIRST, LANES)
        return
    place += tl.cumsum(total, 0) - total
    index = tl.arange(0, CHUNK)
    earlier = index[:, None] < index[None, :]
    for at in range(own * PAIRS, tl.minimum(own * PAIRS + PAIRS, num_pairs), CHUNK):
        pair = at + index
        exists = pair < num_pairs
        expert = tl.load(expert_ids + pair, mask=exists, other=0)
        rank = tl.sum((earlier & (expert[:, None] == expert[None, :])).to(tl.int32), 0)  # pairs that do not exist come last
        found = tl.gather(place, expert, 0) + rank
        tl.store(out_pairs + found, pair, mask=exists)
        tl.store(out_places + pair, found, mask=exists)
        place += tl.histogram(expert, LANES, mask=exists)


def launch_many(routing: Routing, num_experts: int, out_num_read: Tensor | None, *, largest_first: bool) -> None:
    """Fill the lists of `routing`, whose experts are chosen. largest_first: see `route`"""
    num_pairs, blocks = len(routing.pairs), triton.cdiv(len(routing.pairs), PAIRS)
    pairs = PAIRS * triton.next_power_of_2(triton.cdiv(blocks, MOST_BLOCKS))
    blocks, lanes = triton.cdiv(num_pairs, pairs), max(16, triton.next_power_of_2(num_experts + 1))
    counts, pdl = routing.pairs.new_empty(blocks, lanes), launch_args(routing.pairs)
    count_kernel[(blocks,)](routing.expert_ids, counts, num_pairs, LANES=lanes, PAIRS=pairs, num_warps=4, **pdl)
    place_kernel[(blocks + 1,)](
        routing.expert_ids, counts, routing.pairs, routing.places, routing.offsets, routing.units, out_num_read, num_pairs,
        len(routing.units), blocks, NUM_EXPERTS=num_experts, UNIT_PAIRS=routing.unit_pairs, LARGEST_FIRST=largest_first,
        LANES=lanes, PAIRS=pairs, CHUNK=min(CHUNK, pairs), ROWS=ROWS, num_warps=4, **pdl,
    )
