"""The grouped products of a mixture of experts, on the shapes of real models.

Weights, inputs and routers are random. Bytes of a product are those of the experts that tokens choose, on average over the
routings that take turns, and of the rows that it reads and writes.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.case import BF16_FLOP_S, FP8_FLOP_S, Benchmark, Case, Ways, copies, unwritten
from batchspec.kernels.benchmarks.moe_weights import MODELS, MoeShape, Product, make_products
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.graph_clock import Call
from batchspec.kernels.moe.route import lists_reference
from batchspec.kernels.moe.tiles import ExpertTile, candidates, largest_first
from batchspec.kernels.moe.units import Routing


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
)
