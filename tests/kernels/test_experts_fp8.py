"""FP8: rows are quantised as stated, and products are those of the quantised numbers, whatever the scales are of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.moe.experts_fp8 import Fp8Weight, experts_fp8_down, experts_fp8_up, experts_fp8_up_reference
from batchspec.kernels.moe.experts_fp8 import experts_fp8_up_quantised as up_quantised
from batchspec.kernels.moe.gate import SQUARED_RELU, SWIGLU, Gate
from batchspec.kernels.moe.quantise import Fp8Rows, quantise_rows, quantise_rows_reference
from batchspec.kernels.moe.tiles import ExpertTile
from tests.kernels.moe_cases import SPREADS, assert_near, fp8_tolerance, noise, routing_of, sorted_pairs

TILE = ExpertTile(16, 64, 128, 2, 4)
TURNED = ExpertTile(64, 64, 128, 2, 4, turned=True)
HIDDEN, WIDTH = 144, 80  # tails of the blocks of 128


def weight_of(experts: int, rows: int, k: int, scales_of: str, gated: bool, device: torch.device) -> Fp8Weight:
    blocks = 2 * -(-rows // 256) if gated else -(-rows // 128)
    shape = {"block": (experts, blocks, -(-k // 128)), "row": (experts, rows), "tensor": (experts,)}[scales_of]
    values = (torch.randn(experts, rows, k, device=device) * 50).to(E4M3)
    return Fp8Weight(values, (torch.rand(shape, device=device) + 0.1) / 500)


def dequantised(weight: Fp8Weight, gated: bool) -> Tensor:
    (_, rows, k), scales = weight.values.shape, weight.scales
    if scales.dim() == 3:
        halves = scales.chunk(2, 1) if gated else (scales,)
        scales = torch.cat([half.repeat_interleave(128, 1)[:, : rows // len(halves)] for half in halves], 1)
        return weight.values.double() * scales.repeat_interleave(128, 2)[:, :, :k].double()
    return weight.values.double() * scales.view(*scales.shape, *[1] * (3 - scales.dim())).double()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("k", [128, 300, 16])
def test_rows_are_quantised_by_their_largest_value(k: int, whole: bool, interpret: bool, device: torch.device) -> None:
    wide = torch.randn(7, 2 * k, device=device) * torch.logspace(-6, 4, 7, device=device)[:, None]
    x = wide[:, k:]
    x[2] = 0
    found = quantise_rows(x, whole=whole, interpret=interpret)
    wanted = quantise_rows_reference(x, whole=whole)
    assert torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.values.float(), wanted.values.float())
    assert found.scales[:, 2].unique().item() == pytest.approx(1e-10 / 448)
    scales = found.scales.T.repeat_interleave(k if whole else 128, 1)[:, :k]
    largest = x.abs().amax(1, keepdim=True)
    assert (
        (found.values.float() * scales - x).abs() <= largest / 28 + 1e-30
    ).all()  # half a place of the largest: 2^-4 / 448 * 256


def test_rows_of_pairs_are_quantised_in_the_order_of_the_list(interpret: bool, device: torch.device) -> None:
    routing, x = routing_of(11, 5, 3, SPREADS[0], 16, device), torch.randn(11, 600, device=device).bfloat16()[:, 300:]
    tokens = routing.pairs.long() // 3
    for whole in (False, True):
        found, rows = quantise_rows(x, routing, whole=whole, interpret=interpret), quantise_rows_reference(x, whole=whole)
        assert torch.equal(found.values.float(), rows.values.float()[tokens])
        assert torch.equal(found.scales, rows.scales[:, tokens])
        assert torch.equal(quantise_rows_reference(x, routing, whole=whole).scales, found.scales)
    with pytest.raises(ValueError, match="quantise_rows: expert_ids"):
        quantise_rows(x[:10], routing, interpret=interpret)


def test_rows_are_quantised_by_a_given_scale_and_saturate(interpret: bool, device: torch.device) -> None:
    x = torch.randn(5, 200, device=device)
    x[3, 7] = -1000.0
    found = quantise_rows(x, whole=True, scale=0.25, interpret=interpret)
    assert torch.equal(found.scales, torch.full((1, 5), 0.25, device=device))
    assert torch.equal(found.values.float(), (x / torch.full_like(x, 0.25)).clamp(-448, 448).to(E4M3).float())
    assert found.values.float()[3, 7].item() == -448
    with pytest.raises(ValueError, match=r"scale=0\.\d+ applies to whole rows; pass whole=True, or scale=None"):
        quantise_rows(x, scale=0.25, interpret=interpret)


@pytest.mark.parametrize("options", [{}, {"whole": True}, {"whole": True, "scale": 0.25}])
def test_nan_is_not_lost(options: dict[str, Any], interpret: bool, device: torch.device) -> None:
    """Whatever it is multiplied with; other rows are as they were."""
    x = torch.randn(3, 200, device=device)
    expected = quantise_rows_reference(x, **options)
    x[1, 5] = torch.nan
    found = quantise_rows(x, **options, interpret=interpret)
    products = found.values.float() * found.scales.T.repeat_interleave(-(-200 // len(found.scales)), 1)[:, :200]
    assert products[1].sum().isnan()
    for row in (0, 2):
        assert torch.equal(found.values.float()[row], expected.values.float()[row])
        assert torch.equal(found.scales[:, row], expected.scales[:, row])


@pytest.mark.parametrize(
    ("scales_of", "spread", "gate", "tile"),
    [("block", SPREADS[0], SWIGLU, TILE), ("block", SPREADS[2], Gate(0.5), TILE._replace(tma=False)),
     ("row", SPREADS[1], SWIGLU, TILE), ("tensor", SPREADS[2], Gate(0.5), TILE),
     ("row", SPREADS[0], Gate(0.5), TURNED), ("tensor", SPREADS[1], SWIGLU, TURNED),
     ("block", SPREADS[0], SQUARED_RELU, TILE), ("tensor", SPREADS[2], SQUARED_RELU, TURNED)],
)
def test_both_products(scales_of: str, spread: str, gate: Gate, tile: ExpertTile, interpret: bool, device: torch.device) -> None:
    tokens, experts, top_k = 9 if tile.block_t == 16 else 90, 5, 2
    routing = routing_of(tokens, experts, top_k, spread, tile.block_t, device)
    ids = routing.expert_ids
    wide = noise(tokens, HIDDEN, dtype=torch.float32, device=device)
    x = quantise_rows(wide, routing, whole=scales_of != "block", interpret=interpret)
    up = weight_of(experts, gate.parts * WIDTH, HIDDEN, scales_of, not gate.squared, device)
    bias = noise(experts, gate.parts * WIDTH, dtype=torch.bfloat16, device=device) if gate != SWIGLU else None
    found = experts_fp8_up(x, up, bias, routing, tile=tile, gate=gate, dtype=torch.float32, interpret=interpret)
    assert_near(found, experts_fp8_up_reference(x, up, bias, routing, gate=gate), tolerance=fp8_tolerance(device))
    rows = _wide(quantise_rows_reference(wide, whole=scales_of != "block"))
    both = torch.einsum("tsnk,tk->tsn", dequantised(up, not gate.squared)[ids.long()], rows).flatten(0, 1)
    both = sorted_pairs(both if bias is None else both + bias[ids.flatten().long()].double(), routing)
    assert_near(found, both.clamp(min=0) ** 2 if gate.squared else gate(*both.chunk(2, -1)), tolerance=fp8_tolerance(device))

    h = quantise_rows_reference(found, whole=scales_of != "block")
    down = weight_of(experts, HIDDEN, WIDTH, scales_of, False, device)
    y = experts_fp8_down(h, down, None, routing, tile=tile, dtype=torch.float32, interpret=interpret)
    of_pair = dequantised(down, False)[ids.flatten().long()]
    assert_near(
        sorted_pairs(y, routing),
        torch.einsum("pnk,pk->pn", sorted_pairs(of_pair, routing), _wide(h)),
        tolerance=fp8_tolerance(device),
    )
    assert experts_fp8_down(h, down, None, routing, tile=tile, interpret=interpret).dtype == torch.bfloat16


def _wide(rows: Fp8Rows) -> Tensor:
    k = rows.values.shape[1]
    scales = rows.scales.T.repeat_interleave(k if len(rows.scales) == 1 else 128, 1)[:, :k]
    return rows.values.double() * scales.double()


def test_the_first_product_quantises_its_own_result(interpret: bool, device: torch.device) -> None:
    tokens, experts, width = 6, 3, 160
    routing = routing_of(tokens, experts, 2, SPREADS[0], 16, device)
    x = quantise_rows_reference(noise(tokens, HIDDEN, dtype=torch.float32, device=device), routing)
    weight = weight_of(experts, 2 * width, HIDDEN, "block", True, device)
    tile = TILE._replace(block_n=128)
    found = up_quantised(x, weight, None, routing, tile=tile, interpret=interpret)
    wanted = quantise_rows_reference(experts_fp8_up(x, weight, None, routing, tile=tile, interpret=interpret))
    torch.testing.assert_close(found.scales, wanted.scales, rtol=2**-8, atol=0)  # the interpreter cuts bf16 off
    assert_near(_wide(found), _wide(wanted), tolerance=0.02)
    if interpret:
        with pytest.raises(ValueError, match="must hold the 128 values of a scale"):
            up_quantised(x, weight, None, routing, tile=TILE, interpret=True)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    routing = routing_of(4, 3, 2, SPREADS[0], 16, device)
    x = quantise_rows_reference(torch.zeros(4, HIDDEN, device=device), routing)
    weight = weight_of(3, 2 * WIDTH, HIDDEN, "block", True, device)
    with pytest.raises(ValueError, match="scales of weight"):
        experts_fp8_up(x, weight._replace(scales=weight.scales[:, :1]), None, routing, tile=TILE, interpret=True)
    with pytest.raises(ValueError, match="scales of x"):
        experts_fp8_up(x._replace(scales=x.scales[:1]), weight, None, routing, tile=TILE, interpret=True)
    with pytest.raises(ValueError, match="block_k must be 128"):
        experts_fp8_up(x, weight, None, routing, tile=TILE._replace(block_k=64), interpret=True)
