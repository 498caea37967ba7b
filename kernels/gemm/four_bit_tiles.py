"""How a dense product with weights of four bits is divided among programs: the rule, and the candidates that the tuner times.

A tile's block_m are tokens, its block_n outputs; a gated product reads as many rows of up as of the gate. The rule is an estimate
from the compiled kernels (registers, shared memory, instructions). On one H200 (2026-11-25, `four_bit_linear.py`'s program) all
products of an 8B in groups of 128 ran at 40, 45, 37 and 59 % of the speed that bytes or arithmetic allow at 1, 16, 64 and 256
tokens by the rule, and at 47, 52, 38 and 73 % with the tiles that are fastest together. NVFP4 weights were not measured.
"""

from __future__ import annotations

from batchspec.kernels.common.card import Card
from batchspec.kernels.common.four_bit import BLOCK
from batchspec.kernels.gemm.tiles import Tile

MOST_TOKENS = 1024
"""Beyond this many tokens the weight is dequantised and the library multiplies, where the tuner has not measured it. By estimate:
the kernel runs at 490 TFLOP/s, the library at 650, and writing and reading a weight in bf16 takes as long as 930 tokens gain."""
MIN_BLOCKS = 4
"""Minimum number of blocks of 128 of K in a part of a split."""
SPLITS = (1, 2, 3, 4, 6, 8)
HEIGHTS = (16, 32, 64, 128, 256)
# (rows of W, stages, warps) by tokens of a tile; without TMA, programs of few tokens take fewer instructions.
CUTS = {
    16: ((64, 4, 4), (64, 6, 4), (128, 3, 4), (128, 4, 4), (128, 5, 4), (256, 3, 4), (256, 3, 8), (256, 4, 8)),
    32: ((64, 4, 4), (128, 3, 4), (128, 4, 4), (256, 3, 4), (256, 3, 8)),
    64: ((64, 3, 4), (128, 3, 4), (128, 3, 8), (128, 4, 8), (256, 3, 8), (256, 3, 16)),
    128: ((64, 3, 4), (128, 2, 4), (128, 3, 8), (256, 2, 8), (256, 3, 8), (256, 3, 16)),
    256: ((64, 2, 4), (128, 2, 8), (128, 3, 8)),
}


def op_of(group: int, *, gated: bool) -> str:
    """The name of a product in the table of tuned ones. group: columns of a group of W, 0: all of a row, 16: NVFP4."""
    return f"{'four_bit_swiglu' if gated else 'four_bit_linear'}_g{group}"


def group_of(op: str) -> int:
    """The columns of a group of W, from the name of a product."""
    return int(op.rpartition("_g")[2])


def four_bit_tile(num_tokens: int, rows: int, k: int, card: Card, *, gated: bool = False) -> Tile | None:
    """A good tile, by estimate, for x [num_tokens, k] with W [rows, k]; None: dequantise W, then the library's product.

    Few tokens: 128 rows of W a program, so that x is read from the L2 cache half as often as W; K is split until two programs run
    on each multiprocessor, which leaves room for those of the next launch, that fetch its weights meanwhile. From 64 tokens on
    the tensor cores limit: tiles have as many outputs as registers hold, and two programs or warp groups take turns at them.
    """
    if num_tokens > MOST_TOKENS:
        return None
    height = height_of(num_tokens)
    n = rows // 2 if gated else rows
    if height <= 32:
        base = Tile(height, 128, BLOCK, 4, 4, False)
    else:
        base = Tile(min(height, 128), 128, BLOCK, 3, 8, True)
    base = fitted(_of_outputs(base, gated=gated), card, gated=gated)
    num_tiles = -(-num_tokens // base.block_m) * -(-n // base.block_n)
    most = min(2 * card.num_sms / num_tiles, -(-k // BLOCK) / MIN_BLOCKS)
    return base._replace(split=max(split for split in SPLITS if split == 1 or split <= most))


def ordered_four_bit_tile(num_tokens: int, *, gated: bool = False) -> Tile:
    """A tile with one order of sums (decode.deterministic): a token's bits are the same for every number of tokens.

    One program sums all of K, in blocks of 128 from the first one on, each in instructions of 16 columns. Rows of W are the first
    operand (M) in every tile, tokens the second (N), of which each sum has one.
    """
    base = Tile(64, 64, BLOCK, 4, 4, True) if num_tokens <= 64 else Tile(128, 128, BLOCK, 3, 8, True)
    return _of_outputs(base, gated=gated)


def candidates(num_tokens: int, rows: int, k: int, card: Card, *, gated: bool = False) -> list[Tile]:
    """Tiles worth timing on this card; first the one that `four_bit_tile` chooses, if it does."""
    rule = four_bit_tile(num_tokens, rows, k, card, gated=gated)
    found = [] if rule is None else [rule]
    n = rows // 2 if gated else rows
    for height in HEIGHTS:
        if not height_of(num_tokens) // 2 <= height <= max(16, height_of(num_tokens)):
            continue
        loads = (False, True) if height <= 64 and card.has_tma else (card.has_tma,)
        for block_n, stages, warps in CUTS[height]:
            for tma in loads:
                tile = _of_outputs(Tile(height, block_n, BLOCK, stages, warps, tma), gated=gated)
                num_tiles = -(-num_tokens // height) * -(-n // tile.block_n)
                for split in SPLITS:
                    few = num_tiles * split <= 4 * card.num_sms and -(-k // BLOCK) // split >= MIN_BLOCKS
                    if fits(tile, card, gated=gated) and (split == 1 or few):
                        found.append(tile._replace(split=split))
    return list(dict.fromkeys(found))


def fits(tile: Tile, card: Card, *, gated: bool) -> bool:
    """Whether the blocks of a tile fit into the card's shared memory and its sums into registers."""
    rows = tile.block_n * (2 if gated else 1)
    return fitted(tile, card, gated=gated) == tile and rows * tile.block_m // (32 * tile.warps) <= 128


def fitted(tile: Tile, card: Card, *, gated: bool) -> Tile:
    """The tile with as many stages as fit into the card's shared memory, and with the kind of loads that the card has."""
    rows = tile.block_n * (2 if gated else 1)
    most_of_scales = 8  # in groups of 16 (NVFP4) or 32
    stages = card.stages_that_fit(tile.stages, rows * (BLOCK // 2 + most_of_scales) + tile.block_m * BLOCK * 2)
    return tile._replace(stages=stages, tma=tile.tma and card.has_tma)


def height_of(num_tokens: int) -> int:
    """The smallest of HEIGHTS that holds the tokens, or the largest."""
    return next((height for height in HEIGHTS if height >= num_tokens), HEIGHTS[-1])


def _of_outputs(tile: Tile, *, gated: bool) -> Tile:
    """A tile of as many rows of W, half of them gate rows if gated."""
    return tile._replace(block_n=tile.block_n // 2) if gated else tile
