"""Routings and weights that the tests of the grouped products share."""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.kernels.moe.route import lists_reference
from batchspec.kernels.moe.tiles import ExpertTile, mxfp4_rows
from batchspec.kernels.moe.units import Routing

SPREADS = ["every token other experts", "all tokens on the same", "experts without tokens"]


def routing_of(tokens: int, experts: int, top_k: int, spread: str, unit_pairs: int, device: torch.device) -> Routing:
    """A routing with random weights, whose choices are spread over the experts as named."""
    if spread == SPREADS[0]:
        ids = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    elif spread == SPREADS[1]:
        ids = torch.arange(top_k).flip(0).expand(tokens, top_k) + (experts - top_k)
    else:
        ids = torch.rand(tokens, max(top_k, experts // 2)).argsort(1)[:, :top_k] * (experts // max(top_k, experts // 2))
    return lists_reference(ids.int().contiguous().to(device), torch.rand(tokens, top_k, device=device), experts, unit_pairs)


def pairs_of_units(routing: Routing) -> list[tuple[int, int, int]]:
    """Of each unit that has pairs its expert, the first of its pairs in the list, and their number."""
    size = routing.unit_pairs
    return [
        (expert, first + index * size, min(num_pairs - index * size, size))
        for expert, first, num_pairs, index in routing.units.tolist() if num_pairs
    ]


def mxfp4_tile(tile: ExpertTile, *, gated: bool) -> ExpertTile:
    """This tile with the rows of W that MXFP4 weights have."""
    return tile._replace(block_n=mxfp4_rows(gated=gated))


def sorted_pairs(y: Tensor, routing: Routing) -> Tensor:
    """Rows in pair order -> rows in the order of the list."""
    return y[routing.pairs.long()]


def noise(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


def fp8_tolerance(device: torch.device) -> float:
    """Of sums of e4m3 products that are stored in fp32: tensor cores keep about 14 bits of them. Up to 2.3e-4 on an H200."""
    return 5e-4 if device.type == "cuda" else 1e-5


def assert_near(found: Tensor, wanted: Tensor, *, tolerance: float) -> None:
    """By the norm of the difference; NaN never passes."""
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < tolerance, float(error)
