"""Products with weights of dense layers: FP8, four bits, one order of sums. Bytes are those of the weights.

`four_bit_forward` is all products of a model's layers in one call, each with a weight of its own.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.benchmarks.case import FP8_FLOP_S, Benchmark, Case, copies, noise
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.common.four_bit import FourBitWeight
from batchspec.kernels.common.graph_clock import Call
from batchspec.kernels.gemm import four_bit_tiles, fp8_tiles
from batchspec.kernels.gemm.activation import silu_and_mul
from batchspec.kernels.gemm.four_bit_dequantise import multiply_dequantised
from batchspec.kernels.gemm.four_bit_linear import four_bit_linear, four_bit_linear_reference
from batchspec.kernels.gemm.four_bit_trial import random_four_bit
from batchspec.kernels.gemm.fp8_linear import fp8_linear, fp8_linear_reference
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, quantise_tokens
from batchspec.kernels.gemm.ordered import ordered_linear, ordered_swiglu
from batchspec.kernels.gemm.ordered_tiles import GATED, PLAIN, ordered_tile, segments_of
from batchspec.kernels.gemm.scaled_mm import library_scales, scaled_mm
from batchspec.kernels.gemm.tiles import Tile

# Rows of W and K, of qkv, o, gate and up, down.
LLAMA8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LLAMA70B_HALF = ((5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336))
QWEN30B = ((5120, 2048), (2048, 4096))
LAYERS = {"llama8b": (LLAMA8B, 32), "qwen3-30b": (QWEN30B, 48), "tiny": (((128, 256),), 2)}
"""The dense products of a layer, and the number of layers; `tiny` is for tests."""


def _block(tile: Tile) -> tuple[int, int, int, int, int]:
    return tile.block_m, tile.block_n, tile.block_k, tile.stages, tile.warps


BLOCKS = (
    *(_block(tile) for tile, *_ in PLAIN),
    (64, 32, 64, 6, 4), (64, 128, 64, 5, 4), (128, 64, 128, 3, 8), (128, 128, 64, 4, 8),
    (128, 256, 64, 4, 8), (256, 64, 64, 4, 8), (256, 128, 64, 3, 8),
)
GATED_BLOCKS = (
    *(_block(tile) for tile, *_ in GATED),
    (64, 32, 64, 5, 4), (64, 128, 64, 4, 4), (64, 128, 64, 4, 8), (128, 64, 64, 5, 8), (128, 128, 64, 3, 8), (256, 64, 64, 4, 8),
)
"""Blocks of tiles of `ordered` with the same bits: block_m, block_n, block_k, stages, warps."""
MIN_SEGMENT = 512
MOST_PROGRAMS = 1024

def fp8_case(rows: int, k: int, scales: str, tokens: int) -> Case:
    """scales: of `blocks` of 128 x 128 or of `rows`."""
    blocked = scales == "blocks"
    weights = copies(lambda: noise(rows, k).to(E4M3), rows * k)
    sizes = torch.rand((-(-rows // 128), -(-k // 128)) if blocked else (rows,)) / k
    x, library = quantise_tokens(noise(tokens, k), Fp8Form(whole=not blocked)), library_scales(sizes, rows, k)
    rule, *tiles = fp8_tiles.candidates(tokens, rows, k, card_of(sizes.device))

    def calls(tile: fp8_tiles.Fp8Tile) -> list[Call]:
        return [partial(fp8_linear, x, weight, sizes, tile=tile) for weight in weights]

    return Case(
        calls=calls(rule), reference=partial(fp8_linear_reference, x, weights[0], sizes), settings=lambda: {
            f"{tile.block_t}x{tile.block_n} stages {tile.stages} warps {tile.warps} /{tile.split}": calls(tile) for tile in tiles
        },
        compare={} if library is None else {"library": [partial(scaled_mm, x, w, library, blocked=blocked) for w in weights]},
        num_bytes=rows * k, flop=2.0 * tokens * rows * k, flop_s=FP8_FLOP_S,
    )


def nbytes(weight: FourBitWeight) -> int:
    return weight.words.nbytes + weight.scales.nbytes + (0 if weight.row_scales is None else weight.row_scales.nbytes)


def four_bit_call(x: Tensor, weight: FourBitWeight, tile: Tile | None) -> Call:
    return partial(multiply_dequantised, x, weight) if tile is None else partial(four_bit_linear, x, weight, tile=tile)


def shown(tile: Tile) -> str:
    form = f"{'direct ' if tile.direct else ''}{tile.block_m}x{tile.block_n}x{tile.block_k}"
    return f"{form} stages {tile.stages} warps {tile.warps} {'tma ' if tile.tma else ''}/{tile.split}"


def four_bit_case(rows: int, k: int, group: int, tokens: int) -> Case:
    """group: columns of W that share a scale; 0: all of a row; 16: NVFP4. The first line has the tile of the rule."""
    device = torch.get_default_device()
    weights, x = copies(lambda: random_four_bit(rows, k, group, device), rows * k // 2), noise(tokens, k)
    card, stored = card_of(device), weights[0].kernel_group
    assert stored is not None
    rule = four_bit_tiles.four_bit_tile(tokens, rows, k, stored, card)

    def calls(tile: Tile | None) -> list[Call]:
        return [four_bit_call(x, weight, tile) for weight in weights]

    return Case(
        calls=calls(rule), reference=partial(four_bit_linear_reference, x, weights[0]), compare={"library": calls(None)},
        settings=lambda: {shown(tile): calls(tile) for tile in four_bit_tiles.candidates(tokens, rows, k, stored, card)},
        num_bytes=nbytes(weights[0]), flop=2.0 * tokens * rows * k,
    )


def four_bit_forward_case(model: str, group: int, tokens: int) -> Case:
    device, (shapes, layers) = torch.get_default_device(), LAYERS[model]
    weights = [random_four_bit(rows, k, group, device) for _ in range(layers) for rows, k in shapes]
    xs, calls = {k: noise(tokens, k) for _, k in shapes}, []
    for weight in weights:
        stored = weight.kernel_group
        assert stored is not None
        tile = four_bit_tiles.four_bit_tile(tokens, weight.num_rows, weight.k, stored, card_of(device))
        calls.append(four_bit_call(xs[weight.k], weight, tile))

    def forward() -> None:
        for call in calls:
            call()

    return Case(
        calls=[forward], reference=None, num_bytes=sum(map(nbytes, weights)),
        flop=2.0 * tokens * sum(weight.num_rows * weight.k for weight in weights),
    )


def ordered_case(op: str, rows: int, k: int, tokens: int) -> Case:
    """op: `linear` or `swiglu`, compared with the library's product, of `swiglu` with a launch for the activation after it."""
    gated, n = op == "swiglu", rows // 2 if op == "swiglu" else rows
    weights, x, segments = copies(lambda: noise(rows, k, scale=k**-0.5), 2 * rows * k), noise(tokens, k), segments_of(rows, k)
    multiply = ordered_swiglu if gated else ordered_linear

    def calls(tile: Tile) -> list[Call]:
        return [partial(multiply, x, w, segments=segments, tile=tile) for w in weights]

    def library(w: Tensor) -> Tensor:
        y = F.linear(x, w)
        if not gated:
            return y
        out = y.new_empty(tokens, n)
        silu_and_mul(y, out=out)
        return out

    def reference() -> Tensor:
        y = F.linear(x.float(), weights[0].float())
        return F.silu(y[:, :n]) * y[:, n:] if gated else y

    return Case(
        calls=calls(ordered_tile(tokens, n, k, segments, gated=gated)), reference=reference,
        compare={"library": [partial(library, w) for w in weights]},
        settings=lambda: {shown(tile): calls(tile) for tile in ordered_tiles(tokens, n, k, segments, gated=gated)},
        num_bytes=weights[0].nbytes, flop=2.0 * tokens * rows * k,
    )


def ordered_tiles(tokens: int, n: int, k: int, segments: int, *, gated: bool) -> list[Tile]:
    """Tiles worth timing; all give the same bits."""
    found = []
    for block_m, block_n, block_k, stages, warps in GATED_BLOCKS if gated else BLOCKS:
        fits = segments == 1 or (k % (segments * block_k) == 0 and k // segments >= MIN_SEGMENT)
        if not fits or block_m > max(64, 1 << (tokens - 1).bit_length()):
            continue
        for split, tma in product(sorted({1, segments}), (True, False)):
            few = split == 1 or -(-tokens // block_m) * -(-n // block_n) * split <= MOST_PROGRAMS
            if few and (tma or tokens <= 512):
                found.append(Tile(block_m, block_n, block_k, stages, warps, tma, split))
    return found


ORDERED = (
    *(("swiglu" if shape == (28672, 4096) else "linear", *shape) for shape in LLAMA8B),
    ("linear", 960, 576), ("linear", 576, 576), ("swiglu", 3072, 576), ("linear", 576, 1536),
)

PRODUCTS = (
    Benchmark(
        "fp8_linear", fp8_case, "rows k scales tokens",
        tuple(
            (*shape, scales, tokens)
            for scales in ("blocks", "rows") for shape in (*LLAMA8B, *LLAMA70B_HALF, *QWEN30B)
            for tokens in (1, 16, 32, 64, 128, 256)
        ),
        (128, 256, "blocks", 3),
    ),
    Benchmark(
        "four_bit_linear", four_bit_case, "rows k group tokens",
        tuple(
            (*shape, group, tokens)
            for group in (128, 16) for shape in (*LLAMA8B, *QWEN30B) for tokens in (1, 4, 16, 64, 128, 256, 1024)
        ),
        (128, 256, 128, 3),
    ),
    Benchmark(
        "four_bit_forward", four_bit_forward_case, "model group tokens",
        tuple(product(("llama8b", "qwen3-30b"), (128, 16), (1, 4, 16, 64, 128, 256, 1024))), ("tiny", 128, 3),
    ),
    Benchmark(
        "ordered", ordered_case, "op rows k tokens",
        tuple((*shape, tokens) for shape in ORDERED for tokens in (16, 64, 128, 256, 512, 1024, 8192)), ("swiglu", 128, 256, 3),
    ),
)
