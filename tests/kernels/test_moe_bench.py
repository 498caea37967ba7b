"""The benchmark of a mixture of experts finds right kernels right, and wrong ones wrong."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.benchmarks.moe_bench import COLUMNS, Timing, error_of, same_bits, spread_ids, tiles_of
from batchspec.kernels.benchmarks.moe_weights import FORMATS, MoeShape, make_products
from batchspec.kernels.moe.gate import Gate
from batchspec.kernels.moe.tiles import ExpertTile, expert_tile

SHAPE = MoeShape(4, 2, 128, 128, Gate(7.0), True)


@pytest.mark.parametrize("form", FORMATS)
def test_products_agree_with_their_references(form: str, device: torch.device) -> None:
    for product in make_products(SHAPE, form, device):
        ids = spread_ids(SHAPE, 5, "all", device)
        x = product.inputs(5)
        tile = expert_tile(16, gated=product.gated, dtype=product.dtype)
        assert error_of(product, tile, ids, x) < 2 * product.tolerance  # the interpreter cuts bf16 off
        assert product.expert_bytes * SHAPE.experts == pytest.approx(_nbytes(form, product.rows, product.k) * SHAPE.experts)


def _nbytes(form: str, rows: int, k: int) -> float:
    return {"bf16": 2 * rows * k, "fp8": rows * k + 4 * (rows // 128) * (k // 128), "mxfp4": rows * k * 17 / 32}[form]


def test_a_wrong_weight_is_found(device: torch.device) -> None:
    product = make_products(SHAPE, "bf16", device)[1]
    ids, x = spread_ids(SHAPE, 5, "same", device), product.inputs(5)
    tile = ExpertTile(16, 64, 64, 2, 4)
    product.bias = None
    right = error_of(product, tile, ids, x)
    product.wide = product.weight.roll(1, 0)
    assert error_of(product, tile, ids, x) > 100 * right


def test_bits_do_not_depend_on_the_number_of_tokens(device: torch.device) -> None:
    assert same_bits(make_products(SHAPE, "bf16", device)[0], 20, device)


def test_spreads_and_tiles(device: torch.device) -> None:
    for spread in ("all", "same", "half"):
        ids = spread_ids(SHAPE, 30, spread, device)
        assert all(len(set(row)) == 2 for row in ids.tolist())
        assert len(ids.unique()) == {"all": 4, "same": 2, "half": 2}[spread]
    product = make_products(SHAPE, "fp8", device)[0]
    assert len(tiles_of(product, 64, sweep=False)) == 1
    assert tiles_of(product, 64, sweep=True)[0] == tiles_of(product, 64, sweep=False)[0]


def test_a_line_has_a_value_for_each_column() -> None:
    line = Timing(ExpertTile(16, 64, 64, 2, 4), 50.0, 2e8, 1e9, 46.0).line("case")
    assert line.split()[:5] == ["case", "50.00", "4000", "20.0", "92.0%"]
    assert COLUMNS.split()[:5] == ["case", "us", "GB/s", "TFLOP/s", "share"]
