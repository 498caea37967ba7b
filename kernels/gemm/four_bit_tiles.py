"""How a dense product with weights of four bits is divided among programs: the rule, and the candidates that the tuner times.

A tile's block_m are tokens, its block_n outputs; a gated product reads as many rows of up as of the gate. The rule follows what
was measured of the products of an 8B on one H200 (jobs/pages/NOTEBOOK.md): direct tiles (`four_bit_direct.py`) win up to 64
tokens for INT4 and always for NVFP4, tiles that pass weights through shared memory (`four_bit_linear.py`) beyond that for INT4.
For gated products and for 17 to 32 tokens the rule goes by analogy.
"""

from __future__ import annotations

from batchspec.kernels.common.card import Card
from batchspec.kernels.common.four_bit import BLOCK
from batchspec.kernels.common.fp4 import GROUP
from batchspec.kernels.gemm.tiles import Tile

MOST_TOKENS = 1024
"""Beyond this many tokens the weight is dequantised and the library multiplies, where the tuner has not measured it. By estimate:
the kernel runs at 490 TFLOP/s, the library at 650, and writing and reading a weight in bf16 takes as long as 930 tokens gain."""
MIN_BLOCKS = 4
"""Minimum number of blocks of 128 of K in a part of a split."""
SPLITS = (1, 2, 3, 4, 6, 8)
DIRECT_SPLITS = (1, 2, 4, 8)
MOST_PARTS = DIRECT_SPLITS[-1]
"""Most programs that may share a direct tile along K."""
AHEAD = 2
"""Blocks of K that a program of a direct tile loads ahead, and that a step of its loop multiplies. Of 1, 2 and 4, two were
fastest or within 3 % of it (one H200, 2026-11-26), with one exception: NVFP4 at 256 tokens reaches 68 % of the limit with 1."""
HEIGHTS = (16, 32, 64, 128, 256)
# (rows of W, stages, warps) by tokens of a tile; without TMA, programs of few tokens take fewer instructions.
CUTS = {
    16: ((64, 4, 4), (64, 6, 4), (128, 3, 4), (128, 4, 4), (128, 5, 4), (256, 3, 4), (256, 3, 8), (256, 4, 8)),
    32: ((64, 4, 4), (128, 3, 4), (128, 4, 4), (256, 3, 4), (256, 3, 8)),
    64: ((64, 3, 4), (128, 3, 4), (128, 3, 8), (128, 4, 8), (256, 3, 8), (256, 3, 16)),
    128: ((64, 3, 4), (128, 2, 4), (128, 3, 8), (256, 2, 8), (256, 3, 8), (256, 3, 16)),
    256: ((64, 2, 4), (128, 2, 8), (128, 3, 8)),
}


# Direct tiles: (rows of W, stages, warps, TMA) by tokens of a tile.
DIRECT = {
    16: ((128, 3, 8, False), (64, 3, 4, False), (128, 3, 4, False)),
    32: ((128, 3, 8, False), (128, 3, 8, True), (128, 3, 4, False)),
    64: ((128, 3, 8, True), (64, 3, 4, True), (128, 3, 4, True)),
    128: ((128, 3, 8, True), (64, 3, 4, True)),
}


def op_of(group: int, *, gated: bool) -> str:
    """The name of a product in the table of tuned ones. group: columns of a group of W, 0: all of a row, 16: NVFP4."""
    return f"{'four_bit_swiglu' if gated else 'four_bit_linear'}_g{group}"


def group_of(op: str) -> int:
    """The columns of a group of W, from the name of a product."""
    return int(op.rpartition("_g")[2])


def four_bit_tile(num_tokens: int, rows: int, k: int, group: int, card: Card, *, gated: bool = False) -> Tile | None:
    """A good tile, by estimate, for x [num_tokens, k] with W [rows, k] in groups of so many columns (0: one of a row; 16: NVFP4);
    None: dequantise W, then the library's product.

    Direct tiles (Hopper alone): up to 32 tokens; products that are not gated also up to 64, and of NVFP4 always. K is split until
    up to three programs run on each multiprocessor, half as many from 33 tokens on, where partial sums cost more.
    Others pass weights through shared memory: with many tokens the tensor cores then multiply while the next weights are
    unpacked. INT4 products that are not gated have tiles of 64 outputs where tiles of 128 are fewer than the multiprocessors.
    """
    if num_tokens > MOST_TOKENS:
        return None
    height, n = height_of(num_tokens), rows // 2 if gated else rows
    direct = card.has_wgmma and (height <= 32 or (not gated and (height == 64 or group == GROUP)))
    if direct:
        base = Tile(min(height, 128), 128, BLOCK, 3, 4 if gated else 8, height > 32, direct=True)
    elif height <= 32:
        base = Tile(height, 128, BLOCK, 4, 4, False)
    else:
        base = Tile(min(height, 128), 128, BLOCK, 3, 8, True)
        if height > 64 and not gated and group != GROUP and _num_tiles(base, num_tokens, n) < card.num_sms:
            base = base._replace(block_n=64, warps=4)
    base = fitted(_of_outputs(base, gated=gated), card, gated=gated)
    per_sm = 2.0 if not direct else 3.0 if height <= 32 else 1.5
    most = min(per_sm * card.num_sms / _num_tiles(base, num_tokens, n), -(-k // BLOCK) / MIN_BLOCKS)
    return base._replace(split=max(split for split in (DIRECT_SPLITS if direct else SPLITS) if split == 1 or split <= most))


def ordered_four_bit_tile(num_tokens: int, *, gated: bool = False) -> Tile:
    """A tile with one order of sums (decode.deterministic): a token's bits are the same for every number of tokens.

    One program sums all of K, in blocks of 128 from the first one on, each in instructions of 16 columns. Rows of W are the first
    operand (M) in every tile, tokens the second (N), of which each sum has one.
    """
    base = Tile(64, 64, BLOCK, 4, 4, True) if num_tokens <= 64 else Tile(128, 128, BLOCK, 3, 8, True)
    return _of_outputs(base, gated=gated)


def candidates(num_tokens: int, rows: int, k: int, group: int, card: Card, *, gated: bool = False) -> list[Tile]:
    """Tiles worth timing on this card; first the one that `four_bit_tile` chooses, if it does."""
    rule = four_bit_tile(num_tokens, rows, k, group, card, gated=gated)
    found = [] if rule is None else [rule]
    n = rows // 2 if gated else rows
    for tile in _uncut(num_tokens, card, gated=gated):
        num_tiles = _num_tiles(tile, num_tokens, n)
        for split in DIRECT_SPLITS if tile.direct else SPLITS:
            few = num_tiles * split <= 4 * card.num_sms and -(-k // BLOCK) // split >= MIN_BLOCKS
            if split == 1 or few:
                found.append(tile._replace(split=split))
    return list(dict.fromkeys(found))


def _uncut(num_tokens: int, card: Card, *, gated: bool) -> list[Tile]:
    """Tiles without a split that fit the card."""
    found, most = list[Tile](), height_of(num_tokens)
    for height in HEIGHTS:
        if most // 2 <= height <= max(16, most):
            loads = (False, True) if height <= 64 and card.has_tma else (card.has_tma,)
            found += [Tile(height, *cut[:1], BLOCK, *cut[1:], tma) for cut in CUTS[height] for tma in loads]
            if card.has_wgmma:
                for block_n, stages, warps, tma in DIRECT.get(height, ()):
                    if not gated or block_n == 32 * warps:
                        found.append(Tile(height, block_n, BLOCK, stages, warps, tma, direct=True))
    outputs = [_of_outputs(tile, gated=gated) for tile in found]
    return [tile for tile in outputs if fits(tile, card, gated=gated)]


def parts_of(split: int) -> int:
    """The number of parts that the kernel of direct tiles is compiled for."""
    return next(parts for parts in (1, 4, MOST_PARTS) if parts >= split)


def compiled_as(tile: Tile) -> Tile:
    """The tile with the split for which its kernel is compiled: one kernel serves several splits."""
    return tile._replace(split=parts_of(tile.split) if tile.direct else min(tile.split, 2))


def fits(tile: Tile, card: Card, *, gated: bool) -> bool:
    """Whether the blocks of a tile fit into the card's shared memory and its sums into registers."""
    rows = tile.block_n * (2 if gated else 1)
    return fitted(tile, card, gated=gated) == tile and rows * tile.block_m // (32 * tile.warps) <= 128


def fitted(tile: Tile, card: Card, *, gated: bool) -> Tile:
    """The tile with as many stages as fit into the card's shared memory, and with the kind of loads that the card has."""
    rows = tile.block_n * (2 if gated else 1)
    most_of_scales = 8  # in groups of 16 (NVFP4) or 32
    tokens = tile.block_m * BLOCK * 2
    a_stage = AHEAD * tokens if tile.direct else tokens + rows * (BLOCK // 2 + most_of_scales)
    stages = card.stages_that_fit(tile.stages, a_stage)
    return tile._replace(stages=stages, tma=tile.tma and card.has_tma)


def _num_tiles(tile: Tile, num_tokens: int, n: int) -> int:
    return -(-num_tokens // tile.block_m) * -(-n // tile.block_n)


def height_of(num_tokens: int) -> int:
    """The smallest of HEIGHTS that holds the tokens, or the largest."""
    return next((height for height in HEIGHTS if height >= num_tokens), HEIGHTS[-1])


def _of_outputs(tile: Tile, *, gated: bool) -> Tile:
    """A tile of as many rows of W, half of them gate rows if gated."""
    return tile._replace(block_n=tile.block_n // 2) if gated else tile
