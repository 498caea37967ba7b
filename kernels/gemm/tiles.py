"""How a matrix product is divided among programs, and the candidates that `batchspec.kernels.gemm.autotune` times."""

from __future__ import annotations

from typing import NamedTuple

from batchspec.kernels.common.card import Card


class Work(NamedTuple):
    """A product as a list of units (one K block of one output tile each), of which every program gets an equal, contiguous
    part."""

    num_tiles: int
    units_per_program: int
    num_programs: int
    split: bool
    """Whether some tile is shared by several programs."""

    @property
    def num_slots(self) -> int:
        """Number of slots for partial sums: one for each value of tile + program."""
        return self.num_tiles + self.num_programs


class Tile(NamedTuple):
    """A tile choice: block sizes, pipeline stages, warps, loads by TMA descriptor or by pointer, and the split along K."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    tma: bool
    split: int = 1
    """Number of programs that share a tile."""
    per_sm: int = 0
    """0: `split` applies; else all units are divided among this number of programs for each SM (stream-K)."""
    direct: bool = False
    """Only of weights of four bits: whether they are loaded straight into registers (`four_bit_direct.py`)."""

    def work(self, num_tokens: int, n: int, k: int, num_sms: int) -> Work:
        k_blocks = -(-k // self.block_k)
        num_tiles = -(-num_tokens // self.block_m) * -(-n // self.block_n)
        units = num_tiles * k_blocks
        per_program = -(-units // (num_sms * self.per_sm)) if self.per_sm else -(-k_blocks // self.split)
        return Work(num_tiles, per_program, -(-units // per_program), per_program % k_blocks > 0)


# block_m, block_n, block_k, stages, warps. A gated product loads two blocks of weights; a fused norm loads x through registers.
PLAIN = (
    (64, 64, 128, 4, 4), (64, 128, 64, 5, 4), (64, 128, 128, 4, 4), (64, 256, 64, 4, 4), (64, 256, 64, 4, 8),
    (128, 64, 64, 5, 4), (128, 128, 64, 3, 4), (128, 128, 64, 5, 8), (128, 128, 128, 3, 8), (128, 256, 64, 4, 8),
    (256, 64, 64, 4, 8), (256, 128, 64, 3, 8), (256, 128, 64, 4, 8),
)
GATED = (
    (64, 64, 64, 4, 4), (64, 64, 128, 3, 4), (64, 128, 64, 5, 4), (64, 128, 64, 5, 8), (128, 64, 64, 3, 4), (128, 64, 64, 5, 8),
    (128, 128, 64, 3, 8), (128, 128, 64, 4, 8), (256, 64, 64, 4, 8),
)
SMALL = (
    (64, 32, 64, 4, 4), (64, 64, 64, 4, 4), (64, 64, 128, 3, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 4, 8),
)
HEAD = (
    (64, 128, 64, 4, 4), (64, 256, 64, 3, 4), (128, 128, 64, 3, 4), (128, 128, 64, 4, 8), (128, 256, 64, 4, 8),
    (256, 128, 64, 4, 8),
)
BLOCKS = {
    "linear": PLAIN, "linear_add": (*PLAIN, (64, 64, 64, 4, 4)), "swiglu": GATED,
    "norm_linear": SMALL, "norm_swiglu": SMALL[:-1], "lm_head": HEAD,
}
WHOLE = ("norm_linear", "norm_swiglu", "lm_head")
"""Products that cannot be split along K."""
NORM_MAX_K = 2048
"""Maximum K of a fused norm. It loads x through registers once for each column of tiles, which pays only for small products,
where launches cost more."""


def candidates(op: str, tokens: int, rows: int, k: int, card: Card) -> list[Tile]:
    """Tile choices that are worth timing for `op` with `tokens` tokens and a bf16 weight [rows, k] on this card."""
    if op.startswith("norm") and k > NORM_MAX_K:
        return []
    gated = op.endswith("swiglu")
    n = rows // 2 if gated else rows
    found: dict[Tile, float] = {}
    num_sms = card.num_sms
    for block_m, block_n, block_k, stages, warps in BLOCKS[op]:
        if block_m > max(64, 1 << (tokens - 1).bit_length()):
            continue
        stage_bytes = (block_m + block_n * (2 if gated else 1)) * block_k * 2
        stages = card.stages_that_fit(stages, stage_bytes)
        registers = 32 * warps * (128 if block_m * block_n * (2 if gated else 1) // (32 * warps) <= 64 else 256)
        resident = num_sms * max(1, min(card.block_shared_bytes // (stage_bytes * stages), card.sm_registers // registers))
        base = Tile(block_m, block_n, block_k, stages, warps, card.has_tma)
        for cut, fill in _cuts(base, tokens, n, k, num_sms, resident, whole=op in WHOLE):
            found[cut] = fill
            found[cut._replace(tma=False)] = fill
    best = max(found.values())
    return [tile for tile, fill in found.items() if fill > best / 2]


def _cuts(tile: Tile, tokens: int, n: int, k: int, num_sms: int, resident: int, *, whole: bool) -> list[tuple[Tile, float]]:
    """The tile, and variants that are split along K if that fills more SMs, each with its utilisation of the resident
    programs."""
    num_tiles, k_blocks = tile.work(tokens, n, k, num_sms).num_tiles, -(-k // tile.block_k)
    fills = [(tile, _fill(num_tiles, resident))]
    if whole or num_tiles > 8 * resident:
        return fills
    for split in (2, 3, 4, 6, 8, 12, 16):
        fill = _fill(num_tiles * split, resident)
        if k_blocks // split >= 4 and num_tiles * split <= 2 * resident and fill > fills[-1][1] + 0.03:
            fills.append((tile._replace(split=split), fill))
    if fills[-1][1] < 0.95 and num_tiles * k_blocks >= 4 * resident:
        fills.append((tile._replace(per_sm=resident // num_sms), 1.0))
    return fills


def _fill(num_programs: int, resident: int) -> float:
    return num_programs / (-(-num_programs // resident) * resident)
