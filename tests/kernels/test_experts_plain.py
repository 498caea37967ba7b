"""Grouped products of experts: whatever the tile and however tokens choose, each pair gets its own expert's product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.moe.experts_plain import (
    experts_plain_down,
    experts_plain_down_reference,
    experts_plain_up,
    experts_plain_up_reference,
)
from batchspec.kernels.moe.gate import GEGLU, SQUARED_RELU, SWIGLU, Gate
from batchspec.kernels.moe.route import lists_reference
from batchspec.kernels.moe.sort_rows import sort_rows
from batchspec.kernels.moe.tiles import MXFP4_PAIRS, ExpertTile, candidates, expert_tile, fits, unit_pairs_of
from batchspec.kernels.moe.units import max_units
from batchspec.tuning.cards import known_card
from tests.kernels.moe_cases import SPREADS, assert_near, noise, routing_of, sorted_pairs

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # the interpreter cuts bf16 off
SMALL = ExpertTile(16, 16, 32, 2, 4)
CLAMPED = Gate(limit=0.5)


@pytest.mark.parametrize(
    ("gate", "spread", "tile", "dtype"),
    [
        (SWIGLU, SPREADS[0], SMALL, torch.bfloat16),
        (CLAMPED, SPREADS[0], SMALL._replace(tma=False), torch.float32),
        (SWIGLU, SPREADS[1], SMALL._replace(tma=False), torch.bfloat16),
        (CLAMPED, SPREADS[1], ExpertTile(32, 32, 16, 2, 4), torch.float32),
        (SWIGLU, SPREADS[2], ExpertTile(32, 32, 16, 2, 4, low=32), torch.float32),
        (CLAMPED, SPREADS[2], SMALL, torch.bfloat16),
        (GEGLU, SPREADS[1], SMALL, torch.float32),
        (SQUARED_RELU, SPREADS[0], SMALL._replace(tma=False), torch.float32),
        (SQUARED_RELU, SPREADS[2], SMALL, torch.bfloat16),
    ],
)
def test_up(gate: Gate, spread: str, tile: ExpertTile, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    tokens, experts, top_k, hidden, width = 21, 6, 3, 40, 24  # K in blocks of 32 with a tail
    routing = routing_of(tokens, experts, top_k, spread, tile.block_t, device)
    x = noise(tokens, 2 * hidden, dtype=dtype, device=device)[:, hidden:]
    weight = noise(experts, gate.parts * width, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    bias = noise(experts, gate.parts * width, dtype=dtype, device=device) if gate in (CLAMPED, SQUARED_RELU) else None
    out = torch.full((tokens * top_k, width), torch.nan, dtype=dtype, device=device)
    rows = sort_rows(x, routing, interpret=interpret)
    assert experts_plain_up(rows, weight, bias, routing, tile=tile, gate=gate, out=out, interpret=interpret) is out
    for place in (0, 1, tokens * top_k - 1):  # the reference is checked by hand on a few pairs
        pair = int(routing.pairs[place])
        expert = int(routing.expert_ids.flatten()[pair])
        both = x[pair // top_k].double() @ weight[expert].double().T + (0 if bias is None else bias[expert].double())
        wanted = both.clamp(min=0) ** 2 if gate is SQUARED_RELU else gate(both[:width], both[width:])
        assert_near(out[place], wanted, tolerance=TOLERANCE[dtype])
    assert_near(out, experts_plain_up_reference(rows, weight, bias, routing, gate=gate), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("spread", "tile", "dtype"),
    [
        (SPREADS[0], SMALL._replace(tma=False), torch.bfloat16),
        (SPREADS[1], SMALL, torch.bfloat16),
        (SPREADS[2], SMALL, torch.float32),
    ],
)
def test_down(spread: str, tile: ExpertTile, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    tokens, experts, top_k, hidden, width = 13, 5, 2, 40, 48
    routing = routing_of(tokens, experts, top_k, spread, tile.block_t, device)
    h = noise(tokens * top_k, width, dtype=dtype, device=device)
    weight = noise(experts, hidden, width, dtype=dtype, device=device, scale=width**-0.5)
    bias = noise(experts, hidden, dtype=dtype, device=device)
    out = torch.full((tokens * top_k, hidden), torch.nan, dtype=dtype, device=device)
    rows = sorted_pairs(h, routing)
    experts_plain_down(rows, weight, bias, routing, tile=tile, out=out, interpret=interpret)
    ids = routing.expert_ids.flatten().long()
    assert_near(
        out, torch.einsum("pnk,pk->pn", weight[ids].double(), h.double()) + bias[ids].double(), tolerance=TOLERANCE[dtype]
    )
    assert_near(out, experts_plain_down_reference(rows, weight, bias, routing), tolerance=TOLERANCE[dtype])


def test_a_token_alone_has_the_bits_of_a_token_among_many(device: torch.device) -> None:
    tokens, experts, hidden, width = 40, 4, 48, 16
    x = noise(tokens, hidden, dtype=torch.float32, device=device)
    weight = noise(experts, 2 * width, hidden, dtype=torch.float32, device=device)
    many = routing_of(tokens, experts, 2, SPREADS[0], 32, device)
    alone = lists_reference(many.expert_ids[:1], many.weights[:1], experts, 16)
    every, one = (
        experts_plain_up(sort_rows(x[:count], own, interpret=True), weight, None, own, tile=tile, interpret=True)
        for count, own, tile in ((tokens, many, SMALL._replace(block_t=32)), (1, alone, SMALL))
    )
    for place, pair in enumerate(alone.pairs.tolist()):
        assert torch.equal(one[place], every[many.pairs.tolist().index(pair)])


def test_a_damaged_weight_is_not_clamped_to_a_number(interpret: bool, device: torch.device) -> None:
    """NaN in the gate's row 1 and in the up's row 2 must reach the output: the row of the job becomes an error."""
    tokens, hidden, width = 3, 32, 16
    routing = routing_of(tokens, 1, 1, SPREADS[0], 16, device)
    x = noise(tokens, hidden, dtype=torch.float32, device=device)
    weight = noise(1, 2 * width, hidden, dtype=torch.float32, device=device)
    weight[0, 1, 5] = weight[0, width + 2, 7] = torch.nan
    rows = sort_rows(x, routing, interpret=interpret)
    out = experts_plain_up(rows, weight, None, routing, tile=SMALL, gate=CLAMPED, interpret=interpret)
    nan = experts_plain_up_reference(rows, weight, None, routing, gate=CLAMPED).isnan()
    assert nan.any(0).nonzero().flatten().tolist() == [1, 2]
    assert torch.equal(out.isnan(), nan)
    out = experts_plain_up(rows, weight, None, routing, tile=SMALL, gate=SQUARED_RELU, interpret=interpret)
    assert out.isnan().any(0).nonzero().flatten().tolist() == [1, width + 2]


def test_no_tokens_is_no_work(interpret: bool, device: torch.device) -> None:
    routing = routing_of(0, 4, 2, SPREADS[0], 16, device)
    x, weight = torch.zeros(0, 32, device=device), torch.zeros(4, 32, 32, device=device)
    rows = sort_rows(x, routing, interpret=interpret)
    assert experts_plain_up(rows, weight, None, routing, tile=SMALL, interpret=interpret).shape == (0, 16)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    routing = routing_of(4, 6, 2, SPREADS[0], 16, device)
    x, weight = torch.zeros(8, 32), torch.zeros(6, 32, 32)

    def up(rows: Tensor, weight: Tensor, tile: ExpertTile) -> Tensor:
        return experts_plain_up(rows, weight, None, routing, tile=tile, interpret=True)

    with pytest.raises(ValueError, match="experts_plain_up: x"):
        up(x[:4], weight, SMALL)
    with pytest.raises(ValueError, match="experts_plain_up: weight is bfloat16"):
        up(x, weight.bfloat16(), SMALL)
    with pytest.raises(ValueError, match="experts_plain_up: offsets"):
        up(x, weight[:5], SMALL)
    with pytest.raises(ValueError, match="a tile of 32 pairs, but the routing's units have 16"):
        up(x, weight, SMALL._replace(block_t=32))
    with pytest.raises(ValueError, match="low must be at most block_t"):
        up(x, weight, SMALL._replace(low=32))


TYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["A100-80GB", "L40S", "H200", "RTX-5090"])
def test_tiles_fit(name: str, dtype: torch.dtype, gated: bool) -> None:
    card = known_card(name).card
    for unit_pairs in (16, 32, 64, 128) if dtype is not torch.uint8 else MXFP4_PAIRS:
        tile = expert_tile(unit_pairs, 1000, card, gated=gated, dtype=dtype)
        assert tile.block_t == unit_pairs
        assert 16 <= tile.low <= tile.block_t
        assert tile.block_n % 64 == 0
        if dtype is not torch.bfloat16:  # a program scales or unpacks whole blocks of 128 columns
            assert tile.block_k == 128
    for tokens in (1, 64, 4096):
        found = candidates(tokens, 4, 32, card, gated=gated, dtype=dtype)
        unit_pairs = unit_pairs_of(tokens, 4, 32, dtype)
        assert found[0] == expert_tile(unit_pairs, max_units(tokens, 4, 32, unit_pairs), card, gated=gated, dtype=dtype)
        assert len(found) == len(set(found)) > (10 if card.block_shared_bytes > 200_000 else 2)
        assert all(fits(tile, card, gated=gated, dtype=dtype) and tile.low <= tile.block_t for tile in found)


def test_units_grow_with_the_pairs_of_an_expert() -> None:
    counts = (1, 16, 64, 256, 512, 1024, 4096, 16384)
    assert [unit_pairs_of(tokens, 8, 128) for tokens in counts] == [16, 16, 16, 32, 64, 128, 128, 128]
    assert [unit_pairs_of(tokens, 8, 128, E4M3) for tokens in counts] == [16, 16, 16, 32, 64, 64, 64, 128]
    assert [unit_pairs_of(tokens, 4, 32, torch.uint8) for tokens in counts] == [16, 16, 16, 48, 96, 128, 128, 128]
    assert [unit_pairs_of(tokens, 4, 128, torch.uint8) for tokens in counts] == [16, 16, 16, 16, 32, 48, 128, 128]
    assert [unit_pairs_of(tokens, 4, 32, torch.int32) for tokens in counts] == [16, 16, 16, 64, 96, 64, 128, 128]
    assert [unit_pairs_of(tokens, 4, 128, torch.int32) for tokens in counts] == [16, 16, 16, 16, 32, 64, 96, 128]
    assert [unit_pairs_of(tokens, 1, 1, E4M3) for tokens in (1, 17, 64, 65, 300, 512)] == [16, 32, 64, 64, 64, 128]
