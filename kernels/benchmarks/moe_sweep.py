"""Times the two forms of the grouped products of experts with many tiles, in one call on a GPU.

    python -m batchspec.kernels.benchmarks.moe_sweep --models gpt-oss-20b qwen3-30b --tokens 64 256 1024 --jobs 14

    gathered  programs gather the rows of their tokens (experts.py, experts_fp8.py, experts_mxfp4.py)
    sorted    rows lie in the order of the list of pairs (sorted_plain.py, sorted_fp8.py, sorted_mxfp4.py), after `sort_rows`
    ring      as sorted, with persistent programs in which one warp loads (persistent_mxfp4.py); only if `--forms` names it

Kernels are compiled first, by `--jobs` processes, into Triton's cache on disk. Every variant is checked against the reference
in plain torch, and its bits against those of the other variants (FP8: of the sorted ones). The last table has a line for
each product and number of tokens: the fastest variant, its share of the larger of bytes / 4.3 TB/s and operations / 790 TFLOP/s
(FP8 1500), and the share of the tile that the model takes today. Everything is written to $OUT if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.continue_on_error import continue_on_error
from batchspec.kernels.benchmarks.moe_bench import ALONE, BYTES_S, ROUTINGS, routing_of, spread_ids
from batchspec.kernels.benchmarks.moe_weights import FORMATS, MODELS, Product, make_products
from batchspec.kernels.benchmarks.timing import Call, GraphClock
from batchspec.kernels.common.pdl import set_enabled
from batchspec.kernels.moe import router
from batchspec.kernels.moe.combine import combine_norm
from batchspec.kernels.moe.route import route
from batchspec.kernels.moe.router import router_logits
from batchspec.kernels.moe.sort_rows import sort_fp8_rows, sort_rows
from batchspec.kernels.moe.tiles import SHARED_BYTES, ExpertTile, expert_tile, unit_pairs_of
from batchspec.kernels.moe.units import Routing

TOKENS = (16, 64, 256, 512, 1024, 4096)
SPREADS = ("all", "same", "half")


class Variant(NamedTuple):
    """A form of a product and its tile. low: the narrowest tile of the sorted form."""

    form: str
    tile: ExpertTile
    low: int = 0

    def text(self) -> str:
        tile = self.tile
        pairs = f"{tile.block_t}" if self.form != "sorted" else f"{self.low}-{tile.block_t}"
        return f"{self.form:<8} {pairs:>7} x{tile.block_n:>4} x{tile.block_k:>4} {tile.stages}st {tile.warps}w"


class Found(NamedTuple):
    """One timed variant of one case."""

    case: str
    variant: Variant
    us: float
    floor_us: float
    error: float
    same_bits: bool


def variants(product: Product, tokens: int, forms: Sequence[str] = ("sorted",)) -> list[Variant]:
    """Today's tile first, then those of the other forms."""
    shape, gated, dtype = product.shape, product.gated, product.dtype
    today = expert_tile(unit_pairs_of(tokens, shape.top_k, shape.experts, dtype), gated=gated, dtype=dtype)
    mean = tokens * shape.top_k / shape.experts
    height = min(128, max(16, 1 << (max(1, round(mean)) - 1).bit_length()))  # the power of two that holds the mean
    found = [Variant("gathered", today)]
    for block_t in sorted({height, min(256, 2 * height), max(16, height // 2)}):
        for block_n, block_k, stages, warps in BLOCKS[product.form]:
            tile = ExpertTile(block_t, block_n, block_k, stages, warps)
            lows = {16, block_t} if block_t <= 64 else {32, block_t}
            if "sorted" in forms and fits(tile, gated, product.form):
                found += [Variant("sorted", tile, low) for low in sorted(lows)]
        if "ring" in forms and product.form == "mxfp4":
            for block_n, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
                tiles = [ExpertTile(block_t, block_n, 128, stages, warps) for stages in (8, 6, 5, 4, 3)]
                found += [Variant("ring", tile) for tile in tiles if fits(tile, gated, product.form)][:1]
    return found


# Values of (block_n, block_k, stages, warps).
BLOCKS = {
    "bf16": (
        (64, 64, 4, 4), (64, 64, 6, 4), (64, 128, 3, 4), (128, 64, 3, 4), (128, 64, 4, 8), (128, 128, 2, 8), (256, 64, 3, 8),
    ),
    "fp8": (
        (64, 128, 4, 4), (64, 128, 6, 4), (128, 128, 3, 4), (128, 128, 4, 4), (128, 128, 3, 8), (128, 128, 4, 8), (64, 128, 4, 8),
    ),
    "mxfp4": (
        (64, 128, 2, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (128, 128, 3, 4), (128, 128, 4, 4), (128, 128, 2, 8),
        (128, 128, 3, 8), (128, 128, 4, 8), (256, 128, 2, 8), (256, 128, 3, 8), (256, 128, 4, 8),
    ),
}  # fmt: skip


def fits(tile: ExpertTile, gated: bool, form: str) -> bool:
    """Whether a tile fits into shared memory and its sums into registers."""
    width = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 0.53125}[form]
    weights = tile.block_n * (2 if gated else 1) * tile.block_k * width
    shared = (weights + tile.block_t * tile.block_k * (1 if form == "fp8" else 2)) * tile.stages + 2048
    sums = tile.block_n * tile.block_t * (2 if gated else 1) // (32 * tile.warps)
    if form == "fp8":  # sums of one block of K and total sums
        sums = sums * 3 // 2
    return shared <= SHARED_BYTES and sums <= 128 and (form != "fp8" or tile.block_n <= 128)


def compile_one(task: tuple[str, str, bool, Variant]) -> str:
    """Compile one kernel in a process of its own. Its name in Triton's cache does not depend on the number of experts."""
    model, form, gated, variant = task
    device = torch.device("cuda")
    try:
        shape = replace(MODELS[model], experts=MODELS[model].top_k)
        product = make_products(shape, form, device, only_shapes=True)[0 if gated else 1]
        ids = spread_ids(shape, 4, "all", device)
        x, routing = product.inputs(4), routing_of(shape, ids, variant.tile.block_t)
        run(product, arranged(product, x, routing, variant), routing, variant, product.empty(ids.numel()), compile_only=True)
    except Exception as error:
        return f"{model} {form} {'up' if gated else 'down'} {variant.text()}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_rest(task: tuple[str, str, int, bool]) -> str:
    """Run the launches around the products once, with or without PDL, so that they are compiled."""
    model, form, tokens, pdl = task
    device = torch.device("cuda")
    try:
        product = make_products(replace(MODELS[model], experts=MODELS[model].top_k), form, device, only_shapes=True)[0]
        product.shape = MODELS[model]
        set_enabled(pdl)
        for call in rest_calls(product, tokens, device).values():
            call()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{model} {form} {tokens} tokens: {type(error).__name__}: {str(error)[:200]}"
    finally:
        set_enabled(True)
    return ""


def arranged(product: Product, x: Any, routing: Routing, variant: Variant) -> Any:
    """x as this form of the product reads it."""
    if variant.form == "gathered":
        return x
    if not product.gated:  # rows in pair order: as if each pair were a token of its own
        routing = routing._replace(expert_ids=routing.expert_ids.view(-1, 1))
    return sort_fp8_rows(x, routing) if product.form == "fp8" else sort_rows(x, routing)


def run(product: Product, x: Any, routing: Routing, variant: Variant, out: Tensor, *, compile_only: bool = False) -> None:
    if variant.form == "gathered":
        product.run(x, routing, variant.tile, out, compile_only=compile_only)
    elif variant.form == "ring":
        product.run_ring(x, routing, variant.tile, out, compile_only=compile_only)
    else:
        product.run_sorted(x, routing, variant.tile, variant.low, out, compile_only=compile_only)


def result(product: Product, x: Any, ids: Tensor, variant: Variant) -> Tensor:
    """The product in pair order; NaN where nothing was written."""
    routing = routing_of(product.shape, ids, variant.tile.block_t)
    out = product.empty(ids.numel()).fill_(torch.nan)
    run(product, arranged(product, x, routing, variant), routing, variant, out)
    if variant.form == "gathered" or not product.gated:
        return out
    y = torch.empty_like(out)
    y[routing.pairs.long()] = out
    return y


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def sweep_case(
    name: str, product: Product, tokens: int, clock: GraphClock, device: torch.device, forms: Sequence[str]
) -> list[Found]:
    """All variants of one product for so many tokens."""
    case = f"{name} {'up' if product.gated else 'down'} {tokens}"
    x, shape = product.inputs(tokens), product.shape
    all_ids = [spread_ids(shape, tokens, "all", device) for _ in range(ROUTINGS)]
    wanted = product.reference(x, all_ids[0])
    touched = sum(len(ids.unique()) for ids in all_ids) / len(all_ids)
    out = product.empty(all_ids[0].numel())
    num_bytes = touched * product.expert_bytes + product.input_bytes(x) + out.nbytes
    flop = 2.0 * out.shape[0] * product.rows * product.k
    floor_us = 1e6 * max(num_bytes / BYTES_S, flop / product.flop_s)
    inputs: dict[tuple[str, int], list[tuple[Any, Routing]]] = {}
    bits: Tensor | None = None
    rows = []
    for variant in variants(product, tokens, forms):
        with continue_on_error(f"{case} {variant.text()}"):
            y = result(product, x, all_ids[0], variant)
            if bits is None and (variant.form == "sorted" or product.form != "fp8"):  # FP8: the forms multiply scales differently
                bits = y
            error = relative(y, wanted)
            key = (variant.form, variant.tile.block_t)
            if key not in inputs:
                routings = [routing_of(shape, ids, variant.tile.block_t) for ids in all_ids]
                inputs[key] = [(arranged(product, x, routing, variant), routing) for routing in routings]
            us = clock.us([partial(run, product, own, routing, variant, out) for own, routing in inputs[key]])
            if error < product.tolerance:
                rows.append(Found(case, variant, us, floor_us, error, bits is None or torch.equal(bits, y)))
            else:
                print(f"{case} {variant.text()}: WRONG, error {error}", flush=True)
    if not rows:
        raise ValueError(f"{case}: no variant is right")
    check_best(case, product, x, tokens, min(rows, key=lambda row: row.us).variant, device)
    return rows


def check_best(case: str, product: Product, x: Any, tokens: int, variant: Variant, device: torch.device) -> None:
    """Check the fastest variant with all tokens on the same experts and on half of them, and the first tokens alone."""
    for spread in SPREADS[1:]:
        ids = spread_ids(product.shape, tokens, spread, device)
        error = relative(result(product, x, ids, variant), product.reference(x, ids))
        if not error < product.tolerance:
            print(f"{case} {variant.text()}: WRONG with {spread} experts, error {error}", flush=True)
    few, ids = min(tokens, ALONE), spread_ids(product.shape, tokens, "all", device)
    own = few if product.gated else few * product.shape.top_k
    alone = result(
        product, product.first(x, own), ids[:few].contiguous(), variant._replace(tile=variant.tile._replace(block_t=16), low=16)
    )
    if not torch.equal(alone, result(product, x, ids, variant)[: len(alone)]):
        print(f"{case} {variant.text()}: bits DIFFER from those of {few} tokens", flush=True)


def rest_calls(product: Product, tokens: int, device: torch.device) -> dict[str, Call]:
    """The launches around the products."""
    shape, x = product.shape, product.inputs(tokens)
    wide = torch.randn(tokens, shape.hidden, device=device).bfloat16()
    gate = torch.randn(shape.experts, shape.hidden, device=device).bfloat16()
    routing = routing_of(shape, spread_ids(shape, tokens, "all", device), 16)
    y, gain = torch.randn(tokens * shape.top_k, shape.hidden, device=device).bfloat16(), torch.ones_like(wide[0])
    out, logits = torch.empty_like(wide), torch.randn(tokens, shape.experts, device=device)
    return {
        "router": partial(router_logits, wide, gate),
        "router of 4 stages": partial(router_of, 4, wide, gate),
        "route": partial(route, logits, shape.top_k, norm_topk=True, unit_pairs=32),
        "sort": partial(sort_fp8_rows if product.form == "fp8" else sort_rows, x, routing),
        "combine_norm": partial(combine_norm, y, routing.weights, wide.clone(), gain, 1e-6, out=out),
    }


def router_of(stages: int, x: Tensor, weight: Tensor) -> Tensor:
    """`router_logits` with another number of stages."""
    before, router.FEW_STAGES = router.FEW_STAGES, stages
    logits = router_logits(x, weight)
    router.FEW_STAGES = before
    return logits


def time_rest(name: str, product: Product, tokens: int, clock: GraphClock, device: torch.device) -> dict[str, float]:
    """Microseconds of the launches around the products, each repeated alone: with PDL, and without it."""
    calls = rest_calls(product, tokens, device)
    found: dict[str, float] = {}
    for pdl in (True, False):
        before = set_enabled(pdl)
        found |= {kernel + ("" if pdl else ", no PDL"): clock.us([call]) for kernel, call in calls.items()}
        set_enabled(before)
    print(f"{name} {tokens}: " + "; ".join(f"{kernel} {us:.1f} us" for kernel, us in found.items()), flush=True)
    return found


def summary(found: Sequence[Found]) -> None:
    """A line per case: the fastest variant, and today's."""
    print(f"{'case':<34} {'best':<38} {'us':>9} {'share':>6}   {'today us':>9} {'share':>6}   error  bits", flush=True)
    for case in dict.fromkeys(row.case for row in found):
        rows = [row for row in found if row.case == case]
        best, today = min(rows, key=lambda row: row.us), next((row for row in rows if row.variant.form == "gathered"), None)
        own = f"{today.us:>9.2f} {today.floor_us / today.us:>6.1%}" if today else f"{'-':>9} {'-':>6}"
        print(
            f"{case:<34} {best.variant.text():<38} {best.us:>9.2f} {best.floor_us / best.us:>6.1%}   {own}   {best.error:.0e} "
            f"{sum(row.same_bits for row in rows)}/{len(rows)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m batchspec.kernels.benchmarks.moe_sweep")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt-oss-20b", "gpt-oss-120b", "qwen3-30b"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, help="default: MXFP4 for gpt-oss, all of the others")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--forms", nargs="+", choices=("sorted", "ring"), default=["sorted"], help="beside today's")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=240, help="start no new case after this time")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("moe_sweep: no GPU here, nothing to time")
        return
    device, begin = torch.device("cuda"), time.monotonic()
    pairs = [
        (model, form) for model in arguments.models for form in MODELS[model].formats if form in wanted_formats(model, arguments)
    ]
    compile_all(pairs, arguments.tokens, arguments.jobs, device, arguments.forms)
    clock, found, rest = GraphClock(device), [], {}
    for model, form in pairs:
        products, name = make_products(MODELS[model], form, device), f"{model} {form}"
        for tokens in arguments.tokens:
            if time.monotonic() - begin > arguments.seconds:
                print(f"{name} {tokens}: out of time", flush=True)
                continue
            with continue_on_error(f"{name} {tokens}"):
                rest[f"{name} {tokens}"] = time_rest(name, products[0], tokens, clock, device)
                for product in products:
                    found += sweep_case(name, product, tokens, clock, device, arguments.forms)
            save(found, rest, arguments.forms)
        print(f"{name}: done at {time.monotonic() - begin:.0f} s", flush=True)
        del products
        torch.cuda.empty_cache()
    summary(found)


def wanted_formats(model: str, arguments: argparse.Namespace) -> Sequence[str]:
    if arguments.formats:
        return list(arguments.formats)
    return ("mxfp4",) if "mxfp4" in MODELS[model].formats else FORMATS


def compile_all(
    pairs: Sequence[tuple[str, str]], token_counts: Sequence[int], jobs: int, device: torch.device, forms: Sequence[str]
) -> None:
    """Compile every kernel that the sweep starts. Kernels of two models that differ in the number of experts alone are one."""
    todo: dict[Any, tuple[str, str, bool, Variant]] = {}
    for model, form in pairs:
        shape = MODELS[model]
        for product in make_products(replace(shape, experts=shape.top_k), form, device, only_shapes=True):
            product.shape = shape
            for tokens in token_counts:
                for variant in variants(product, tokens, forms):
                    found = [variant, variant._replace(tile=variant.tile._replace(block_t=16), low=16)]
                    for own in found[: 1 if variant.form == "gathered" else 2]:
                        key = (form, product.gated, own, shape.hidden, shape.width, shape.top_k, shape.gate)
                        todo.setdefault(key, (model, form, product.gated, own))
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        rest = pool.map_async(
            compile_rest, [(*pair, tokens, pdl) for pair in pairs for tokens in token_counts for pdl in (True, False)]
        )
        for failure in (*pool.imap_unordered(compile_one, todo.values()), *rest.get()):
            if failure:
                print(f"not compiled: {failure}", flush=True)
    print(f"{len(todo)} kernels compiled in {time.monotonic() - started:.0f} s", flush=True)


def save(found: Sequence[Found], rest: dict[str, dict[str, float]], forms: Sequence[str]) -> None:
    if folder := os.environ.get("OUT"):
        rows = [row._asdict() | {"variant": row.variant.text(), "us": round(row.us, 2)} for row in found]
        with open(os.path.join(folder, f"moe_sweep_{'_'.join(forms)}.json"), "w", encoding="utf-8") as file:
            json.dump({"products": rows, "rest_us": rest}, file)


if __name__ == "__main__":
    main()
