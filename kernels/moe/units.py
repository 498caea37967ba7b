"""A routed batch: experts and weights of each token, pairs of each expert, and the units (work list) of the grouped products.

T tokens choose k of E experts each. That makes P = T * k pairs (token, slot); pair t * k + s is slot s of token t.
`pairs` lists them sorted by expert. A unit is up to `unit_pairs` adjacent pairs of one expert in this list; each program of a
grouped product works on one unit. Only the GPU knows the number of units; the host launches for an upper bound (`max_units`).
Units are sorted by expert, or experts with the largest units come first, so that the programs that run longest do not start last.
A dead token, whose result is not used, goes through no expert: no unit has its pairs, and no product writes their rows.
Rows are in pair order if row p belongs to pair p, and in the order of the list if row i belongs to pair pairs[i].
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check

FIELDS = 4
"""Four numbers describe a unit: its expert, the place of the expert's first pair in `pairs`, the expert's number of pairs (0: the
unit is empty), and which of the expert's units it is, from 0."""
SIZE_STEP = tl.constexpr(16)
"""Units whose numbers of pairs fall into the same step of this size count as equally large."""


class Routing(NamedTuple):
    """The outputs of `route`; see the module's docstring."""

    expert_ids: Tensor
    """int32 [T, k]; slots of a token sorted by weight, largest first, then by id, lowest first. E, which is no expert, in every
    slot of a dead token"""
    weights: Tensor
    """[T, k], fp32; fp64 if the logits were fp64. 0 for dead tokens"""
    pairs: Tensor
    """int32 [P], sorted by expert, then by pair; those of dead tokens come last"""
    places: Tensor
    """int32 [P]: pair p is pairs[places[p]]"""
    offsets: Tensor
    """int32 [E + 1]: the pairs of expert e are pairs[offsets[e]:offsets[e + 1]]; offsets[E]: all that have experts"""
    units: Tensor
    """int32 [max_units, 4], see `FIELDS`: experts by id, or largest first (see `route`); the units of an expert side by side, by
    index; units without pairs come last"""
    unit_pairs: int
    """Maximum number of pairs of a unit."""
    rows: Tensor | None = None
    """[P, H]: the rows of the tokens' activations in the order of the list, if `route` has copied them in the same launch."""


def max_units(num_tokens: int, top_k: int, num_experts: int, unit_pairs: int) -> int:
    """An upper bound of the number of units of this many tokens, whatever experts they choose."""
    num_pairs = num_tokens * top_k
    return min(num_experts, num_pairs) + num_pairs // unit_pairs


def check_routing(kernel: str, routing: Routing, num_tokens: int, num_experts: int) -> None:
    """`check` the tensors of a routing that the grouped products read. Raises ValueError."""
    top_k = routing.expert_ids.shape[1]
    check(f"{kernel}: pairs", routing.pairs, (num_tokens * top_k,), torch.int32)
    check(f"{kernel}: offsets", routing.offsets, (num_experts + 1,), torch.int32)
    check(f"{kernel}: units", routing.units, (max_units(num_tokens, top_k, num_experts, routing.unit_pairs), FIELDS), torch.int32)


@triton.jit
def program_place(units, num_tiles, UNIT_PAIRS: tl.constexpr):
    """This program's expert, the first of its unit's pairs in the list and their number, and its tile of rows of W.

    Experts follow each other in the order of their units. The programs of an expert run tile by tile; for a tile, unit by unit.
    So neighbouring programs read the same rows of W, and an expert's tokens stay in the L2 cache, if they fit, until its last
    tile.
    """
    program = tl.program_id(0)
    unit = units + program // num_tiles * 4
    expert, first, num_pairs, index = tl.load(unit), tl.load(unit + 1), tl.load(unit + 2), tl.load(unit + 3)
    num_units = tl.maximum((num_pairs + UNIT_PAIRS - 1) // UNIT_PAIRS, 1)
    place = index * num_tiles + program % num_tiles  # among the programs of the expert
    skipped = place % num_units * UNIT_PAIRS
    return expert, first + skipped, tl.minimum(num_pairs - skipped, UNIT_PAIRS), place // num_units


@triton.jit
def write_units(
    counts, out_offsets, out_units, out_num_read, num_units, NUM_EXPERTS: tl.constexpr, UNIT_PAIRS: tl.constexpr,
    LARGEST_FIRST: tl.constexpr, LANES: tl.constexpr,
):
    """Write offsets, units and the number of experts with pairs, from `counts`, the number of pairs of each expert [LANES].

    Returns the index of each expert's first pair in the list of pairs [LANES].
    """
    lane = tl.arange(0, LANES)
    if out_num_read is not None:
        tl.store(out_num_read, tl.sum((counts > 0).to(tl.int32), 0))
    first = tl.cumsum(counts, 0) - counts
    tl.store(out_offsets + lane, first, mask=lane < NUM_EXPERTS)
    tl.store(out_offsets + NUM_EXPERTS, tl.sum(counts, 0))
    units = (counts + UNIT_PAIRS - 1) // UNIT_PAIRS
    begin = units_before(counts, units, UNIT_PAIRS, LANES) if LARGEST_FIRST else tl.cumsum(units, 0) - units
    for index in range(tl.max(units, 0)):
        at = out_units + (begin + index) * 4
        exists = index < units
        tl.store(at, lane, mask=exists)
        tl.store(at + 1, first, mask=exists)
        tl.store(at + 2, counts, mask=exists)
        tl.store(at + 3, tl.zeros([LANES], tl.int32) + index, mask=exists)
    for base in range(tl.sum(units, 0) * 4, num_units * 4, LANES):
        tl.store(out_units + base + lane, tl.zeros([LANES], tl.int32), mask=base + lane < num_units * 4)
    return first


@triton.jit
def units_before(counts, units, UNIT_PAIRS: tl.constexpr, LANES: tl.constexpr):
    """The number of units before those of each expert, if experts are sorted by the size of their first unit in steps of
    SIZE_STEP pairs, largest first, then by id [LANES]. counts: numbers of pairs"""
    SIZES: tl.constexpr = (UNIT_PAIRS + SIZE_STEP - 1) // SIZE_STEP
    PADDED: tl.constexpr = triton.next_power_of_2(SIZES)
    place = SIZES - (tl.minimum(counts, UNIT_PAIRS) + SIZE_STEP - 1) // SIZE_STEP
    own = tl.arange(0, PADDED)[:, None] == place[None, :]
    found = tl.where(own, units[None, :], 0).reshape(PADDED * LANES)
    earlier = (tl.cumsum(found, 0) - found).reshape(PADDED, LANES)
    return tl.sum(tl.where(own, earlier, 0), 0)


def rows_by_expert(routing: Routing) -> Iterator[tuple[int, slice]]:
    """(expert, its rows of the list) for each expert that has pairs. The host reads their number, which synchronises on a GPU."""
    for expert, (begin, end) in enumerate(pairwise(routing.offsets.tolist())):
        if end > begin:
            yield expert, slice(begin, end)
