"""Grouped products with INT4 weights are those of the weights rounded once to bf16, with NVFP4 weights those of the weights."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.moe.experts_four_bit import StackedFourBit, dequantised, experts_four_bit_down, experts_four_bit_up
from batchspec.kernels.moe.experts_plain import experts_plain_down_reference, experts_plain_up_reference
from batchspec.kernels.moe.gate import SQUARED_RELU, SWIGLU, Gate
from batchspec.kernels.moe.sort_rows import sort_rows
from batchspec.kernels.moe.tiles import FEW_UNITS, ExpertTile, expert_tile
from tests.kernels.covering import covering
from tests.kernels.four_bit_cases import GROUPS, stacked_four_bit
from tests.kernels.moe_cases import SPREADS, assert_near, noise, routing_of

TILE = ExpertTile(16, 32, 128, 2, 4)
CASES = [
    (SPREADS[0], SWIGLU, TILE), (SPREADS[1], Gate(7.0), TILE._replace(tma=False)),
    (SPREADS[2], SWIGLU, TILE._replace(block_n=64)), (SPREADS[0], SQUARED_RELU, TILE._replace(block_n=64)),
]


@pytest.mark.parametrize(("group", "zeros", "case"), covering(GROUPS, [False, True], CASES, one_in=3))
def test_both_products(
    group: int, zeros: bool, case: tuple[str, Gate, ExpertTile], interpret: bool, device: torch.device
) -> None:
    (spread, gate, tile), tokens, experts, top_k, hidden, width = case, 9, 5, 2, 160, 80
    routing = routing_of(tokens, experts, top_k, spread, 16, device)
    x = noise(tokens, hidden, dtype=torch.bfloat16, device=device)
    bias = noise(experts, gate.parts * width, dtype=torch.bfloat16, device=device)
    shapes = (gate.parts * width, hidden), (hidden, width)
    up, down = (stacked_four_bit(experts, rows, k, group, device, zeros=zeros) for rows, k in shapes)
    out = torch.full((tokens * top_k, width), torch.nan, device=device)
    rows = sort_rows(x, routing, interpret=interpret)
    experts_four_bit_up(rows, up, bias, routing, tile=tile, gate=gate, out=out, interpret=interpret)
    wanted = experts_plain_up_reference(rows.double(), _wide(up), bias, routing, gate=gate)
    assert_near(out, wanted, tolerance=1e-5 if interpret else 4e-3)
    h = wanted.bfloat16()
    y = torch.full((tokens * top_k, hidden), torch.nan, device=device)
    experts_four_bit_down(h, down, None, routing, tile=tile._replace(block_n=64), out=y, interpret=interpret)
    wanted = experts_plain_down_reference(h.double(), _wide(down), None, routing)
    assert_near(y, wanted, tolerance=1e-5 if interpret else 4e-3)


@pytest.mark.parametrize(("tokens", "tma"), [(33, True), (48, False), (65, False), (81, True), (97, True)])
def test_a_unit_of_two_tiles_gives_the_bits_of_single_tiles(
    tokens: int, tma: bool, interpret: bool, device: torch.device
) -> None:
    """One of the two experts has all tokens. The interpreter gets numbers whose sums are exact: numpy's order of a sum depends on
    the shape."""
    hidden, width = 160, 80
    x, h = (noise(tokens, k, dtype=torch.bfloat16, device=device) for k in (hidden, 96))
    x, h = (x.round(), h.round()) if interpret else (x, h)
    up, down = (_exact(stacked_four_bit(2, rows, k, 32, device)) for rows, k in ((2 * width, hidden), (hidden, 96)))
    found = []
    for tile in (ExpertTile(16, 64, 128, 2, 4), ExpertTile(96, 64, 128, 2, 4, joined=True)):
        routing = routing_of(tokens, 2, 1, SPREADS[1], tile.block_t, device)
        out = torch.full((tokens, width), torch.nan, device=device)
        own = tile._replace(tma=tma)
        experts_four_bit_up(x, up, None, routing, tile=own, gate=Gate(7.0), out=out, interpret=interpret)
        found.append((out, experts_four_bit_down(h, down, None, routing, tile=own, interpret=interpret)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    wanted = experts_plain_up_reference(x.double(), _wide(up), None, routing, gate=Gate(7.0))
    assert_near(found[1][0], wanted, tolerance=1e-5 if interpret else 4e-3)


def test_other_tiles_give_the_same_bits(interpret: bool, device: torch.device) -> None:
    """With gate and up as one block of rows, too. Widths are no multiple of a tile's rows."""
    tokens, experts, hidden, width = 3, 5, 160, 208
    x, h = (noise(2 * tokens, k, dtype=torch.bfloat16, device=device) for k in (hidden, width))
    x, h = (x.round(), h.round()) if interpret else (x, h)  # see above
    up, down = (_exact(stacked_four_bit(experts, rows, k, 0, device)) for rows, k in ((2 * width, hidden), (hidden, width)))
    routing, found = routing_of(tokens, experts, 2, SPREADS[0], 16, device), []
    usual = [expert_tile(16, FEW_UNITS + 1, INTERPRETER, gated=gated, dtype=torch.int32) for gated in (True, False)]
    for tiles in (usual, (ExpertTile(16, 32, 128, 3, 4), ExpertTile(16, 64, 128, 3, 4)), (ExpertTile(16, 64, 128, 3, 8),) * 2):
        out = torch.full((len(x), width), torch.nan, device=device)
        experts_four_bit_up(x, up, None, routing, tile=tiles[0], out=out, interpret=interpret)
        y = torch.full((len(x), hidden), torch.nan, device=device)
        found.append((out, experts_four_bit_down(h, down, None, routing, tile=tiles[1], out=y, interpret=interpret)))
    wanted = experts_plain_up_reference(x.double(), _wide(up), None, routing)
    assert_near(found[0][0], wanted, tolerance=1e-5 if interpret else 4e-3)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


def _exact(weight: StackedFourBit) -> StackedFourBit:
    """With scales of one bit, so that sums are exact in any order."""
    return weight._replace(scales=torch.where(weight.scales < 0, -(2.0**-6), 2.0**-6).bfloat16())


def _wide(weight: StackedFourBit) -> torch.Tensor:
    return dequantised(weight, torch.float64)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    routing, weight = routing_of(4, 3, 2, SPREADS[0], 16, device), stacked_four_bit(3, 32, 64, 32, device)
    x = torch.zeros(8, 64, dtype=torch.bfloat16, device=device)
    for message, own, tile in [
        ("block_k is 64 and 16 outputs; must be 128 and a multiple of 16", weight, TILE._replace(block_k=64)),
        ("experts_four_bit_up: x", weight._replace(k=72), TILE),
        ("experts_four_bit_up: words", weight._replace(words=weight.words[:, :, :1].contiguous()), TILE),
        ("experts_four_bit_up: shifts", weight._replace(shifts=weight.words), TILE),
    ]:
        with pytest.raises(ValueError, match=message):
            experts_four_bit_up(x, own, None, routing, tile=tile, interpret=True)
    odd = stacked_four_bit(3, 24, 64, 32, device)
    with pytest.raises(ValueError, match="16 outputs"):
        experts_four_bit_up(x, odd, None, routing, tile=TILE._replace(block_k=64), interpret=True)
