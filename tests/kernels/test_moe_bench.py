"""The benchmark of a mixture of experts finds right kernels right, and wrong ones wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchspec.kernels.benchmarks import moe_bench
from batchspec.kernels.benchmarks.moe_bench import COLUMNS, Timing, check_tile, report, spread_ids, tiles_of
from batchspec.kernels.benchmarks.moe_weights import FORMATS, MODELS, MoeShape, make_products
from batchspec.kernels.benchmarks.timing import relative_error
from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.moe.gate import Gate
from batchspec.kernels.moe.tiles import ExpertTile, expert_tile, mxfp4_rows
from tests.kernels.call_clock import Clock
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


def test_a_tile_is_checked_with_other_spreads_and_alone(device: torch.device, capsys: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    product = make_products(SHAPE, "bf16", device)[0]
    monkeypatch.setattr(type(product), "tolerance", 2e-2)
    x = product.inputs(20)
    check_tile("case", product, x, 20, TILE)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(type(product), "tolerance", 0.0)  # on a GPU these few numbers are exact
    check_tile("case", product, x, 20, TILE)
    assert capsys.readouterr().out.count("WRONG") == 2


def test_spreads_and_tiles(device: torch.device) -> None:
    for spread in ("all", "same", "half"):
        ids = spread_ids(SHAPE, 30, spread, device)
        assert all(len(set(row)) == 2 for row in ids.tolist())
        assert len(ids.unique()) == {"all": 4, "same": 2, "half": 2}[spread]
    product = make_products(SHAPE, "fp8", device)[0]
    assert len(tiles_of(product, 64, sweep=False)) == 1
    assert tiles_of(product, 64, sweep=True)[0] == tiles_of(product, 64, sweep=False)[0]
    assert len(tiles_of(product, 64, sweep=True)) > 10


@pytest.mark.parametrize("form", FORMATS)
def test_a_sweep_times_all_tiles_that_are_right(
    form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiles = [ExpertTile(block_t, mxfp4_rows(gated=False) if form == "mxfp4" else 64, 128, 2, 4) for block_t in (16, 32)]
    monkeypatch.setattr(moe_bench, "tiles_of", lambda product, tokens, sweep: tiles)
    product = make_products(SHAPE, form, device)[1]
    monkeypatch.setattr(type(product), "tolerance", 2e-2)
    clock: Any = Clock()
    timings = moe_bench.bench_case("model", product, 3, True, clock)
    assert [timing.tile for timing in timings] == tiles
    assert [timing.us for timing in timings] == [8.0, 7.0]
    assert all(timing.same_bits for timing in timings)
    assert "WRONG" not in capsys.readouterr().out
    report(timings)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model down 3")
    assert lines[1].startswith("  fastest")
    monkeypatch.setattr(type(product), "tolerance", 0.0)
    with pytest.raises(ValueError, match="no tile is right"):
        moe_bench.bench_case("model", product, 3, True, clock)
    assert capsys.readouterr().out.count("WRONG") == 2


def test_models_have_the_formats_that_they_name() -> None:
    assert all(set(shape.formats) <= set(FORMATS) for shape in MODELS.values())


def test_a_line_has_a_value_for_each_column() -> None:
    line = Timing("case", TILE, 50.0, 2e8, 1e9, 46.0, 1e-4, True).line("case")
    assert line.split()[:6] == ["case", "50.00", "4000", "20.0", "92.0%", "1e-04"]
    assert COLUMNS.split()[:6] == ["case", "us", "GB/s", "TFLOP/s", "share", "error"]
