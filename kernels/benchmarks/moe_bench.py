"""Checks and times the kernels of a mixture of experts on the shapes of real models, in one call on a GPU.

    python -m batchspec.kernels.benchmarks.moe_bench [--models qwen3-30b ...] [--formats bf16 ...] [--sweep] [--seconds 240]

Weights, inputs and routers are random. Every tile is checked against the reference in plain torch, and its bits against those of
the first. The fastest is also checked with all tokens on the same experts and on half of them, and the bits of the first tokens
alone with theirs among all. The share is that of the larger of bytes / 4.3 TB/s and operations / 790 TFLOP/s (FP8 1500).
`--sweep` also times other tiles, and the last table compares the fastest with the default. Kernels are compiled ahead by `--jobs`
processes, into Triton's cache on disk.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.continue_on_error import continue_on_error
from batchspec.kernels.benchmarks.moe_weights import FORMATS, MODELS, MoeShape, Product, make_products
from batchspec.kernels.benchmarks.options import add_limits, json_lines, parse_on_gpu, parser_of
from batchspec.kernels.benchmarks.timing import relative_error
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.graph_clock import Call, GraphClock
from batchspec.kernels.moe.combine import combine_norm, combine_norm_reference
from batchspec.kernels.moe.quantise import quantise_rows
from batchspec.kernels.moe.route import lists_reference, route, route_reference
from batchspec.kernels.moe.router import router_logits
from batchspec.kernels.moe.sort_rows import sort_rows
from batchspec.kernels.moe.tiles import ExpertTile, candidates, expert_tile, largest_first
from batchspec.kernels.moe.units import Routing

TOKENS = (16, 64, 256, 512, 1024, 4096)
BYTES_S = 4.3e12
ROUTINGS = 4  # of a timing: a few tokens must not find their experts in the second-level cache
ALONE = 16  # tokens whose bits are compared
COLUMNS = f"{'case':<34} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'share':>6}  error   tile"


class Timing(NamedTuple):
    """One product with one tile."""

    case: str
    tile: ExpertTile
    us: float
    num_bytes: float
    flop: float
    floor_us: float
    error: float
    same_bits: bool
    """As the first tile that was timed."""

    def line(self, case: str) -> str:
        rates = f"{self.num_bytes / self.us / 1e3:>7.0f} {self.flop / self.us / 1e6:>8.1f} {self.floor_us / self.us:>6.1%}"
        return f"{case:<34} {self.us:>9.2f} {rates}  {self.error:.0e}   {text_of(self.tile)}"


def text_of(tile: ExpertTile) -> str:
    limit = "" if tile.registers is None else f" {tile.registers} registers"
    return f"{tile.low}-{tile.block_t} x{tile.block_n} x{tile.block_k} {tile.stages} stages {tile.warps} warps{limit}"


def spread_ids(shape: MoeShape, tokens: int, spread: str, device: torch.device) -> Tensor:
    """int32 [T, k], each token's experts different."""
    if spread == "same":
        return torch.randperm(shape.experts, device=device)[: shape.top_k].expand(tokens, -1).int().contiguous()
    experts = max(shape.top_k, shape.experts // 2) if spread == "half" else shape.experts
    ids = torch.rand(tokens, experts, device=device).argsort(1)[:, : shape.top_k]
    return (ids * (shape.experts // experts)).int().contiguous()


def routing_of(product: Product, ids: Tensor, unit_pairs: int) -> Routing:
    weights, order = torch.rand(ids.shape, device=ids.device), largest_first(unit_pairs, product.dtype)
    weights /= weights.sum(1, keepdim=True)
    return lists_reference(ids, weights, product.shape.experts, unit_pairs, largest_first=order)


def tiles_of(product: Product, tokens: int, sweep: bool) -> list[ExpertTile]:
    shape = product.shape
    found = candidates(tokens, shape.top_k, shape.experts, card_of(product.device), gated=product.gated, dtype=product.dtype)
    return found if sweep else found[:1]


def alone_tile(product: Product) -> ExpertTile:
    """A tile for a few tokens, other than that of many."""
    return expert_tile(16, 1, card_of(product.device), gated=product.gated, dtype=product.dtype)


def bench_case(name: str, product: Product, tokens: int, sweep: bool, clock: GraphClock) -> list[Timing]:
    """All tiles with right results for one product and number of tokens, the default first. Raises ValueError if none is."""
    case, device = f"{name} {'up' if product.gated else 'down'} {tokens}", product.device
    x, shape = product.inputs(tokens), product.shape
    all_ids = [spread_ids(shape, tokens, "all", device) for _ in range(ROUTINGS)]
    wanted = product.reference(x, routing_of(product, all_ids[0], 16))
    out, touched = torch.empty_like(wanted, dtype=torch.bfloat16), sum(len(ids.unique()) for ids in all_ids) / len(all_ids)
    flop = 2.0 * len(out) * product.rows * product.k
    inputs: dict[int, list[tuple[Any, Routing]]] = {}
    bits: Tensor | None = None
    found = []
    for tile in tiles_of(product, tokens, sweep):
        with continue_on_error(f"{case} {text_of(tile)}"):
            if tile.block_t not in inputs:
                routings = [routing_of(product, ids, tile.block_t) for ids in all_ids]
                inputs[tile.block_t] = [(product.rows_of(x, routing), routing) for routing in routings]
            own = inputs[tile.block_t]
            y = product.result(x, own[0][1], tile)
            error, bits = relative_error(y, wanted), y if bits is None else bits
            if not error < product.tolerance:
                print(f"{case} {text_of(tile)}: WRONG, error {error}", flush=True)
                continue
            us = clock.us([partial(product.run, rows, routing, tile, out) for rows, routing in own])
            num_bytes = touched * product.expert_bytes + product.rows_bytes(own[0][0]) + out.nbytes
            floor_us = 1e6 * max(num_bytes / BYTES_S, flop / product.flop_s)
            found.append(Timing(case, tile, us, num_bytes, flop, floor_us, error, torch.equal(bits, y)))
    if not found:
        raise ValueError(f"{case}: no tile is right")
    check_tile(case, product, x, tokens, min(found, key=lambda timing: timing.us).tile)
    return found


def check_tile(case: str, product: Product, x: Tensor, tokens: int, tile: ExpertTile) -> None:
    """Check a tile with all tokens on the same experts and on half of them, and the first tokens alone."""
    shape = product.shape
    for spread in ("same", "half"):
        routing = routing_of(product, spread_ids(shape, tokens, spread, product.device), tile.block_t)
        error = relative_error(product.result(x, routing, tile), product.reference(x, routing))
        if not error < product.tolerance:
            print(f"{case} {text_of(tile)}: WRONG with {spread} experts, error {error}", flush=True)
    few, ids = min(tokens, ALONE), spread_ids(shape, tokens, "all", product.device)
    own = x[: few if product.gated else few * shape.top_k]
    other = alone_tile(product)
    if product.device.type == "cpu":  # the interpreter adds up block by block of K, tensor cores by 16 columns
        other = other._replace(block_k=tile.block_k)
    alone = product.result(own, routing_of(product, ids[:few].contiguous(), 16), other)
    if not torch.equal(alone, product.result(x, routing_of(product, ids, tile.block_t), tile)[: len(alone)]):
        print(f"{case} {text_of(tile)}: bits DIFFER from those of {few} tokens", flush=True)


def report(timings: Sequence[Timing]) -> None:
    """Lines of one case: the default, and the fastest if it is faster."""
    default, best = timings[0], min(timings, key=lambda timing: timing.us)
    different = sum(not timing.same_bits for timing in timings)
    print(default.line(default.case) + (f"  bits DIFFER in {different} tiles" if different else ""), flush=True)
    if best.us < 0.98 * default.us:
        print(best.line("  fastest"), flush=True)


def bench_rest(name: str, shape: MoeShape, token_counts: Sequence[int], device: torch.device) -> None:
    """The launches around the products."""
    clock = GraphClock(device)
    for tokens in token_counts:
        with continue_on_error(f"{name} {tokens}"):
            logits = torch.randn(tokens, shape.experts, device=device)
            how: dict[str, Any] = {"norm_topk": True, "unit_pairs": 32, "largest_first": "mxfp4" in shape.formats}
            call = partial(route, logits, shape.top_k, **how)
            found, wanted = call(), route_reference(logits, shape.top_k, **how)
            for field in ("expert_ids", "pairs", "places", "offsets", "units"):
                assert torch.equal(getattr(found, field), getattr(wanted, field)), f"route: {field}"
            torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-7)
            y = torch.randn(tokens * shape.top_k, shape.hidden, device=device).bfloat16()
            residual, gain = torch.randn(tokens, shape.hidden, device=device).bfloat16(), torch.ones(shape.hidden, device=device)
            gain, wanted_residual, out = gain.bfloat16(), residual.clone(), torch.full_like(residual, torch.nan)
            expected = torch.empty_like(residual)
            combine_norm_reference(y, found.weights, wanted_residual, gain, 1e-6, out=expected)
            combine = partial(combine_norm, y, found.weights, residual, gain, 1e-6, out=out)
            combine()
            torch.testing.assert_close(residual, wanted_residual, rtol=2**-6, atol=2e-2)
            torch.testing.assert_close(out, expected, rtol=2**-5, atol=3e-2)
            gate = torch.randn(shape.experts, shape.hidden, device=device).bfloat16()
            calls: dict[str, Call] = {
                "router": partial(router_logits, residual, gate), "route": call, "sort_rows": partial(sort_rows, residual, found),
                "quantise_rows": partial(quantise_rows, residual, found), "combine_norm": combine,
            }
            print(f"{name} {tokens}: " + ", ".join(f"{key} {clock.us([one]):.2f} us" for key, one in calls.items()), flush=True)


def compile_one(task: tuple[str, str, bool, ExpertTile]) -> str:
    """Compile one kernel in a process of its own. Its name in Triton's cache does not depend on the number of experts."""
    model, form, gated, tile = task
    try:
        shape = replace(MODELS[model], experts=MODELS[model].top_k)
        product = make_products(shape, form, torch.device("cuda"), only_shapes=True)[0 if gated else 1]
        x, routing = product.inputs(4), routing_of(product, spread_ids(shape, 4, "all", product.device), tile.block_t)
        product.run(product.rows_of(x, routing), routing, tile, product.empty(len(routing.pairs)), compile_only=True)
    except Exception as error:
        return f"{model} {form} {'up' if gated else 'down'} {text_of(tile)}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_ahead(cases: Sequence[tuple[str, str]], token_counts: Sequence[int], sweep: bool, jobs: int) -> None:
    """Compile every product that is timed. Kernels of two models that differ in the number of experts alone are one."""
    todo: dict[Any, tuple[str, str, bool, ExpertTile]] = {}
    for model, form in cases:
        shape = MODELS[model]
        for product in make_products(replace(shape, experts=shape.top_k), form, torch.device("cuda"), only_shapes=True):
            product.shape = shape
            for tile in (alone_tile(product), *(tile for tokens in token_counts for tile in tiles_of(product, tokens, sweep))):
                key = (form, product.gated, tile, shape.hidden, shape.width, shape.gate, shape.bias)
                todo.setdefault(key, (model, form, product.gated, tile))
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for failure in pool.imap_unordered(compile_one, todo.values()):
            if failure:
                print(f"not compiled: {failure}", flush=True)
    print(f"{len(todo)} kernels compiled in {time.monotonic() - started:.0f} s", flush=True)


def bench_all(
    cases: Sequence[tuple[str, str]], token_counts: Sequence[int], sweep: bool, deadline: float,
    save: Callable[[dict[str, Any]], None],
) -> None:
    device = torch.device("cuda")
    clock = GraphClock(device)
    print(COLUMNS, flush=True)
    for model, form in cases:
        for product in make_products(MODELS[model], form, device):
            for tokens in token_counts:
                if time.monotonic() > deadline:
                    print(f"{model} {form} {tokens}: out of time", flush=True)
                    continue
                with continue_on_error(f"{model} {form} {tokens}"):
                    timings = bench_case(f"{model} {form}", product, tokens, sweep, clock)
                    report(timings)
                    for timing in timings:
                        save(timing._asdict() | {"tile": timing.tile._asdict()})
        torch.cuda.empty_cache()


def main() -> None:
    parser = parser_of("benchmarks.moe_bench", MODELS, TOKENS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--sweep", action="store_true", help="time other tiles too")
    add_limits(parser, seconds=300)
    arguments = parse_on_gpu(parser)
    if arguments is None:
        return
    begin = time.monotonic()
    cases = [(model, form) for model in arguments.models for form in MODELS[model].formats if form in arguments.formats]
    compile_ahead(cases, arguments.tokens, arguments.sweep, arguments.jobs)
    for model in arguments.models:
        bench_rest(model, MODELS[model], arguments.tokens, torch.device("cuda"))
    bench_all(cases, arguments.tokens, arguments.sweep, begin + arguments.seconds, json_lines(arguments.out))


if __name__ == "__main__":
    main()
