"""What a router decides about a batch: experts, weights, the pairs of each expert, and the work list of the grouped products.

T tokens choose k of E experts each: P = T * k pairs, pair t * k + s is slot s of token t. A unit is up to `unit_pairs` pairs of
one expert that lie side by side in `pairs`; the number of units is known on the card alone, its bound on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check

FIELDS = 4
"""Of a unit: expert, index of its first pair in `pairs`, number of pairs (0: nothing to do), 0."""


class Routing(NamedTuple):
    """The outputs of `route`; see the module's docstring."""

    expert_ids: Tensor
    """int32 [T, k], slots by falling weight, the lowest id first of equals"""
    weights: Tensor
    """fp32 [T, k] (fp64 of fp64 logits)"""
    pairs: Tensor
    """int32 [P], by (expert, pair)"""
    offsets: Tensor
    """int32 [E + 1]: expert e has pairs[offsets[e]:offsets[e + 1]]"""
    units: Tensor
    """int32 [max_units, 4], by (expert, first pair), those without pairs last"""
    unit_pairs: int


def max_units(num_tokens: int, top_k: int, num_experts: int, unit_pairs: int) -> int:
    """The most units that so many pairs can need, however they are spread over the experts."""
    num_pairs = num_tokens * top_k
    return min(num_experts, num_pairs) + num_pairs // unit_pairs


def check_routing(kernel: str, routing: Routing, num_tokens: int, num_experts: int) -> None:
    """`check` what the grouped products read of a routing."""
    top_k = routing.expert_ids.shape[1]
    check(f"{kernel}: pairs", routing.pairs, (num_tokens * top_k,), torch.int32)
    check(f"{kernel}: offsets", routing.offsets, (num_experts + 1,), torch.int32)
    check(f"{kernel}: units", routing.units, (max_units(num_tokens, top_k, num_experts, routing.unit_pairs), FIELDS), torch.int32)


@triton.jit
def program_place(num_units, num_tiles, GROUP: tl.constexpr):
    """Unit and tile of rows of this program: tiles of GROUP units before the next units, units fastest.

    Units of one expert that run side by side read the same weights, and the tokens of a group stay in the second-level cache.
    """
    program = tl.program_id(0)
    first = program // (GROUP * num_tiles) * GROUP
    width = tl.minimum(num_units - first, GROUP)
    within = program % (GROUP * num_tiles)
    return first + within % width, within // width


@triton.jit
def unit_pairs(pairs, units, unit, num_rows, BLOCK_T: tl.constexpr):
    """A unit's expert, its pairs int64 [BLOCK_T], which of them exist, and their number. `pairs` None: one expert, all rows."""
    lane = tl.arange(0, BLOCK_T)
    if pairs is None:
        expert = unit * 0
        count = tl.minimum(num_rows - unit * BLOCK_T, BLOCK_T)
        pair = tl.where(lane < count, unit * BLOCK_T + lane, 0)
    else:
        expert = tl.load(units + unit * 4)
        count = tl.load(units + unit * 4 + 2)
        pair = tl.load(pairs + tl.load(units + unit * 4 + 1) + lane, mask=lane < count, other=0)
    return expert, pair.to(tl.int64), lane < count, count
