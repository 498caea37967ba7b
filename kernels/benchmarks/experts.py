"""A mixture of experts: its grouped products on the shapes of real models, and the launches around them.

Weights, inputs and routers are random. Bytes of a product are those of the experts that tokens choose, on average over the
routings that take turns, and of the rows that it reads and writes.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.case import BF16_FLOP_S, FP8_FLOP_S, Benchmark, Case, Ways, copies, into, noise, unwritten
from batchspec.kernels.benchmarks.moe_weights import MODELS, MoeShape, Product, make_products
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.graph_clock import Call
from batchspec.kernels.gemm.fp8_tokens import Fp8Form
from batchspec.kernels.moe.combine import combine_norm, combine_norm_reference
from batchspec.kernels.moe.combine_fp8 import combine_fp8, combine_fp8_reference
from batchspec.kernels.moe.route import lists_reference, route, route_reference
from batchspec.kernels.moe.router import router_logits, router_logits_reference
from batchspec.kernels.moe.sort_rows import sort_rows, sort_rows_reference
from batchspec.kernels.moe.tiles import ExpertTile, candidates, largest_first
from batchspec.kernels.moe.units import Routing

EPS = 1e-6


@lru_cache(maxsize=1)
def products_of(model: str, form: str, device: torch.device) -> tuple[Product, Product]:
    """Both products of a model's layer; cases that follow each other share them."""
    return make_products(MODELS[model], form, device)


def chosen(shape: MoeShape, tokens: int) -> Tensor:
    """int32 [T, k] different experts of each token."""
    return torch.rand(tokens, shape.experts).argsort(1)[:, : shape.top_k].int().contiguous()


def routing_of(product: Product, ids: Tensor, unit_pairs: int) -> Routing:
    weights = torch.rand(ids.shape)
    order = largest_first(unit_pairs, product.dtype)
    return lists_reference(ids, weights / weights.sum(1, keepdim=True), product.shape.experts, unit_pairs, largest_first=order)


def experts_case(model: str, weights: str, part: str, tokens: int) -> Case:
    """part: `up`, the first product, or `down`, the second."""
    product = products_of(model, weights, torch.get_default_device())[part == "down"]
    shape, x = product.shape, product.inputs(tokens)
    routed = copies(lambda: chosen(shape, tokens))
    tile, *tiles = candidates(
        tokens, shape.top_k, shape.experts, card_of(product.device), gated=product.gated, dtype=product.dtype
    )

    def calls(tile: ExpertTile) -> list[Call]:
        routings, out = [routing_of(product, ids, tile.block_t) for ids in routed], product.empty(tokens * shape.top_k)
        return [call(product.rows_of(x, routing), routing, tile, unwritten(out)) for routing in routings]

    def call(rows: Any, routing: Routing, tile: ExpertTile, out: Tensor) -> Call:
        def run() -> Call:
            product.run(rows, routing, tile, out)
            return partial(product.by_pair, out, routing)

        return run

    def settings() -> Ways:
        return {shown(other): calls(other) for other in tiles}

    first = routing_of(product, routed[0], 16)
    touched = sum(len(ids.unique()) for ids in routed) / len(routed)
    written = product.empty(tokens * shape.top_k)
    return Case(
        calls=calls(tile), reference=partial(product.reference, x, first), settings=settings,
        num_bytes=touched * product.expert_bytes + product.rows_bytes(product.rows_of(x, first)) + written.nbytes,
        flop=2.0 * len(written) * product.rows * product.k, flop_s=FP8_FLOP_S if weights == "fp8" else BF16_FLOP_S,
    )


def shown(tile: ExpertTile) -> str:
    limit = "" if tile.registers is None else f" registers {tile.registers}"
    return f"{tile.low}-{tile.block_t}x{tile.block_n}x{tile.block_k} stages {tile.stages} warps {tile.warps}{limit}"


def router_case(tokens: int, experts: int, width: int, dtype: torch.dtype) -> Case:
    inputs, weight = copies(lambda: noise(tokens, width)), noise(experts, width, scale=width**-0.5).to(dtype)
    return Case(
        calls=[partial(router_logits, x, weight) for x in inputs], reference=partial(router_logits_reference, inputs[0], weight),
        num_bytes=inputs[0].nbytes + weight.nbytes + 4 * tokens * experts,
    )


def route_case(tokens: int, experts: int, top_k: int, largest_first: bool) -> Case:
    inputs = copies(lambda: noise(tokens, experts, dtype=torch.float32))
    how: dict[str, Any] = {"norm_topk": True, "unit_pairs": 32, "largest_first": largest_first}

    def call(run: Any, x: Tensor) -> Call:
        return lambda: run(x, top_k, **how).weights

    return Case(
        calls=[call(route, x) for x in inputs], reference=call(route_reference, inputs[0]),
        num_bytes=inputs[0].nbytes + 16 * tokens * top_k,
    )


def routed(tokens: int, experts: int, top_k: int) -> Routing:
    return lists_reference(chosen(MoeShape(experts, top_k, 0, 0), tokens), torch.rand(tokens, top_k), experts, 32)


def sort_rows_case(tokens: int, experts: int, top_k: int, width: int) -> Case:
    inputs, routing = copies(lambda: noise(tokens, width)), routed(tokens, experts, top_k)
    return Case(
        calls=[partial(sort_rows, x, routing) for x in inputs], reference=partial(sort_rows_reference, inputs[0], routing),
        num_bytes=(1 + top_k) * inputs[0].nbytes,
    )


def combine_norm_case(tokens: int, top_k: int, width: int) -> Case:
    inputs, weights, residual, gain = combined(tokens, top_k, width)
    out, expected, before = unwritten(residual), unwritten(residual), residual.clone()
    return Case(
        calls=[into(out, partial(combine_norm, y, weights, residual, gain, EPS, out=out)) for y in inputs],
        reference=into(expected, partial(combine_norm_reference, inputs[0], weights, before, gain, EPS, out=expected)),
        num_bytes=inputs[0].nbytes + 3 * out.nbytes,
    )


def combine_fp8_case(tokens: int, top_k: int, width: int) -> Case:
    inputs, weights, residual, gain = combined(tokens, top_k, width)

    def call(run: Any, y: Tensor, residual: Tensor) -> Call:
        return lambda: run(y, weights, residual, gain, EPS, Fp8Form(whole=False)).rows.values[:tokens]

    return Case(
        calls=[call(combine_fp8, y, residual) for y in inputs],
        reference=call(combine_fp8_reference, inputs[0], residual.clone()),
        num_bytes=inputs[0].nbytes + 5 * residual.nbytes // 2,
    )


def combined(tokens: int, top_k: int, width: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Outputs of experts, weights of tokens, residual, weight of the norm."""
    inputs = copies(lambda: noise(tokens * top_k, width))
    return inputs, torch.rand(tokens, top_k), noise(tokens, width), noise(width)


EXPERTS = (
    Benchmark(
        "experts", experts_case, "model weights part tokens",
        tuple(
            (model, form, part, tokens)
            for model, shape in MODELS.items() if model != "tiny" for form in shape.formats for part in ("up", "down")
            for tokens in (1, 4, 16, 64, 256, 512, 1024, 4096, 16384)
        ),
        ("tiny", "mxfp4", "up", 3),
    ),
    Benchmark(
        "router", router_case, "tokens experts width dtype",
        (
            (16, 128, 2880, torch.bfloat16), (64, 128, 2048, torch.bfloat16), (256, 128, 2048, torch.bfloat16),
            (64, 256, 3072, torch.float32), (16384, 128, 2048, torch.bfloat16), (16384, 256, 3072, torch.float32),
        ),
        (3, 8, 64, torch.float32),
    ),
    Benchmark(
        "route", route_case, "tokens experts top_k largest_first",
        tuple(
            (tokens, *model) for model in ((32, 4, True), (128, 4, True), (128, 8, False), (256, 8, False))
            for tokens in (16, 64, 256, 512, 1024, 4096, 16384)
        ),
        (3, 8, 2, True),
    ),
    Benchmark(
        "sort_rows", sort_rows_case, "tokens experts top_k width",
        ((256, 128, 8, 2048), (1024, 128, 8, 2048), (16384, 128, 8, 2048)), (3, 8, 2, 64),
    ),
    Benchmark(
        "combine_norm", combine_norm_case, "tokens top_k width",
        ((64, 4, 2880), (64, 8, 2048), (256, 8, 3072), (1024, 8, 2048), (16384, 8, 2048)), (3, 2, 64),
    ),
    Benchmark(
        "combine_fp8", combine_fp8_case, "tokens top_k width", ((64, 8, 2048), (256, 8, 2048), (256, 8, 3072), (16384, 8, 2048)),
        (3, 2, 128),
    ),
)
