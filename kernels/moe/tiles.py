"""How a grouped product of experts is divided among programs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertTile(NamedTuple):
    """Tile sizes and launch settings of a grouped product: a program makes a tile of block_n rows of W by block_t pairs.

    The tile does not change the order in which a token's numbers are summed over K, so it may depend on the number of tokens.
    """

    block_t: int
    """Most pairs of a unit: 16, 32, 64, 128 or 256. Both products of a layer read the same units. Triton 3.6 uses other
    instructions for narrower tiles, which round differently."""
    block_n: int
    """Rows of W, a multiple of 64. A gated product reads as many of the gate and as many of up. If it is below 16 * warps, the
    warps divide the pairs among them too."""
    block_k: int
    """Columns of W per step of the loop over K."""
    stages: int
    """Steps of that loop that are loaded ahead (Triton's num_stages)."""
    warps: int
    """4 or 8."""
    tma: bool = True
    """Load weights by TMA descriptor; False: by pointers."""
    group: int = 8
    """Number of consecutive units that run all their tiles before the next units begin, so that tokens stay in the L2 cache."""


def unit_pairs_of(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype | None = None) -> int:
    """The tile over pairs, 16 to 128: a power of two that holds all pairs of most experts.

    That is their mean number plus two standard deviations, as if each token chose its experts independently.

    dtype  of the weights, as in `expert_tile`. With MXFP4, two units of 32 pairs take less time than one of 64
    """
    mean = num_tokens * top_k / num_experts
    deviation = (mean * (1 - top_k / num_experts)) ** 0.5
    pairs = min(128, max(16, 1 << (int(mean + 2 * deviation) - 1).bit_length()))
    return 32 if pairs == 64 and dtype == torch.uint8 else pairs


def expert_tile(unit_pairs: int, *, gated: bool, dtype: torch.dtype) -> ExpertTile:
    """A good tile for weights of this dtype (uint8: MXFP4); `batchspec.kernels.benchmarks.moe_bench` times others.

    Up to 32 pairs the product is bound by memory: the tiles let two or more programs share an SM, with about 100 KB in flight.
    """
    few = unit_pairs <= 32
    if dtype == torch.float32:
        return ExpertTile(unit_pairs, 64, 32, 2, 4, False)
    if dtype == torch.float8_e4m3fn:
        rows = 64 if gated and unit_pairs > 64 else 128  # sums of one block of K and total sums both take registers
        return ExpertTile(unit_pairs, rows, 128, 3 if gated or not few else 4, 4 if few else 8)
    if dtype == torch.uint8:
        # Every program gathers its own tokens, which takes longer than their products from 32 pairs on: many rows a program.
        if unit_pairs == 16:
            return ExpertTile(unit_pairs, 128, 128, 3 if gated else 4, 4)
        if unit_pairs == 32 and not gated:
            return ExpertTile(unit_pairs, 256, 128, 3, 8)
        return ExpertTile(unit_pairs, 128, 128, 4, 8)
    if unit_pairs <= 64:
        return ExpertTile(unit_pairs, 64 if gated else 128, 64, 5 if few else 4, 4)
    return ExpertTile(unit_pairs, 128, 64, 4, 8)


# Values of (block_n, block_k, stages, warps) worth timing.
PLAIN = ((64, 64, 6, 4), (64, 128, 4, 4), (128, 64, 3, 4), (128, 64, 4, 8), (128, 128, 3, 8), (256, 64, 3, 8))
FP8 = ((64, 128, 4, 4), (64, 128, 4, 8), (64, 128, 6, 4), (128, 128, 2, 4), (128, 128, 3, 4), (128, 128, 3, 8), (128, 128, 4, 8))
MXFP4 = (
    (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (128, 128, 3, 4), (128, 128, 5, 4), (128, 128, 4, 8), (256, 128, 3, 8),
)  # fmt: skip
SHARED_BYTES = 227 << 10  # of an SM that one program can use (H100)


def candidates(unit_pairs: int, *, gated: bool, dtype: torch.dtype) -> list[ExpertTile]:
    """Tiles worth timing on a GPU like an H100, that of `expert_tile` first."""
    default = expert_tile(unit_pairs, gated=gated, dtype=dtype)
    blocks = {torch.float8_e4m3fn: FP8, torch.uint8: MXFP4}.get(dtype, PLAIN)
    found = [default, default._replace(group=1), default._replace(group=64)]
    for block_n, block_k, stages, warps in blocks:
        weights = block_n * (2 if gated else 1) * block_k * dtype.itemsize // (2 if dtype == torch.uint8 else 1)
        shared = (weights + unit_pairs * block_k * (1 if dtype == torch.float8_e4m3fn else 2)) * stages
        sums = block_n * unit_pairs * (2 if gated else 1) // (32 * warps)  # fp32 registers per thread
        if shared <= SHARED_BYTES and sums <= 128:
            found.append(ExpertTile(unit_pairs, block_n, block_k, stages, warps))
    return list(dict.fromkeys(found))
