"""How a dense FP8 product is divided among programs: the rule, and the candidates that a benchmark times."""

from __future__ import annotations

from typing import NamedTuple

from batchspec.kernels.common.card import Card


class Fp8Tile(NamedTuple):
    """Tile sizes and launch settings: a program sums a tile of block_n rows of W by block_t tokens over a part of K."""

    block_t: int
    """Tokens, a power of two from 16 to 128."""
    block_n: int
    """Rows of W: 64 or 128."""
    stages: int
    """Blocks of 128 of K that are loaded ahead."""
    warps: int
    """4 or 8."""
    split: int = 1
    """Programs that share a tile, each with a part of the blocks of K. It changes the order of sums, so the last bits."""
    tma: bool = True
    """Load weights and tokens by TMA descriptor; False: by pointers."""
    group: int = 8
    """Consecutive tiles over tokens that run over all rows of W before the next ones, so that tokens stay in the L2 cache."""


FEW_TOKENS = 32
"""Up to this many tokens our kernel is faster than the library for every measured product."""
MIN_BLOCKS = 8
"""Minimum number of blocks of 128 of K in a part of a split: with fewer, summing the parts takes longer than the product."""


def fp8_tile(num_tokens: int, rows: int, k: int, card: Card, *, library: bool) -> Fp8Tile | None:
    """A good tile for x [num_tokens, k] with W [rows, k]; None: the library's product (`scaled_mm.py`).

    library  whether the library can multiply them
    """
    tile = _measured_tile(num_tokens, rows, k, card.num_sms, library=library)
    return None if tile is None else fitted(tile, card)


def fitted(tile: Fp8Tile, card: Card) -> Fp8Tile:
    """The tile with as many stages as fit into the card's shared memory, and with the kind of loads that the card has."""
    stages = card.stages_that_fit(tile.stages, (tile.block_t + tile.block_n) * BLOCK)
    return tile._replace(stages=stages, tma=tile.tma and card.has_tma)


def _measured_tile(num_tokens: int, rows: int, k: int, num_sms: int, *, library: bool) -> Fp8Tile | None:
    """The tile on an H200.

    Measured on one H200 on 2026-11-22, torch 2.11, block scales, ten products (`python -m batchspec.kernels.benchmarks
    fp8_linear --only scales=blocks --sweep`): those of Llama-8B, half of Llama-70B and Qwen3-30B at 1 to 256 tokens. The
    library does not divide K, so it takes 14 us for 4096 x 4096 and 41 us for 4096 x 14336 at 32 to 256 tokens. The tiles
    here take 9 and 20 us at 16 tokens, 14 and 25 at 64. From 256 tokens on the library is 1.3 to 1.9 times faster, and has
    1.3 to 1.8 times the rate of bf16.
    """
    few_rows = rows <= 5120 and k >= 4096
    ours = num_tokens <= FEW_TOKENS or (num_tokens <= 64 and (few_rows or k >= 8192))
    ours = ours or (num_tokens <= 128 and rows <= 4096 <= k)
    if library and not ours:
        return None
    if num_tokens > 64 and not ours:
        return Fp8Tile(128, 64, 4, 4)
    block_n = 128 if rows >= 200 * num_sms and num_tokens <= 64 else 64
    stages = (3 if num_tokens <= 16 else 4) if block_n == 128 else (5 if 32 < num_tokens <= 64 else 4)
    programs = (2.6 if num_tokens <= 64 else 1.3) * num_sms
    most = min(programs * block_n / rows, -(-k // 128) / MIN_BLOCKS)
    split = max(cut for cut in SPLITS if cut == 1 or cut <= most)
    return Fp8Tile(_height(num_tokens, 128), block_n, stages, 4, split)


def ordered_fp8_tile(num_tokens: int) -> Fp8Tile:
    """A tile with one order of sums (decode.deterministic): a token's bits are the same for every number of tokens.

    One program sums all of K, in blocks of 128 from the first one on. Rows of W are the first operand (M) in every tile, and both
    heights are multiplied by wgmma with 64 rows of W and 32 columns of K. So a sum has the same products in the same order, and
    only the number of tokens (N) of an instruction differs. Neither tile was tuned.
    """
    return Fp8Tile(64, 64, 5, 4) if num_tokens <= 64 else Fp8Tile(128, 64, 4, 4)


BLOCK = 128
"""Columns of K that a step loads."""
SPLITS = (1, 2, 4, 8)
CUTS = ((64, 4, 4), (64, 6, 4), (128, 3, 4), (128, 4, 4), (128, 4, 8))
"""Values of (block_n, stages, warps) worth timing."""
THREAD_SUMS = 64
"""Maximum number of sums of a tile in one thread. It also holds as many of one block of K: with 128 each, registers spill."""


def candidates(num_tokens: int, rows: int, k: int, card: Card) -> list[Fp8Tile]:
    """Tiles worth timing on this card; first the one that `fp8_tile` chooses without a library."""
    heights = sorted({_height(num_tokens, 64), _height(num_tokens, 128)})
    rule = fp8_tile(num_tokens, rows, k, card, library=False)
    assert rule is not None
    found = [rule]
    for block_t in heights:
        for block_n, stages, warps in CUTS:
            if block_t * block_n > THREAD_SUMS * 32 * warps:
                continue
            num_tiles = -(-num_tokens // block_t) * -(-rows // block_n)
            for split in SPLITS:
                if split == 1 or (num_tiles * split <= 4 * card.num_sms and -(-k // 128) // split >= 2):
                    found.append(fitted(Fp8Tile(block_t, block_n, stages, warps, split), card))
    return list(dict.fromkeys(found))


def _height(num_tokens: int, most: int) -> int:
    """The power of two from 16 to `most` that holds the tokens, or `most`."""
    return max(16, min(most, 1 << (max(1, num_tokens) - 1).bit_length()))
