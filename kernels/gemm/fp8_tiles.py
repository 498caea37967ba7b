"""How a dense FP8 product is divided among programs: the rule, and the candidates that `fp8_bench` times."""

from __future__ import annotations

from typing import NamedTuple


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


FEW_TOKENS = 64
"""Up to so many, products read their weights once and leave most of the tensor cores idle: the rule takes our kernel."""
MIN_BLOCKS = 4
"""Fewest blocks of K for a part of a split: below, the sum of the parts takes longer than the product."""


def fp8_tile(num_tokens: int, rows: int, k: int, num_sms: int, *, library: bool) -> Fp8Tile | None:
    """A good tile for x [num_tokens, k] with W [rows, k]; None: the library's product (`scaled_mm.py`).

    library  whether it can multiply them

    Up to FEW_TOKENS the tiles are divided along K until there are two programs for each SM. These splits are not measured yet.
    Measured on one H200, torch 2.11, with block scales: the library takes 14 us for 6144 x 4096 and 41 us for 4096 x 14336 at 32
    to 256 tokens, where undivided tiles take 20 to 26 us and 60 to 69 us; from 256 tokens on it has 1.3 to 1.8 times the rate of
    bf16. Where it cannot multiply, 128 tokens x 64 rows take 0.83 to 0.94 of the time of 64 x 128 from 256 tokens on.
    """
    if num_tokens <= FEW_TOKENS:
        block_t = _height(num_tokens, FEW_TOKENS)
        block_n = 64 if rows < 128 * num_sms else 128
        split = max(1, min(2 * num_sms // -(-rows // block_n), -(-k // 128) // MIN_BLOCKS))
        return Fp8Tile(block_t, block_n, 4 if block_n == 128 else 5, 4, split)
    if library:
        return None
    return Fp8Tile(128, 64, 4, 4)


CUTS = ((64, 4, 4), (64, 6, 4), (128, 3, 4), (128, 4, 4), (128, 4, 8))
"""Values of (block_n, stages, warps) worth timing."""
SPLITS = (1, 2, 4, 8)
THREAD_SUMS = 64
"""Most sums of a tile that one thread holds. It holds as many of one block of K besides: with 128 each, registers spill."""


def candidates(num_tokens: int, rows: int, k: int, num_sms: int) -> list[Fp8Tile]:
    """Tiles worth timing on a GPU like an H100, that of the rule without a library first."""
    heights = sorted({_height(num_tokens, 64), _height(num_tokens, 128)})
    rule = fp8_tile(num_tokens, rows, k, num_sms, library=False)
    assert rule is not None
    found = [rule]
    for block_t in heights:
        for block_n, stages, warps in CUTS:
            if block_t * block_n > THREAD_SUMS * 32 * warps:
                continue
            num_tiles = -(-num_tokens // block_t) * -(-rows // block_n)
            for split in SPLITS:
                if split == 1 or (num_tiles * split <= 4 * num_sms and -(-k // 128) // split >= 2):
                    found.append(Fp8Tile(block_t, block_n, stages, warps, split))
    return list(dict.fromkeys(found))


def _height(num_tokens: int, most: int) -> int:
    """The power of two from 16 to `most` that holds the tokens, or `most`."""
    return max(16, min(most, 1 << (max(1, num_tokens) - 1).bit_length()))
