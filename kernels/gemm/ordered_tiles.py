"""How a product with one order of sums (`ordered.py`) is cut: the segments of K by the weight alone, tiles by the tokens too."""

from __future__ import annotations

from batchspec.kernels.gemm.tiles import Tile

MIN_SEGMENT = 1024
"""Fewer columns are no segment of their own: programs would spend their time on starting, and on adding up."""
WIDE_ROWS = 8192
"""Rows of a weight that fill a GPU with tiles of 64 without segments."""
SEGMENT_UNIT = 128
"""The largest block_k of a tile, of which a segment is a multiple."""
FILL = 88
"""Programs that fill a GPU of the Hopper generation well enough, two thirds of its 132 multiprocessors: with fewer, smaller tiles
take less time."""


def segments_of(rows: int, k: int) -> int:
    """Parts of K that a product with a weight [rows, k] sums apart: 1, 2 or 4. It is the same for every number of tokens and on
    every GPU, because a token's bits depend on it."""
    segments = 1
    while rows * segments < WIDE_ROWS and segments < 4:
        if k % (2 * segments * SEGMENT_UNIT) or k // (2 * segments) < MIN_SEGMENT:
            break
        segments *= 2
    return segments


def ordered_tile(tokens: int, n: int, segments: int, *, gated: bool = False) -> Tile:
    """How a product of so many tokens with n outputs is divided among programs. No bit depends on it.

    gated  each output is made of two rows of the weight
    """
    if gated:
        base = _gated(tokens, n)
    elif tokens <= 64:
        base = Tile(64, 128, 128, 4, 4, False) if n >= 2 * WIDE_ROWS else Tile(64, 64, 128, 4, 4, False)
    elif _tiles(tokens, n, 128, 64) * segments < FILL:
        base = Tile(64, 64, 128, 4, 4, True)
    elif tokens <= 128 and n < 2 * WIDE_ROWS:
        base = Tile(128, 64, 64, 5, 4, True)
    elif tokens <= 128:
        base = Tile(128, 128, 64, 3, 4, True)
    elif _tiles(tokens, n, 128, 128) * segments < FILL:
        base = Tile(128, 64, 64, 5, 4, True)
    elif segments > 1 or _tiles(tokens, n, 256, 128) < FILL:
        base = Tile(128, 128, 64, 5, 8, True)
    else:
        base = Tile(256, 128, 64, 4, 8, True)
    if segments > 1 and _tiles(tokens, n, base.block_m, base.block_n) < 3 * FILL:
        return base._replace(split=segments)
    return base


def _gated(tokens: int, n: int) -> Tile:
    if tokens <= 64 or _tiles(tokens, n, 128, 64) < FILL:
        return Tile(64, 64, 64, 4, 4, True)
    if tokens <= 128 or _tiles(tokens, n, 128, 128) < FILL:
        return Tile(128, 64, 64, 3, 4, True)
    return Tile(128, 128, 64, 4, 8, True)


def _tiles(tokens: int, n: int, block_m: int, block_n: int) -> int:
    return -(-tokens // block_m) * -(-n // block_n)
