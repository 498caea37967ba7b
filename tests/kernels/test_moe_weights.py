"""The products that are timed agree with their references, and their bytes are those of the format."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.benchmarks.case import relative_error
from batchspec.kernels.benchmarks.moe_weights import FORMATS, MODELS, MoeShape, make_products
from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.moe.gate import Gate
from batchspec.kernels.moe.tiles import ExpertTile, expert_tile
from tests.kernels.moe_cases import SPREADS, routing_of

SHAPE = MoeShape(4, 2, 128, 128, Gate(7.0), True)
TILE = ExpertTile(16, 64, 64, 2, 4)


@pytest.mark.parametrize("form", FORMATS)
def test_products_agree_with_their_references(form: str, device: torch.device) -> None:
    for product in make_products(SHAPE, form, device):
        routing, x = routing_of(5, 4, 2, SPREADS[0], 16, device), product.inputs(5)
        tile = expert_tile(16, len(routing.units), INTERPRETER, gated=product.gated, dtype=product.dtype)
        found = product.result(x, routing, tile)
        assert relative_error(found, product.reference(x, routing)) < 2 * product.tolerance  # the interpreter cuts bf16 off
        assert product.expert_bytes * SHAPE.experts == pytest.approx(_nbytes(form, product.rows, product.k) * SHAPE.experts)


def _nbytes(form: str, rows: int, k: int) -> float:
    blocks = (rows // 128) * (k // 128)
    return {
        "bf16": 2 * rows * k, "fp8": rows * k + 4 * blocks, "mxfp4": rows * k * 17 / 32, "int4": rows * k * 33 / 64,
        "nvfp4": rows * k * 9 / 16 + 4 * rows,
    }[form]


def test_a_wrong_weight_is_found(device: torch.device) -> None:
    product = make_products(SHAPE, "bf16", device)[1]
    routing, x = routing_of(5, 4, 2, SPREADS[1], 16, device), product.inputs(5)
    product.bias = None
    right = relative_error(product.result(x, routing, TILE), product.reference(x, routing))
    product.wide = product.weight.roll(1, 0)
    assert relative_error(product.result(x, routing, TILE), product.reference(x, routing)) > 100 * right


def test_models_have_the_formats_that_they_name() -> None:
    assert all(set(shape.formats) <= set(FORMATS) for shape in MODELS.values())
