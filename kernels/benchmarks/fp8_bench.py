"""Dense FP8 products with block scales: splits and tiles of our kernel against the library's product, in one call on a GPU.

    python -m batchspec.kernels.gemm.fp8_linear [--tokens 1 16 ...] [--models llama8b ...] [--rows] [--seconds 55] [--out FILE]

Every result is checked against plain torch, also after the split kernel ran in a graph. For each product and number of tokens it
prints the library, the tile that `fp8_tiles.fp8_tile` chooses without a library, the fastest tile of each split, and the
bandwidth of the weights at the fastest of all. The last table has a line a model and number of tokens: the sums over all products
with the library alone, with the rule, and with the fastest of both, which is what a better rule can gain.
`--rows`: row scales instead. Kernels are compiled ahead by `--jobs` processes, into Triton's cache on disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.continue_on_error import continue_on_error
from batchspec.kernels.benchmarks.options import add_limits, json_lines, parse_on_gpu, parser_of
from batchspec.kernels.benchmarks.timing import relative_error
from batchspec.kernels.common.card import Card, card_of
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.common.graph_clock import Call, GraphClock
from batchspec.kernels.gemm.fp8_linear import fp8_linear, fp8_linear_reference, launch
from batchspec.kernels.gemm.fp8_tiles import Fp8Tile, candidates, fp8_tile
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens, quantise_tokens
from batchspec.kernels.gemm.scaled_mm import library_scales, scaled_mm

TOKENS = (1, 16, 32, 64, 128, 256)
# (rows of W, K) of qkv, o, gate and up, down
MODELS: dict[str, tuple[tuple[int, int], ...]] = {
    "llama8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama70b, half": ((5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336)),
    "qwen3-30b attention": ((5120, 2048), (2048, 4096)),
}
CACHE_BYTES = 120 << 20  # of copies of a weight: more than the L2 cache of an H200 holds
TOLERANCE = 4e-3  # of a result in bf16


class Product(NamedTuple):
    """One product with block or row scales, and copies of its weight."""

    weights: list[Tensor]
    scales: Tensor
    library: Tensor | None
    """The scales as the library reads them."""

    @property
    def blocked(self) -> bool:
        return self.scales.dim() == 2

    def ours(self, x: Fp8Tokens, tile: Fp8Tile) -> list[Call]:
        return [partial(fp8_linear, x, weight, self.scales, tile=tile) for weight in self.weights]

    def librarys(self, x: Fp8Tokens) -> list[Call]:
        assert self.library is not None
        return [partial(scaled_mm, x, weight, self.library, blocked=self.blocked) for weight in self.weights]


def make(rows: int, k: int, device: torch.device, *, blocked: bool) -> Product:
    copies = max(2, CACHE_BYTES // (rows * k) + 1)
    weights = [torch.randn(rows, k, device=device).to(E4M3) for _ in range(copies)]
    scales = torch.rand((-(-rows // 128), -(-k // 128)) if blocked else (rows,), device=device) / k
    return Product(weights, scales, library_scales(scales, rows, k))


def tokens_of(num_tokens: int, k: int, device: torch.device, *, blocked: bool) -> Fp8Tokens:
    x = torch.randn(num_tokens, k, device=device).bfloat16()
    return quantise_tokens(x, Fp8Form(whole=not blocked))


class Timings(NamedTuple):
    """Microseconds of one product for one number of tokens; inf for what does not work."""

    library: float
    rule: float
    """The tile of `fp8_tile`, or the library if `fp8_tile` chooses it."""
    fastest: float
    tile: Fp8Tile | None
    """The fastest; None: the library."""


def time_product(
    product: Product, num_tokens: int, clock: GraphClock, save: Callable[[dict[str, Any]], None]
) -> tuple[Timings, str]:
    """The timings, and the line of the table."""
    (rows, k), device = product.weights[0].shape, product.scales.device
    x = tokens_of(num_tokens, k, device, blocked=product.blocked)
    wanted = fp8_linear_reference(x, product.weights[0], product.scales)
    name, card = f"T={num_tokens} {rows}x{k}", card_of(device)

    def us_of(label: str, calls: list[Call], tile: Fp8Tile | None) -> float:
        us = float("inf")
        with continue_on_error(f"{name} {label}"):
            error = relative_error(calls[0](), wanted)
            timed = clock.us(calls)
            error = max(error, relative_error(calls[0](), wanted))
            if not error < TOLERANCE:
                raise ValueError(f"WRONG, error {error:.1e}")
            us = timed
            save({"tokens": num_tokens, "rows": rows, "k": k, "tile": tile and tile._asdict(), "us": us, "error": error})
        return us

    library = us_of("library", product.librarys(x), None) if product.library is not None else float("inf")
    tiles = candidates(num_tokens, rows, k, card)
    times = {tile: us_of(text_of(tile), product.ours(x, tile), tile) for tile in tiles}
    own = fp8_tile(num_tokens, rows, k, card, library=product.library is not None)
    best = min(times, key=times.__getitem__)
    parts = [f"{name:<22} library {library:>6.1f}", f"rule {times[tiles[0]]:>6.1f} {text_of(tiles[0]):<16}"]
    for split in sorted({tile.split for tile in tiles}):
        fastest = min((tile for tile in tiles if tile.split == split), key=times.__getitem__)
        parts.append(f"/{split} {times[fastest]:>6.1f} {text_of(fastest):<16}")
    fastest_us = min(library, times[best])
    parts.append(f"best {rows * k / fastest_us / 1e6:.2f} TB/s, {library / times[best]:.2f}x of the library")
    rule_us = library if own is None else times[own]
    return Timings(library, rule_us, fastest_us, best if times[best] < library else None), " | ".join(parts)


def text_of(tile: Fp8Tile) -> str:
    return f"{tile.block_t}x{tile.block_n} s{tile.stages} w{tile.warps} /{tile.split}"


def compile_one(task: tuple[Fp8Tile, bool]) -> str:
    """Compile one kernel in a process of its own. It does not depend on the sizes, if K is a multiple of 128."""
    tile, blocked = task
    try:
        device = torch.device("cuda")
        product = make(256, 2048, device, blocked=blocked)
        x = tokens_of(20, 2048, device, blocked=blocked)
        out = x.rows.values.new_empty(20, 256, dtype=torch.bfloat16)
        launch(x, product.weights[0], product.scales, None, tile, out, compile_only=True)
    except Exception as error:
        return f"{text_of(tile)}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def kernels_of(products: Iterable[tuple[int, int]], token_counts: Iterable[int], card: Card) -> list[Fp8Tile]:
    """One tile for each kernel to compile: all splits share a kernel."""
    counts = list(token_counts)
    tiles = (tile for rows, k in products for tokens in counts for tile in candidates(tokens, rows, k, card))
    return list(dict.fromkeys(tile._replace(split=min(tile.split, 2)) for tile in tiles))


def bench(arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    begin, device, blocked = time.monotonic(), torch.device("cuda"), not arguments.rows
    shapes = dict.fromkeys(shape for model in arguments.models for shape in MODELS[model])
    tiles = kernels_of(shapes, arguments.tokens, card_of(device))
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for failure in pool.imap_unordered(compile_one, [(tile, blocked) for tile in tiles]):
            if failure:
                print(f"not compiled: {failure}", flush=True)
    print(f"{len(tiles)} kernels compiled in {time.monotonic() - begin:.0f} s; a tile is tokens x rows of W", flush=True)
    clock, found = GraphClock(device), dict[tuple[int, int, int], Timings]()
    for rows, k in shapes:
        product = make(rows, k, device, blocked=blocked)
        for tokens in arguments.tokens:
            if time.monotonic() - begin > arguments.seconds:
                print(f"T={tokens} {rows}x{k}: out of time", flush=True)
                continue
            with continue_on_error(f"T={tokens} {rows}x{k}"):
                found[tokens, rows, k], line = time_product(product, tokens, clock, save)
                print(line, flush=True)
        del product
        torch.cuda.empty_cache()
    summary(found, arguments.models, arguments.tokens)


def summary(found: dict[tuple[int, int, int], Timings], models: Iterable[str], token_counts: Iterable[int]) -> None:
    """Sums over the products of a layer, if all were timed."""
    counts = list(token_counts)
    for model in models:
        for tokens in counts:
            own = [found.get((tokens, *shape)) for shape in MODELS[model]]
            timed = [timings for timings in own if timings is not None]
            if len(timed) == len(own):
                library, rule, fastest = (sum(getattr(one, field) for one in timed) for field in ("library", "rule", "fastest"))
                limit = sum(rows * k for rows, k in MODELS[model]) / 4.3e6
                sums = f"library {library:>7.1f} us, rule {rule:>7.1f}, fastest {fastest:>7.1f}, bytes at 4.3 TB/s {limit:>6.1f}"
                print(f"layer {model:<20} T={tokens:<4} {sums}", flush=True)


def main() -> None:
    parser = parser_of("gemm.fp8_linear", MODELS, TOKENS)
    parser.add_argument("--rows", action="store_true", help="row scales instead of block scales")
    add_limits(parser, seconds=55)
    arguments = parse_on_gpu(parser)
    if arguments is not None:
        bench(arguments, json_lines(arguments.out))


if __name__ == "__main__":
    main()
