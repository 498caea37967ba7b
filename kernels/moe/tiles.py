"""How a grouped product of experts is divided among programs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from batchspec.kernels.common.card import Card
from batchspec.kernels.moe.units import SIZE_STEP, max_units

HEIGHTS = (16, 32, 64, 128, 256)
"""Numbers of pairs that a tile may have in Triton (powers of two)."""
JOINED = {48: (32, 16), 80: (64, 16), 96: (64, 32)}
"""Numbers of pairs in between: a program unpacks weights once for two tiles."""


class ExpertTile(NamedTuple):
    """Tile sizes and launch settings of a grouped product: a program computes a tile of block_n rows of W by up to block_t pairs.

    The tile does not change the order in which a token's numbers are summed over K, so it may depend on the number of tokens.
    """

    block_t: int
    """Maximum number of pairs of a unit, one of `HEIGHTS`, with `joined` also of `JOINED`. Both products of a layer read the same
    units. Triton 3.6 uses other instructions for narrower tiles, which round differently."""
    block_n: int
    """Rows of W, a multiple of 64; MXFP4: `mxfp4_rows`. A gated product reads as many of the gate and as many of up. If it is
    below 16 * warps, the warps divide the pairs among them too."""
    block_k: int
    """Columns of W per step of the loop over K. MXFP4, INT4 and NVFP4: 128."""
    stages: int
    """Steps of that loop that are loaded ahead (Triton's num_stages)."""
    warps: int
    """4 or 8."""
    tma: bool = True
    """Load weights and tokens by TMA descriptor; False: by pointers. MXFP4 weights never are."""
    low: int = 16
    """The narrowest tile over pairs, one of `heights` up to block_t. A unit uses the narrowest one that holds its pairs."""
    joined: bool = False
    """MXFP4, INT4 and NVFP4 only: use the heights of `JOINED` too."""
    registers: int | None = None
    """MXFP4 only: limit of a thread's registers (Triton's maxnreg), to let more programs share an SM; None: no limit."""
    turned: bool = False
    """FP8 only: from 64 pairs on the pairs are the first operand (M) of the tensor cores' products, and a program computes two
    blocks of rows of W in the second product too, block_n / 2 rows each. For wide tiles, whose sums leave few registers for
    scales."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Rows of the blocks of tokens that the heights of this tile are made of."""
        joined = [parts for height, parts in JOINED.items() if self.joined and self.low <= height <= self.block_t]
        needed = {height for height in HEIGHTS if self.low <= height <= self.block_t}.union(*joined)
        return tuple(height for height in HEIGHTS if height in needed)


def mxfp4_rows(*, gated: bool) -> int:
    """The block_n of MXFP4 tiles: a program computes a pair of blocks of 64 rows, one of gate and one of up if gated."""
    return 64 if gated else 128


def unit_pairs_of(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype | None = None) -> int:
    """Maximum number of pairs of a unit: enough for all pairs of most experts, within limits of the format.

    That is the mean number of pairs plus two standard deviations, as if each token chose its experts independently.

    dtype  of the weights, as in `expert_tile`. Wide tiles gain little if weights pass through shared memory to be unpacked (INT4,
           NVFP4) or scaling sums takes long (FP8): two units of 64 pairs then take less time than one of 128, except with very
           many pairs
    """
    mean = num_tokens * top_k / num_experts
    needed = int(mean + 2 * (mean * (1 - top_k / num_experts)) ** 0.5)
    if dtype == torch.uint8:
        return next((own for own in MXFP4_PAIRS if own >= needed), MXFP4_PAIRS[-1])
    pairs = max(16, 1 << (needed - 1).bit_length())
    if dtype == torch.float8_e4m3fn:
        return 128 if mean >= MANY_FP8_PAIRS else min(64, pairs)
    if dtype == torch.int32:
        if mean >= MANY_EXPERT_PAIRS:
            return min(128, pairs)
        wide = 48 <= mean < 100 or (mean >= 48 and num_tokens * top_k >= MANY_LAYER_PAIRS)
        return 96 if wide else min(64, pairs)
    return min(128, pairs)


def gathers(unit_pairs: int, dtype: torch.dtype, *, gated: bool) -> bool:
    """Whether a layer's first product, with weights of this dtype, takes less time if its programs gather the rows of x by token.

    In that case no launch sorts the rows by expert. Measured on an H200, us, gathered / sorted and the launch that sorts:
    Qwen3-30B-A3B with 512 tokens bf16 203.7 / 205.7, Qwen3.5-35B-A3B with 1,024 bf16 269 / 276 (2026-12-01); FP8, a layer without
    attention, with 256 tokens 268.5 / 271.4 (2026-11-22). If registers are full, gathering takes longer: FP8 with units of 64
    pairs 312.5 / 310.8, MXFP4 (gpt-oss-20b) 328 / 300. So it does in units of 64 pairs without a gate: Nemotron 3 Nano in bf16
    313.0 / 313.7 with 512 tokens, 336.8 / 322 with 768, 340.6 / 329.4 with 1,024 (2026-12-01).
    """
    most = GATHERED_PAIRS.get(dtype, 0)
    return unit_pairs <= (most if gated else min(most, UNGATED_PAIRS))


def largest_first(unit_pairs: int, dtype: torch.dtype) -> bool:
    """Whether the products of a layer, with weights of this dtype, take less time if experts with the largest units come first.

    MXFP4 programs with 48 pairs take 1.4 to 1.7 times as long as those with 16, and they run in few waves: those of gpt-oss-20b
    at 256 tokens in 3.9 and 2.0. Measured on one H200 (2026-11-27), both products of gpt-oss-20b, us by expert / largest first:
    185 / 174 at 256 tokens, 206 / 201 at 384, 251 / 244 at 512, the same at 1,024 and more. Other formats gain nothing
    (NVFP4 was not measured): Qwen3-30B-A3B at 512 tokens FP8 164 / 170, bf16 301 / 304, INT4 133 / 131. Units of up to SIZE_STEP
    pairs are equally large.
    """
    return dtype == torch.uint8 and unit_pairs > SIZE_STEP.value


PACKED = (torch.uint8, torch.int32)
"""dtypes of weights that are unpacked in registers: MXFP4; INT4 and NVFP4."""
MXFP4_PAIRS = (16, 32, 48, 64, 96, 128)
"""Numbers of pairs that units of MXFP4 products may have."""
MXFP4_REGISTERS = {32: 128, 64: 168}
"""The limit of registers of their tiles, by the number of pairs."""
GATHERED_PAIRS = {torch.bfloat16: 64, torch.float32: 64, torch.float8_e4m3fn: 32}
"""Maximum number of pairs of a unit at which programs gather rows, by dtype of the weights. Only tests use fp32."""
UNGATED_PAIRS = 32
"""The same without a gate, if it is less."""
MANY_EXPERT_PAIRS = 256
"""Mean number of pairs per expert from which units of INT4 and NVFP4 products have 128 pairs."""
MANY_FP8_PAIRS = 512
"""The same for FP8 products."""
MANY_LAYER_PAIRS = 8192
"""Number of pairs of a layer from which wider units of INT4 and NVFP4 still give every multiprocessor a program."""


FEW_UNITS = 8
"""Number of units up to which weights of four bits are loaded or fetched more steps ahead: with few programs, the bytes in flight
limit the bandwidth."""


def expert_tile(unit_pairs: int, num_units: int, card: Card, *, gated: bool, dtype: torch.dtype) -> ExpertTile:
    """A good tile for at most `num_units` units of `unit_pairs` pairs and weights of this dtype (`policy.expert_tile`)."""
    return fitted(_measured_tile(unit_pairs, num_units, gated=gated, dtype=dtype), card, gated=gated, dtype=dtype)


def _measured_tile(unit_pairs: int, num_units: int, *, gated: bool, dtype: torch.dtype) -> ExpertTile:
    """The tile on an H200.

    Measured on one on 2026-11-22 with `batchspec.kernels.benchmarks experts --sweep`: bf16 and FP8 on Qwen3-30B-A3B (128
    experts), each at 16, 64, 256, 512, 1,024 and 4,096 tokens, 1 to 256 pairs an expert. The two products of a layer together
    take at most 2 % longer than with the fastest tiles of each. Between these points the units grow with the mean number of pairs
    (`unit_pairs_of`).
    MXFP4 was measured on 2026-11-26, with units by expert (see `largest_first`), on gpt-oss-20b (32 experts) and gpt-oss-120b
    (128) at 64, 256, 512, 1,024, 4,096 and 16,384 tokens, 2 to 2,048 pairs an expert, with the units that `unit_pairs_of` gives
    and those next to them. The two products together take at most 3 % longer than with the fastest of these units and the
    fastest tile of each product; at 2,048 pairs an expert 4 %, where low=128 was as much faster for gpt-oss-20b, and at 512
    pairs 3 % slower for gpt-oss-120b. With four stages units of 128 pairs take up to half as long again: fewer programs share a
    multiprocessor. Limits of registers let more programs share one: up of gpt-oss-120b takes 354 instead of 391 us with units
    of 32 pairs (512 tokens), 456 instead of 601 with units of 64 (1,024). Other units gain nothing on both models. At 64 pairs
    an expert (gpt-oss-20b, 512 tokens) up and down take 168 and 85 us with units of 96 pairs and eight warps, 179 and 92 with
    four (2026-11-27); other units are slower with eight.
    FP8 tiles with `turned` were timed on Qwen3-30B-A3B at 512 to 16,384 tokens, and on MiniMax-M2 at 1,024 and 4,096. Three
    programs of 64 pairs, or two of 128 pairs and eight warps, share a multiprocessor; one program of twice the rows of W takes
    longer.
    INT4 and NVFP4 were not measured: they have the tiles that were fastest for MXFP4 on 2026-11-22, in a kernel that loaded and
    computed the same blocks as theirs. One token of gpt-oss took 47 us a layer with 6 stages, 53 with 3; from four tokens on 3
    stages were faster.
    """
    if dtype == torch.float32:
        return ExpertTile(unit_pairs, 64, 32, 2, 4, False)
    if dtype == torch.float8_e4m3fn:
        if unit_pairs <= 32:
            return ExpertTile(unit_pairs, 128, 128, 3, 4)
        if unit_pairs == 64:
            return ExpertTile(64, 64 if gated else 128, 128, 3, 4, turned=True)
        return ExpertTile(unit_pairs, 64 if gated else 128, 128, 3, 8, low=unit_pairs, turned=True)
    if dtype == torch.uint8:
        low, registers = 16 if unit_pairs <= 64 else 32, MXFP4_REGISTERS.get(unit_pairs)
        return ExpertTile(
            unit_pairs, mxfp4_rows(gated=gated), 128, 3, 8 if unit_pairs == 96 else 4, low=low, joined=unit_pairs > 32,
            registers=registers,
        )
    if dtype == torch.int32:
        if unit_pairs == 128:
            return ExpertTile(unit_pairs, 64, 128, 2, 4, low=32) if gated else ExpertTile(unit_pairs, 128, 128, 2, 8, low=128)
        if unit_pairs == 16 and num_units <= FEW_UNITS:
            return ExpertTile(16, 64, 128, 6, 4)
        joined = unit_pairs > 64
        return ExpertTile(unit_pairs, 64 if gated else 128, 128, 3, 4, low=32 if joined else 16, joined=joined)
    if unit_pairs == 16:
        return ExpertTile(unit_pairs, 64, 128, 3, 4)
    low = 16 if unit_pairs <= 64 else 32
    if gated and unit_pairs <= 64:
        return ExpertTile(unit_pairs, 64, 64, 4, 4, low=low)
    return ExpertTile(unit_pairs, 128, 64, 4, 8, low=low) if gated else ExpertTile(unit_pairs, 128, 64, 3, 4, low=low)


# Values of (block_n, block_k, stages, warps) worth timing.
PLAIN = ((64, 64, 4, 4), (64, 64, 6, 4), (64, 128, 3, 4), (128, 64, 3, 4), (128, 64, 4, 8), (128, 128, 2, 8), (256, 64, 3, 8))
FP8 = ((64, 128, 4, 4), (64, 128, 6, 4), (128, 128, 3, 4), (128, 128, 4, 4), (128, 128, 3, 8), (128, 128, 4, 8), (64, 128, 4, 8))
FOUR_BIT = (
    (64, 128, 2, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (128, 128, 3, 4), (128, 128, 4, 4), (128, 128, 2, 8),
    (128, 128, 3, 8), (128, 128, 4, 8), (256, 128, 2, 8), (256, 128, 3, 8), (256, 128, 4, 8),
)
MXFP4 = (*((0, 128, stages, 4) for stages in (2, 3, 4)), (0, 128, 3, 8))
"""Rows: `mxfp4_rows`."""
OTHERS = {torch.float8_e4m3fn: FP8, torch.uint8: MXFP4, torch.int32: FOUR_BIT}


def candidates(
    num_tokens: int, top_k: int, num_experts: int, card: Card, *, gated: bool, dtype: torch.dtype
) -> list[ExpertTile]:
    """Tiles worth timing on this card, first the one that `expert_tile` chooses."""
    unit_pairs = unit_pairs_of(num_tokens, top_k, num_experts, dtype)
    num_units = max_units(num_tokens, top_k, num_experts, unit_pairs)
    found = [expert_tile(unit_pairs, num_units, card, gated=gated, dtype=dtype)]
    mean = num_tokens * top_k / num_experts
    height = min(128, max(16, 1 << (max(1, round(mean)) - 1).bit_length()))  # the power of two that holds the mean
    heights = {height, min(256, 2 * height), max(16, height // 2)}
    if dtype in PACKED:
        heights |= {own for own in JOINED if height <= 2 * own and own <= 2 * height}
    for block_t in sorted(heights):
        lows = {16 if block_t <= 64 else 32} | ({block_t} if block_t in HEIGHTS else set())
        for block_n, block_k, stages, warps in OTHERS.get(dtype, PLAIN):
            for low in sorted(lows):
                joined = dtype in PACKED and low < block_t and block_t > 32
                tile = ExpertTile(block_t, block_n, block_k, stages, warps, card.has_tma, low=low, joined=joined)
                others = []
                if dtype == torch.uint8:
                    tile = tile._replace(block_n=mxfp4_rows(gated=gated))
                    others = [tile._replace(registers=limit) for limit in (128, 168) if block_t <= 64]
                elif dtype == torch.float8_e4m3fn and block_t >= 64:
                    others = [tile._replace(turned=True, block_n=block_n if gated else 2 * block_n)]
                found += [own for own in (tile, *others) if fits(own, card, gated=gated, dtype=dtype)]
    return list(dict.fromkeys(found))


def fits(tile: ExpertTile, card: Card, *, gated: bool, dtype: torch.dtype) -> bool:
    """Whether a tile fits into the card's shared memory and its sums into registers."""
    fp8 = dtype == torch.float8_e4m3fn
    sums = tile.block_n * tile.block_t * (2 if gated else 1) // (32 * tile.warps)  # fp32 registers per thread
    if fp8:  # sums of one block of K and total sums
        sums = sums * 3 // 2
    most_rows = 256 if tile.turned and not gated else 128
    fitting = fitted(tile, card, gated=gated, dtype=dtype) == tile and sums <= (192 if fp8 else 128)
    return fitting and not (fp8 and tile.block_n > most_rows)


def fitted(tile: ExpertTile, card: Card, *, gated: bool, dtype: torch.dtype) -> ExpertTile:
    """The tile with as many stages as fit into the card's shared memory, and with the kind of loads that the card has."""
    stages = card.stages_that_fit(tile.stages, stage_bytes(tile, gated=gated, dtype=dtype))
    return tile._replace(stages=stages, tma=tile.tma and card.has_tma)


def stage_bytes(tile: ExpertTile, *, gated: bool, dtype: torch.dtype) -> int:
    """Bytes of shared memory for what a program loads in a step of the loop over K, weights and tokens. dtype: of the weights."""
    width = {torch.uint8: 0, torch.int32: 9 / 16}.get(dtype, dtype.itemsize)  # INT4 has at most as many as NVFP4
    weights = tile.block_n * (2 if gated else 1) * tile.block_k * width
    return round(weights + tile.block_t * tile.block_k * (1 if dtype == torch.float8_e4m3fn else 2))
