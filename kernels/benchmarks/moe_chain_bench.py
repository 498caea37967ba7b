"""Times a layer of MXFP4 experts as a decode round runs it: norm, router, route, both products and combine, launch after launch.

    python -m batchspec.kernels.benchmarks.moe_chain_bench [--models gpt-oss-120b ...] [--tokens 1 4 ...]

Weights are random and those of several layers, so that the L2 cache does not hold them. Each layer routes by its own logits.
Variants differ in tiles and in the launch that copies rows into the list's order; results must agree in every bit. In the last
tables a time is microseconds a layer, and the share of a part is what the layer takes less without it. Takes about a minute on an
H200.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.continue_on_error import continue_on_error
from batchspec.kernels.benchmarks.moe_bench import compile_one
from batchspec.kernels.benchmarks.moe_weights import MODELS, MoeShape, make_products
from batchspec.kernels.benchmarks.options import parse_on_gpu, parser_of
from batchspec.kernels.benchmarks.timing import GraphClock
from batchspec.kernels.moe.combine import combine_norm
from batchspec.kernels.moe.experts_mxfp4 import experts_mxfp4_down, experts_mxfp4_up
from batchspec.kernels.moe.route import route
from batchspec.kernels.moe.router import router_logits
from batchspec.kernels.moe.sort_rows import sort_rows
from batchspec.kernels.moe.tiles import ExpertTile, expert_tile, unit_pairs_of
from batchspec.kernels.moe.units import Routing, max_units
from batchspec.kernels.norm_rope.norm import add_norm

TOKENS = (1, 4, 6, 9, 16, 64, 256, 512)
LAYERS = 4
MANY_UNITS = 1 << 20  # more units than the tiles of few units are for
PARTS = ("route", "up", "down", "combine")
SHARE_TOKENS = (1, 4, 9)
NARROW_TOKENS = 64


@dataclass(frozen=True)
class Variant:
    """A way to run the layer: changes to the tiles of many units, or with `up` None the default tiles."""

    name: str
    up: dict[str, Any] | None = field(default_factory=dict)
    down: dict[str, Any] = field(default_factory=dict)
    rows_by_route: bool = True
    router_ahead: bool = True
    narrow: bool = False
    """The changes are for units of 16 pairs, and worth timing up to `NARROW_TOKENS`."""

    def tiles(self, shape: MoeShape, tokens: int) -> tuple[ExpertTile, ExpertTile]:
        unit_pairs = unit_pairs_of(tokens, shape.top_k, shape.experts, torch.uint8)
        units = MANY_UNITS if self.up is not None else max_units(tokens, shape.top_k, shape.experts, unit_pairs)
        up, down = (expert_tile(unit_pairs, units, gated=gated, dtype=torch.uint8) for gated in (True, False))
        return up._replace(**self.up or {}), down._replace(**self.down)


SORTED_APART, DEFAULT = Variant("rows sorted apart", rows_by_route=False, router_ahead=False), Variant("default", None)
SIX_STAGES = {"stages": 6, "block_n": 64}
VARIANTS = (
    SORTED_APART, Variant("router ahead", rows_by_route=False), Variant("and route copies rows"),
    Variant("64/64 rows, 6 stages", SIX_STAGES, SIX_STAGES, narrow=True), DEFAULT,
)  # fmt: skip


class Layers:
    """Layers of one model with random weights, and passes of some tokens through them."""

    def __init__(self, shape: MoeShape, device: torch.device) -> None:
        self.shape = shape
        self.products = [make_products(shape, "mxfp4", device, only_shapes=True) for _ in range(LAYERS)]
        new = partial(torch.randn, device=device)
        self.routers = [
            ((new(shape.experts, shape.hidden) * shape.hidden**-0.5).bfloat16(), new(shape.experts) * 0.1) for _ in range(LAYERS)
        ]
        self.gain = torch.ones(shape.hidden, device=device, dtype=torch.bfloat16)
        self.num_read = torch.zeros(1, device=device, dtype=torch.int32)
        self.begin(1)

    def begin(self, tokens: int) -> None:
        """Make new tokens."""
        self.start = torch.randn(tokens, self.shape.hidden, device=self.gain.device).bfloat16()
        self.residual, self.mixed, self.x = (torch.empty_like(self.start) for _ in range(3))
        self.live = torch.ones(tokens, dtype=torch.bool, device=self.gain.device)
        self.kept: list[tuple[Routing, Tensor, Tensor, Tensor]] = []

    def forward(self, variant: Variant, without: str = "") -> None:
        """One pass. without: a part whose results are those of an earlier pass, which `keep` has stored."""
        shape, tiles = self.shape, variant.tiles(self.shape, len(self.start))
        torch.neg(self.start, out=self.residual)
        torch.neg(self.start, out=self.mixed)
        for layer, (up, down) in enumerate(self.products):
            add_norm(self.mixed, self.residual, self.gain, 1e-5, out=self.x)  # of attention, which is left out
            if without == "route":
                routing, rows, *_ = self.kept[layer]
            else:
                routing, rows = self._route(layer, variant)
            if without == "up":
                inner = self.kept[layer][2]
            else:
                inner = experts_mxfp4_up(rows, up.weight, up.bias, routing, tile=tiles[0], gate=shape.gate)
            if without == "down":
                y = self.kept[layer][3]
            else:
                y = experts_mxfp4_down(inner, down.weight, down.bias, routing, tile=tiles[1])
            if without != "combine":
                combine_norm(y, routing.weights, self.residual, self.gain, 1e-5, out=self.mixed)
            if without == "keep":
                self.kept.append((routing, rows, inner, y))

    def _route(self, layer: int, variant: Variant) -> tuple[Routing, Tensor]:
        shape, how = self.shape, dict[str, Any](rows_of=self.x) if variant.rows_by_route else {}
        logits = router_logits(self.x, *self.routers[layer], ahead=variant.router_ahead)
        pairs = unit_pairs_of(len(self.x), shape.top_k, shape.experts, torch.uint8)
        routing = route(
            logits, shape.top_k, norm_topk=True, unit_pairs=pairs, live=self.live, out_num_read=self.num_read, **how
        )  # fmt: skip
        return routing, sort_rows(self.x, routing) if routing.rows is None else routing.rows

    def bits(self, variant: Variant) -> tuple[Tensor, Tensor]:
        self.x.fill_(torch.nan)
        self.forward(variant)
        return self.residual.clone(), self.mixed.clone()


def compile_rest(task: tuple[str, int]) -> str:
    """Compile the launches around the products for one number of tokens, in its own process."""
    model, tokens = task
    shape = replace(MODELS[model], width=128)
    layers = Layers(shape, torch.device("cuda"))
    layers.begin(tokens)
    with continue_on_error(f"{model} {tokens}"):
        for variant in (SORTED_APART, DEFAULT):
            layers._route(0, variant)
    return ""


def compile_ahead(models: Sequence[str], token_counts: Sequence[int], jobs: int) -> None:
    """Compile in several processes, into Triton's cache on disk."""
    tiles = {
        (gated, tile): (model, "mxfp4", gated, tile)
        for model in models
        for tokens in token_counts
        for variant in variants_of(MODELS[model], tokens)
        for gated, tile in zip((True, False), variant.tiles(MODELS[model], tokens), strict=True)
    }  # fmt: skip
    padded = sorted({min(64, 1 << (tokens - 1).bit_length()) for tokens in token_counts})  # from 17 on, routes are alike
    rest = [(model, tokens) for model in models for tokens in padded]
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        others = pool.imap_unordered(compile_rest, rest)
        for failure in (*pool.imap_unordered(compile_one, tiles.values()), *others):
            if failure:
                print(f"not compiled: {failure}", flush=True)
    print(f"{len(tiles)} products and {len(rest)} routes compiled in {time.monotonic() - started:.0f} s", flush=True)


def variants_of(shape: MoeShape, tokens: int) -> list[Variant]:
    narrow = tokens <= NARROW_TOKENS and unit_pairs_of(tokens, shape.top_k, shape.experts, torch.uint8) == 16
    return [variant for variant in VARIANTS if narrow or not variant.narrow]


def times_of(layers: Layers, tokens: int, clock: GraphClock) -> dict[str, tuple[float, bool]]:
    """Microseconds a layer of each variant, and whether its bits are those of the first."""
    layers.begin(tokens)
    found: dict[str, tuple[float, bool]] = {}
    wanted: tuple[Tensor, Tensor] | None = None
    for variant in variants_of(layers.shape, tokens):
        with continue_on_error(f"{tokens} tokens, {variant.name}"):
            bits = layers.bits(variant)
            wanted = wanted or bits
            same = all(map(torch.equal, bits, wanted)) and not bool(bits[0].isnan().any())
            us = clock.us([partial(layers.forward, variant)], repeats=5) / LAYERS
            found[variant.name] = us, same
    return found


def shares_of(layers: Layers, tokens: int, clock: GraphClock, whole: dict[str, tuple[float, bool]]) -> list[str]:
    lines = []
    for variant in (SORTED_APART, DEFAULT):
        layers.begin(tokens)
        layers.forward(variant, "keep")
        us = [whole[variant.name][0] - clock.us([partial(layers.forward, variant, part)], repeats=5) / LAYERS for part in PARTS]
        lines.append(f"{tokens:>4} tokens, {variant.name:<8} " + "".join(f"{own:>9.1f}" for own in us))
    return lines


def main() -> None:
    parser = parser_of("benchmarks.moe_chain_bench", MODELS, TOKENS)
    parser.set_defaults(models=["gpt-oss-120b", "gpt-oss-20b"])
    arguments = parse_on_gpu(parser)
    if arguments is None:
        return
    device = torch.device("cuda")
    compile_ahead(arguments.models, arguments.tokens, arguments.jobs)
    clock = GraphClock(device)
    for model in arguments.models:
        torch.manual_seed(0)
        layers = Layers(MODELS[model], device)
        columns = {tokens: times_of(layers, tokens, clock) for tokens in arguments.tokens}
        shares = []
        with continue_on_error(f"{model}: shares"):
            for tokens in sorted(set(arguments.tokens) & set(SHARE_TOKENS)):
                shares += shares_of(layers, tokens, clock, columns[tokens])
        print(f"\n{model}: microseconds a layer; ! other bits than the first line")
        print(f"{'tokens':<32}" + "".join(f"{tokens:>9}" for tokens in columns))
        for variant in VARIANTS:
            cells = (column.get(variant.name) for column in columns.values())
            texts = ("-" if cell is None else f"{cell[0]:.1f}{'' if cell[1] else '!'}" for cell in cells)
            print(f"{variant.name:<32}" + "".join(f"{text:>9}" for text in texts), flush=True)
        print(f"{'less without':<22} " + "".join(f"{part:>9}" for part in PARTS))
        print("\n".join(shares), flush=True)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
