"""Dense products with weights of four bits: tiles of our kernel, and all of a forward pass in one graph, in one call on a GPU.

    python -m batchspec.kernels.gemm.four_bit_linear [--tokens 1 16 ...] [--models llama8b ...] [--group 128] [--seconds 240]

Every tile is checked against plain torch. For each product and number of tokens the first table has the tile of the rule
(`four_bit_tiles.four_bit_tile`), the fastest tile without and with TMA, and the dequantised weight by the library; the share is
that of the larger of bytes / 4.3 TB/s and operations / 790 TFLOP/s. Then the products of all layers are captured in one graph,
each with a weight of its own, which the L2 cache does not hold: with the tiles of the rule, with the fastest ones, and with those
that are fastest together: one after another, each product gets whichever of its FINALISTS makes the graph fastest. The last,
short table has these shares, and those of the last tiles without what lets a launch begin early. Kernels are compiled ahead by
`--jobs` processes, into Triton's cache on disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.continue_on_error import continue_on_error
from batchspec.kernels.benchmarks.options import add_limits, json_lines, parse_on_gpu, parser_of
from batchspec.kernels.benchmarks.timing import relative_error
from batchspec.kernels.common.card import Card, card_of
from batchspec.kernels.common.four_bit import FourBitWeight
from batchspec.kernels.common.graph_clock import Call, GraphClock
from batchspec.kernels.common.pdl import set_enabled
from batchspec.kernels.gemm import four_bit_linear as kernel
from batchspec.kernels.gemm.four_bit_dequantise import multiply_dequantised
from batchspec.kernels.gemm.four_bit_linear import four_bit_linear, four_bit_linear_reference, launch
from batchspec.kernels.gemm.four_bit_tiles import candidates, compiled_as, four_bit_tile
from batchspec.kernels.gemm.four_bit_trial import random_four_bit
from batchspec.kernels.gemm.tiles import Tile

TOKENS = (1, 16, 64, 256, 1024)
BYTES_S, FLOP_S = 4.3e12, 7.9e14


class Shape(NamedTuple):
    """The dense products of a layer: rows of W and K; and the number of layers."""

    products: tuple[tuple[int, int], ...]
    layers: int


MODELS = {
    "llama8b": Shape(((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 32),
    "qwen3-30b attention": Shape(((5120, 2048), (2048, 4096)), 48),
}
CACHE_BYTES = 120 << 20  # of copies of a weight: more than the L2 cache of an H200 holds
FINALISTS = 5
TOLERANCE = 4e-3  # of a result in bf16


@dataclass(slots=True)
class Timings:
    """Microseconds of one product for one number of tokens, by tile; None: the library."""

    us: dict[Tile | None, float] = field(default_factory=dict)
    rule: Tile | None = None

    def best(self, tiles: Iterable[Tile | None]) -> Tile | None:
        return min(tiles, key=lambda tile: self.us[tile])

    @property
    def finalists(self) -> list[Tile | None]:
        return sorted(self.us, key=lambda tile: self.us[tile])[:FINALISTS]


def floor_us(tokens: int, rows: int, k: int, num_bytes: float) -> float:
    """The larger of the time of the weight's bytes and of the operations."""
    return 1e6 * max(num_bytes / BYTES_S, 2.0 * tokens * rows * k / FLOP_S)


def bytes_of(weight: FourBitWeight) -> int:
    return weight.words.nbytes + weight.scales.nbytes + (0 if weight.row_scales is None else weight.row_scales.nbytes)


def call_of(x: Tensor, weight: FourBitWeight, tile: Tile | None) -> Call:
    if tile is None:
        return partial(multiply_dequantised, x, weight, interpret=not x.is_cuda)
    return partial(four_bit_linear, x, weight, tile=tile, interpret=not x.is_cuda)


def time_product(
    weights: Sequence[FourBitWeight], tokens: int, clock: GraphClock, save: Callable[[dict[str, Any]], None]
) -> Timings:
    """Every tile that is right; the library too. weights: copies."""
    (rows, k), device = (weights[0].num_rows, weights[0].k), weights[0].words.device
    x, found = torch.randn(tokens, k, device=device).bfloat16(), Timings()
    wanted, card, name = four_bit_linear_reference(x, weights[0]), card_of(device), f"T={tokens} {rows}x{k}"
    group = weights[0].kernel_group
    assert group is not None
    found.rule = four_bit_tile(tokens, rows, k, group, card)
    for tile in (None, *candidates(tokens, rows, k, group, card)):
        with continue_on_error(f"{name} {text_of(tile)}"):
            calls = [call_of(x, weight, tile) for weight in weights]
            error = relative_error(calls[0](), wanted)
            if not error < TOLERANCE:
                raise ValueError(f"WRONG, error {error:.1e}")
            found.us[tile] = clock.us(calls)
            row = {"tokens": tokens, "rows": rows, "k": k, "us": found.us[tile], "error": error}
            save({**row, "tile": tile and tile._asdict()})
    return found


def line_of(timings: Timings, tokens: int, weight: FourBitWeight) -> str:
    """A line of the first table."""
    floor, parts = floor_us(tokens, weight.num_rows, weight.k, bytes_of(weight)), []
    kinds: dict[str, list[Tile | None]] = {"rule": [timings.rule]}
    for name, tma in (("ptr", False), ("tma", True)):
        kinds[name] = [tile for tile in timings.us if tile is not None and tile.tma is tma]
    kinds["library"] = [None]
    for name, tiles in kinds.items():
        known = [tile for tile in tiles if tile in timings.us]
        if known:
            best = timings.best(known)
            us = timings.us[best]
            parts.append(f"{name} {us:>7.2f} {floor / us:>4.0%} {'' if best is None else text_of(best):<18}")
    return f"T={tokens:<4} {weight.num_rows:>5}x{weight.k:<5} floor {floor:>6.2f} | " + " | ".join(parts)


def text_of(tile: Tile | None) -> str:
    if tile is None:
        return "library"
    form, loads = "d" if tile.direct else "", "t" if tile.tma else "p"
    return f"{form}{tile.block_m}x{tile.block_n} s{tile.stages} w{tile.warps} {loads} /{tile.split}"


class Forward:
    """The products of all layers with weights of their own, in one graph."""

    def __init__(self, shape: Shape, group: int, device: torch.device) -> None:
        self.shape = shape
        self.layers = [[random_four_bit(rows, k, group, device) for rows, k in shape.products] for _ in range(shape.layers)]

    def floor_us(self, tokens: int) -> float:
        """The larger of the bytes and of the operations of all."""
        weights = [weight for layer in self.layers for weight in layer]
        size = sum(weight.num_rows * weight.k for weight in weights)
        return floor_us(tokens, size, 1, sum(map(bytes_of, weights)))

    def us(self, xs: Sequence[Tensor], tiles: Sequence[Tile | None]) -> float:
        """Microseconds of a replay. xs, tiles: of each product of a layer."""
        calls = [call_of(x, w, tile) for layer in self.layers for x, w, tile in zip(xs, layer, tiles, strict=True)]
        for call in calls[: len(tiles)]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times: list[float] = []
        for _ in range(6):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return min(times[1:])


def fastest_together(
    us_of: Callable[[Sequence[Tile | None]], float], choices: Sequence[Sequence[Tile | None]]
) -> tuple[list[Tile | None], float]:
    """One choice of each product, found one after another, from the first of each on; and the time of all."""
    chosen = [own[0] for own in choices]
    least = us_of(chosen)
    for place, own in enumerate(choices):
        for tile in own[1:]:
            other = [*chosen[:place], tile, *chosen[place + 1 :]]
            us = us_of(other)
            if us < least:
                chosen, least = other, us
    return chosen, least


def bench_forward(name: str, forward: Forward, tokens: int, timings: Sequence[Timings]) -> str:
    """The line of the last table."""
    device = forward.layers[0][0].words.device
    xs = [torch.randn(tokens, k, device=device).bfloat16() for _, k in forward.shape.products]
    us_of, floor = partial(forward.us, xs), forward.floor_us(tokens)
    rule, alone = us_of([own.rule for own in timings]), us_of([own.finalists[0] for own in timings])
    chosen, together = fastest_together(us_of, [own.finalists for own in timings])
    with no_early_reads():
        unfetched = us_of(chosen)
    before = set_enabled(False)
    late = us_of(chosen)
    set_enabled(before)
    shares = f"rule {floor / rule:>4.0%}, fastest alone {floor / alone:>4.0%}, fastest together {floor / together:>4.0%}"
    less = f"without early reads {floor / unfetched:>4.0%}, without early starts {floor / late:>4.0%}"
    line = f"{name:<20} T={tokens:<5} floor {floor:>7.0f} us | {shares} {together:>7.0f} us, {less} | "
    return line + ", ".join(map(text_of, chosen))


@contextmanager
def no_early_reads() -> Iterator[None]:
    """Within this block no program fetches weights to the L2 cache while earlier launches still run; direct tiles never do."""
    before, kernel.FETCH_BYTES = kernel.FETCH_BYTES, 0
    try:
        yield
    finally:
        kernel.FETCH_BYTES = before


def compile_one(task: tuple[Tile, int]) -> str:
    """Compile one kernel in a process of its own. It does not depend on the sizes, if N and K are multiples of 128."""
    tile, group = task
    try:
        weight = random_four_bit(256, 2048, group, torch.device("cuda"))
        x = torch.zeros(20, 2048, dtype=torch.bfloat16, device="cuda")
        launch(x, weight, None, out=x.new_empty(20, 256), tile=tile, compile_only=True)
    except Exception as error:
        return f"{text_of(tile)}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def kernels_of(products: Iterable[tuple[int, int]], token_counts: Sequence[int], group: int, card: Card) -> list[Tile]:
    """One tile for each kernel to compile."""
    tiles = (tile for rows, k in products for tokens in token_counts for tile in candidates(tokens, rows, k, group, card))
    return list(dict.fromkeys(map(compiled_as, tiles)))


def bench(arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    begin, device, group = time.monotonic(), torch.device("cuda"), arguments.group
    shapes = dict.fromkeys(shape for model in arguments.models for shape in MODELS[model].products)
    tiles = kernels_of(shapes, arguments.tokens, group, card_of(device))
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for failure in pool.imap_unordered(compile_one, [(tile, group) for tile in tiles]):
            if failure:
                print(f"not compiled: {failure}", flush=True)
    print(f"{torch.cuda.get_device_name(device)}; {len(tiles)} kernels compiled in {time.monotonic() - begin:.0f} s; a tile is "
          "(d: direct) tokens x rows of W, stages, warps, pointers or TMA, split of K", flush=True)
    clock, found = GraphClock(device), dict[tuple[int, int, int], Timings]()
    for rows, k in shapes:
        weights = [random_four_bit(rows, k, group, device) for _ in range(max(2, CACHE_BYTES // (rows * k // 2) + 1))]
        for tokens in arguments.tokens:
            if time.monotonic() - begin > arguments.seconds:
                print(f"T={tokens} {rows}x{k}: out of time", flush=True)
                continue
            with continue_on_error(f"T={tokens} {rows}x{k}"):
                found[tokens, rows, k] = time_product(weights, tokens, clock, save)
                print(line_of(found[tokens, rows, k], tokens, weights[0]), flush=True)
        del weights
        torch.cuda.empty_cache()
    lines = []
    for model in arguments.models:
        forward = Forward(MODELS[model], group, device)
        for tokens in arguments.tokens:
            own = [found.get((tokens, *shape)) for shape in forward.shape.products]
            with continue_on_error(f"{model} T={tokens}"):
                lines.append(bench_forward(model, forward, tokens, [timings for timings in own if timings is not None]))
        del forward
        torch.cuda.empty_cache()
    print("\n".join(lines), flush=True)


def main() -> None:
    parser = parser_of("gemm.four_bit_linear", MODELS, TOKENS)
    parser.add_argument("--group", type=int, default=128, help="columns of W that share a scale; 0: all of a row; 16: NVFP4")
    add_limits(parser, seconds=240)
    arguments = parse_on_gpu(parser)
    if arguments is not None:
        bench(arguments, json_lines(arguments.out))


if __name__ == "__main__":
    main()
