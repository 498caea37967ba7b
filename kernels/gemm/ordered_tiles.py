"""How `ordered.py` divides a product: segments of K by the weight alone, tiles by weight and tokens."""

from __future__ import annotations

from functools import lru_cache

from batchspec.kernels.gemm.split_k import MAX_TILES
from batchspec.kernels.gemm.tiles import Tile

MIN_SEGMENT = 4096
"""Minimum columns of a segment. At 256 tokens shorter ones take a fifth longer: programs start twice and add up parts."""
WIDE_ROWS = 8192
"""A weight with this many rows fills a GPU with tiles of 64 rows, without segments."""
FILL = 88
"""Number of programs that together read a weight at nearly the full memory bandwidth."""
SEGMENT_UNIT = 128
"""The largest block_k of a tile, of which a segment is a multiple."""

# Tiles, with the TFLOP/s of one multiprocessor of an H200, and the number of programs that run on it at once.
PLAIN = (
    (Tile(64, 32, 128, 6, 4, True), 2.2, 1), (Tile(64, 64, 128, 4, 4, True), 3.3, 1), (Tile(64, 64, 64, 4, 4, True), 3.0, 3),
    (Tile(64, 128, 128, 4, 4, True), 4.6, 1), (Tile(64, 256, 64, 4, 4, True), 5.1, 1), (Tile(128, 64, 64, 5, 4, True), 4.2, 1),
    (Tile(128, 64, 64, 4, 4, True), 4.2, 2), (Tile(128, 128, 64, 3, 4, True), 5.7, 2), (Tile(128, 128, 64, 5, 8, True), 6.1, 1),
    (Tile(256, 128, 64, 4, 8, True), 6.3, 1),
)
GATED = (
    (Tile(64, 64, 128, 3, 4, True), 4.2, 1), (Tile(64, 64, 64, 4, 4, True), 4.0, 2), (Tile(128, 64, 64, 3, 4, True), 5.3, 2),
    (Tile(128, 128, 64, 4, 8, True), 6.1, 1),
)
SMS = 132
START_US, STEP_US = 1.0, {64: 0.14, 128: 0.24}
"""Microseconds until a program's first step, and the minimum for a step, by block_k."""
JOIN_US, PARTS_BYTES_US = 1.0, 8e6
"""Microseconds that a tile waits for the last of its parts; bytes of parts that are written or read in a microsecond."""


def segments_of(rows: int, k: int) -> int:
    """Number of parts of K with sums of their own, for a product with a weight [rows, k]: 1, 2 or 4. It is the same for every
    number of tokens and on every GPU, because a token's bits depend on it."""
    segments = 1
    while rows * segments < WIDE_ROWS and segments < 4:
        if k % (2 * segments * SEGMENT_UNIT) or k // (2 * segments) < MIN_SEGMENT:
            break
        segments *= 2
    return segments


@lru_cache(maxsize=1 << 14)
def ordered_tile(tokens: int, n: int, k: int, segments: int, *, gated: bool = False) -> Tile:
    """The fastest tile, by estimate, for a product with n outputs. No bit of the result depends on it.

    gated  each output is made of two rows of the weight
    """
    if tokens <= 64 and not gated:  # bound by reading the weight, which needs no TMA
        if n >= 2 * WIDE_ROWS:
            return Tile(64, 128, 128, 4, 4, False, segments)
        return Tile(64, 64, 128, 4, 4, False, segments) if n * segments >= 64 * FILL else Tile(64, 32, 128, 6, 4, False, segments)
    found = []
    for base, rate, resident in GATED if gated else PLAIN:
        for split in {1, segments}:
            tile, num_tiles = base._replace(split=split), _num_tiles(tokens, n, base)
            if (split == 1 or num_tiles <= MAX_TILES) and base.block_m <= max(64, 1 << (tokens - 1).bit_length()):
                found.append((_estimated_us(tile, num_tiles, k // split, rate, resident, gated), tile))
    return min(found)[1]


def _estimated_us(tile: Tile, num_tiles: int, k: int, rate: float, resident: int, gated: bool) -> float:
    """Time of a product, without its launch, if every program sums k columns."""
    outputs, split = tile.block_m * tile.block_n * (2 if gated else 1), tile.split
    per_sm = -(-num_tiles * split // SMS)
    computes = per_sm * 2e-6 * outputs * k / rate
    waits = -(-per_sm // resident) * (START_US + -(-k // tile.block_k) * STEP_US[tile.block_k])
    joins = JOIN_US + 2 * 4 * num_tiles * split * outputs / PARTS_BYTES_US if split > 1 else 0.0
    return max(computes, waits) + joins


def _num_tiles(tokens: int, n: int, tile: Tile) -> int:
    return -(-tokens // tile.block_m) * -(-n // tile.block_n)
