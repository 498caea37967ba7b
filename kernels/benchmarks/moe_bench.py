"""Checks and times the kernels of a mixture of experts on the shapes of real models, in one call on a GPU.

    python -m batchspec.kernels.benchmarks.moe_bench [--models qwen3-30b ...] [--formats bf16 ...] [--sweep] [--seconds 240]

Weights, inputs and routers are random. Every product is checked against its reference in plain torch, with tokens on experts of
their own choice, all on the same k, and on half of the experts; the bits of the first tokens alone are compared with theirs among
all. The share is that of the larger of bytes / 4.3 TB/s and operations / 790 TFLOP/s (FP8 1500). `--sweep` times other tiles and
prints the fastest beside the default. Kernels are compiled ahead, several at once; lines appear as they are known.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.continue_on_error import continue_on_error
from batchspec.kernels.benchmarks.moe_weights import FORMATS, MODELS, MoeShape, Product, make_products
from batchspec.kernels.benchmarks.timing import Call, GraphClock
from batchspec.kernels.moe.combine import combine_norm, combine_norm_reference
from batchspec.kernels.moe.quantise import quantise_rows
from batchspec.kernels.moe.route import lists_reference, route, route_reference
from batchspec.kernels.moe.tiles import ExpertTile, candidates, expert_tile, unit_pairs_of
from batchspec.kernels.moe.units import Routing

TOKENS = (1, 16, 64, 256, 1024, 2048)
BYTES_S = 4.3e12
ROUTINGS = 4  # of a timing: a few tokens must not find their experts in the second-level cache
ALONE = 16  # tokens whose bits are compared
COLUMNS = f"{'case':<44} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'share':>6}  tile"


class Timing(NamedTuple):
    """One product with one tile."""

    tile: ExpertTile
    us: float
    num_bytes: float
    flop: float
    floor_us: float

    def line(self, case: str) -> str:
        rates = f"{self.num_bytes / self.us / 1e3:>7.0f} {self.flop / self.us / 1e6:>8.1f} {self.floor_us / self.us:>6.1%}"
        tile = "x".join(map(str, self.tile[:3])) + f" {self.tile.stages} stages {self.tile.warps} warps group {self.tile.group}"
        return f"{case:<44} {self.us:>9.2f} {rates}  {tile}"


def spread_ids(shape: MoeShape, tokens: int, spread: str, device: torch.device) -> Tensor:
    """int32 [T, k], each token's experts different."""
    if spread == "same":
        return torch.randperm(shape.experts, device=device)[: shape.top_k].expand(tokens, -1).int().contiguous()
    experts = max(shape.top_k, shape.experts // 2) if spread == "half" else shape.experts
    ids = torch.rand(tokens, experts, device=device).argsort(1)[:, : shape.top_k]
    return (ids * (shape.experts // experts)).int().contiguous()


def routing_of(shape: MoeShape, ids: Tensor, unit_pairs: int) -> Routing:
    weights = torch.rand(ids.shape, device=ids.device)
    return lists_reference(ids, weights / weights.sum(1, keepdim=True), shape.experts, unit_pairs)


def error_of(product: Product, tile: ExpertTile, ids: Tensor, x: Any) -> float:
    """Norm of the difference over the norm of the reference; NaN where something was not written."""
    out = product.empty(ids.numel()).fill_(torch.nan)
    product.run(x, routing_of(product.shape, ids, tile.block_t), tile, out)
    wanted = product.reference(x, ids)
    return float((out.float() - wanted).norm() / wanted.norm())


def same_bits(product: Product, tokens: int, device: torch.device) -> bool:
    """Whether the first tokens get the same bits alone as among all."""
    shape = product.shape
    ids = spread_ids(shape, tokens, "all", device)
    x = product.inputs(tokens)
    outs = []
    for count in (tokens, min(tokens, ALONE)):
        tile = expert_tile(
            unit_pairs_of(count, shape.top_k, shape.experts, product.dtype), gated=product.gated, dtype=product.dtype
        )
        rows = count if product.gated else count * shape.top_k
        outs.append(product.empty(count * shape.top_k))
        product.run(product.first(x, rows), routing_of(shape, ids[:count].contiguous(), tile.block_t), tile, outs[-1])
    return torch.equal(outs[0][: len(outs[1])], outs[1])


def time_tile(product: Product, tile: ExpertTile, all_ids: Sequence[Tensor], x: Any, clock: GraphClock) -> Timing:
    shape, pairs = product.shape, all_ids[0].numel()
    out = product.empty(pairs)
    routings = [routing_of(shape, ids, tile.block_t) for ids in all_ids]
    us = clock.us([partial(product.run, x, routing, tile, out) for routing in routings])
    touched = sum(len(ids.unique()) for ids in all_ids) / len(all_ids)
    num_bytes = touched * product.expert_bytes + product.input_bytes(x) + out.nbytes
    flop = 2.0 * pairs * product.rows * product.k
    return Timing(tile, us, num_bytes, flop, 1e6 * max(num_bytes / BYTES_S, flop / product.flop_s))


def compile_ahead(products: Sequence[Product], token_counts: Sequence[int], sweep: bool, device: torch.device) -> None:
    """Compile every kernel that `bench_products` starts, several at once."""
    todo: dict[tuple[Any, ...], Call] = {}
    for product in products:
        for tokens in {*token_counts, ALONE}:
            x, ids = product.inputs(tokens), spread_ids(product.shape, tokens, "all", device)
            for tile in tiles_of(product, tokens, sweep):
                routing = routing_of(product.shape, ids, tile.block_t)
                out = product.empty(ids.numel())
                todo[(product.gated, tile)] = partial(product.run, x, routing, tile, out, compile_only=True)

    def compile_one(call: Call) -> None:
        torch.cuda.set_device(device.index or 0)  # the current device is a thread's own
        with continue_on_error("not compiled"):
            call()

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, todo.values()))


def tiles_of(product: Product, tokens: int, sweep: bool) -> list[ExpertTile]:
    unit_pairs = unit_pairs_of(tokens, product.shape.top_k, product.shape.experts, product.dtype)
    sizes = [unit_pairs]
    if sweep:
        sizes += [size for size in (unit_pairs // 2, unit_pairs * 2) if 16 <= size <= 256]
    found = [tile for size in sizes for tile in candidates(size, gated=product.gated, dtype=product.dtype)]
    return found if sweep else found[:1]


def bench_products(
    name: str, products: Sequence[Product], token_counts: Sequence[int], sweep: bool, deadline: float,
    save: Callable[[dict[str, Any]], None], device: torch.device,
) -> None:  # fmt: skip
    clock = GraphClock(device)
    for product in products:
        for tokens in token_counts:
            case = f"{name} {'up' if product.gated else 'down'} T={tokens}"
            if time.monotonic() > deadline:
                print(f"{case}: out of time")
                return
            with continue_on_error(case):
                x = product.inputs(tokens)
                tiles = tiles_of(product, tokens, sweep)
                errors = [
                    error_of(product, tiles[0], spread_ids(product.shape, tokens, s, device), x) for s in ("all", "same", "half")
                ]
                if not max(errors) < product.tolerance:
                    print(f"{case}: WRONG, errors {errors}", flush=True)
                    continue
                bits = "" if same_bits(product, tokens, device) else "  bits DIFFER from those of 16 tokens"
                all_ids = [spread_ids(product.shape, tokens, "all", device) for _ in range(ROUTINGS)]
                timings = []
                for tile in tiles:
                    with continue_on_error(f"{case} {tile}"):
                        timings.append(time_tile(product, tile, all_ids, x, clock))
                        save({"case": case, "tile": tile._asdict(), "us": round(timings[-1].us, 2)})
                print(timings[0].line(case) + f"  error {max(errors):.1e}{bits}", flush=True)
                best = min(timings, key=lambda timing: timing.us)
                if best.us < 0.98 * timings[0].us:
                    wrong = error_of(product, best.tile, all_ids[0], x)
                    print(best.line("  fastest") + f"  error {wrong:.1e}", flush=True)


def bench_rest(name: str, shape: MoeShape, token_counts: Sequence[int], device: torch.device) -> None:
    """Routing, quantisation and combination."""
    clock = GraphClock(device)
    for tokens in token_counts:
        with continue_on_error(f"{name} T={tokens}"):
            logits = torch.randn(tokens, shape.experts, device=device)
            call = partial(route, top_k=shape.top_k, norm_topk=True, unit_pairs=32)
            found, wanted = call(logits), route_reference(logits, shape.top_k, norm_topk=True, unit_pairs=32)
            for field in ("expert_ids", "pairs", "offsets", "units"):
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
            times = (clock.us([partial(call, logits)]), clock.us([combine]), clock.us([partial(quantise_rows, residual)]))
            print(
                f"{name} T={tokens}: route {times[0]:.2f} us, combine_norm {times[1]:.2f} us, quantise_rows {times[2]:.2f} us",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m batchspec.kernels.benchmarks.moe_bench")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--sweep", action="store_true", help="time other tiles too")
    parser.add_argument("--seconds", type=float, default=300, help="start no new case after this time")
    parser.add_argument("--out", help="append each timing as JSON to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("moe_bench: no GPU here, nothing to time")
        return
    device, begin = torch.device("cuda"), time.monotonic()

    def save(row: dict[str, Any]) -> None:
        if arguments.out:
            with open(arguments.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    print(COLUMNS, flush=True)
    for model in arguments.models:
        shape = MODELS[model]
        bench_rest(model, shape, arguments.tokens, device)
        for form in (form for form in arguments.formats if form in shape.formats):
            products = make_products(shape, form, device)
            started = time.monotonic()
            compile_ahead(products, arguments.tokens, arguments.sweep, device)
            print(f"{model} {form}: compiled in {time.monotonic() - started:.0f} s", flush=True)
            bench_products(
                f"{model} {form}", products, arguments.tokens, arguments.sweep, begin + arguments.seconds, save, device
            )
            del products
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
