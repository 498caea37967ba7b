"""Grouped products on sorted rows: the same numbers as from gathered rows, for every height of tile and every spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.benchmarks import moe_sweep
from batchspec.kernels.benchmarks.moe_sweep import Variant, fits, relative, result, variants
from batchspec.kernels.benchmarks.moe_weights import FORMATS, MODELS, MoeShape, Product, make_products
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.moe import sorted_fp8, sorted_mxfp4
from batchspec.kernels.moe.experts_fp8 import Fp8Weight, experts_fp8_reference
from batchspec.kernels.moe.gate import Gate
from batchspec.kernels.moe.quantise import Fp8Rows, quantise_rows_reference
from batchspec.kernels.moe.sort_rows import sort_fp8_rows, sort_fp8_rows_reference, sort_rows, sort_rows_reference
from batchspec.kernels.moe.tiles import ExpertTile
from tests.kernels.moe_cases import SPREADS, assert_near, noise, routing_of

SHAPE = MoeShape(4, 2, 160, 96, Gate(7.0), True)  # tails of the blocks of K and of the tiles over rows of W


def products_of(form: str, device: torch.device) -> tuple[Product, Product]:
    torch.manual_seed(3)
    return make_products(SHAPE, form, device)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("spread", "tile", "low"),
    [
        (SPREADS[0], ExpertTile(64, 64, 128, 2, 4), 16),
        (SPREADS[1], ExpertTile(16, 64, 128, 2, 4), 16),
        (SPREADS[2], ExpertTile(32, 64, 128, 2, 4, False), 32),
    ],
)
def test_every_height_of_tile_gives_the_product_of_each_pair(
    form: str, spread: str, tile: ExpertTile, low: int, device: torch.device
) -> None:
    tokens = 45  # units of 1 to 64 pairs
    ids = routing_of(tokens, SHAPE.experts, SHAPE.top_k, spread, tile.block_t, device).expert_ids
    for product in products_of(form, device):
        x = product.inputs(tokens)
        found = result(product, x, ids, Variant("sorted", tile, low))
        assert relative(found, product.reference(x, ids)) < 2 * product.tolerance  # the interpreter cuts bf16 off
        gathered = result(product, x, ids, Variant("gathered", tile._replace(block_t=16)))
        assert relative(found, gathered.float()) < 2 * product.tolerance


def test_rows_are_copied_in_the_order_of_the_list(interpret: bool, device: torch.device) -> None:
    routing = routing_of(11, 5, 3, SPREADS[0], 16, device)
    wide = torch.randn(11, 600, device=device).bfloat16()
    x = wide[:, 300:]
    found = sort_rows(x, routing, interpret=interpret)
    assert torch.equal(found, x[routing.pairs.long() // 3])
    assert torch.equal(found, sort_rows_reference(x, routing))
    for whole in (False, True):
        rows = quantise_rows_reference(x, whole=whole)
        values, scales = sort_fp8_rows(rows, routing, interpret=interpret)
        assert torch.equal(values.float(), rows.values.float()[routing.pairs.long() // 3])
        assert torch.equal(scales.T, rows.scales[routing.pairs.long() // 3])
        assert torch.equal(sort_fp8_rows_reference(rows, routing).scales, scales)


@pytest.mark.parametrize("scales_of", ["row", "tensor"])
def test_scales_of_rows_and_of_whole_weights(scales_of: str, device: torch.device) -> None:
    routing = routing_of(9, 3, 2, SPREADS[0], 16, device)
    values = (torch.randn(3, 96, 144, device=device) * 50).to(E4M3)
    weight = Fp8Weight(values, torch.rand((3, 96) if scales_of == "row" else (3,), device=device) / 500)
    rows = quantise_rows_reference(torch.randn(9, 144, device=device).bfloat16(), whole=True)
    out = torch.full((18, 48), torch.nan, device=device)
    tile = ExpertTile(16, 64, 128, 2, 4)
    sorted_fp8.launch("up", sort_fp8_rows(rows, routing), weight, None, routing, tile, out, gate=Gate())
    wanted = experts_fp8_reference(rows, weight, None, routing.expert_ids, gate=Gate())
    assert_near(out, wanted[routing.pairs.long()], tolerance=1e-3)


def test_the_result_is_quantised_in_the_same_launch(device: torch.device) -> None:
    product = make_products(replace(SHAPE, width=160, gate=Gate(), bias=False), "fp8", device)[0]
    routing = routing_of(21, SHAPE.experts, SHAPE.top_k, SPREADS[0], 32, device)
    rows, tile = product.inputs(21), ExpertTile(32, 128, 128, 2, 4)
    out = Fp8Rows(torch.empty(42, 160, dtype=E4M3, device=device), torch.full((2, 42), torch.nan, device=device))
    plain = torch.empty(42, 160, dtype=torch.bfloat16, device=device)
    x, weight = sort_fp8_rows(rows, routing), product.weight
    sorted_fp8.launch("up", x, weight, None, routing, tile, out.values, gate=Gate(), out_scales=out.scales)
    sorted_fp8.launch("up", x, weight, None, routing, tile, plain, gate=Gate())
    wanted = quantise_rows_reference(plain)
    assert_near(out.scales.T, wanted.scales, tolerance=1e-2)
    assert_near(dequantised(out.values, out.scales.T), plain, tolerance=4e-2)


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales.repeat_interleave(128, 1)[:, : values.shape[1]]


def test_rows_past_the_pairs_of_a_unit_change_nothing(device: torch.device) -> None:
    """A tile reads rows of the next expert, which may hold any numbers."""
    product = products_of("mxfp4", device)[1]
    routing = routing_of(20, SHAPE.experts, SHAPE.top_k, SPREADS[0], 16, device)
    x = noise(40, product.k, dtype=torch.bfloat16, device=device)
    first = int(routing.offsets[1])
    changed = x.clone()
    changed[first:] = torch.nan
    outs = []
    for rows in (x, changed):
        outs.append(product.empty(40))
        product.run_sorted(rows, routing, ExpertTile(16, 64, 128, 2, 4), 16, outs[-1])
    own = routing.pairs[:first].long()
    assert first % 16
    assert torch.equal(outs[0][own], outs[1][own])


def test_variants_begin_with_todays_tile_and_fit(device: torch.device) -> None:
    for form, model in (("mxfp4", "gpt-oss-20b"), ("fp8", "qwen3-30b"), ("bf16", "qwen3-30b")):
        shape = replace(MODELS[model], experts=MODELS[model].top_k)
        for product in make_products(shape, form, device, only_shapes=True):
            for tokens in (1, 64, 4096):
                found = variants(product, tokens, ["sorted", "ring"])
                assert {variant.form for variant in found} == {"gathered", "sorted"} | ({"ring"} if form == "mxfp4" else set())
                assert found[0].form == "gathered"
                assert len(found) == len(set(found))
                assert all(
                    fits(variant.tile, product.gated, form) and variant.low <= variant.tile.block_t for variant in found[1:]
                )


class Clock:
    """Counts calls instead of timing them: the first variant, today's, takes 1 us."""

    def __init__(self) -> None:
        self.count = 0

    def us(self, calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        self.count += 1
        return float(self.count)


@pytest.mark.parametrize("form", FORMATS)
def test_a_sweep_times_all_variants_that_are_right(
    form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moe_sweep, "BLOCKS", {form: ((64, 128, 2, 4),)})
    monkeypatch.setattr(moe_sweep, "variants", lambda product, tokens, forms: variants(product, tokens, forms)[:2])
    product = products_of(form, device)[1]
    monkeypatch.setattr(type(product), "tolerance", 2e-2)
    clock: Any = Clock()
    rows = moe_sweep.sweep_case("model", product, 3, clock, device, ["sorted"])
    assert [row.variant.form for row in rows] == ["gathered", "sorted"]
    assert "WRONG" not in capsys.readouterr().out
    monkeypatch.setattr(type(product), "tolerance", 1e-9)
    with pytest.raises(ValueError, match="no variant is right"):
        moe_sweep.sweep_case("model", product, 3, clock, device, ["sorted"])
    assert capsys.readouterr().out.count("WRONG") == 2
    moe_sweep.summary(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("model down 3")
    assert lines[1].endswith("2/2")


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    product = products_of("mxfp4", device)[1]
    routing = routing_of(8, SHAPE.experts, SHAPE.top_k, SPREADS[0], 16, device)
    x, out = torch.zeros(16, product.k, dtype=torch.bfloat16, device=device), product.empty(16)
    with pytest.raises(ValueError, match="block_k is 64; must be 128"):
        sorted_mxfp4.launch("down", x, product.weight, None, routing, ExpertTile(16, 64, 64, 2, 4), out)
    with pytest.raises(ValueError, match="down: x is"):
        sorted_mxfp4.launch("down", x[:15], product.weight, None, routing, ExpertTile(16, 64, 128, 2, 4), out)
    with pytest.raises(ValueError, match="sort_rows: x is"):
        sort_rows(x, routing)
