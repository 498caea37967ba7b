"""Grouped products of experts: whatever the tile and however tokens choose, each pair gets its own expert's product."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.moe.experts import experts_down, experts_down_reference, experts_up, experts_up_reference
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.tiles import ExpertTile, expert_tile, unit_pairs_of
from tests.kernels.moe_cases import SPREADS, assert_near, noise, routing_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # the interpreter cuts bf16 off
SMALL = ExpertTile(16, 16, 32, 2, 4)
CLAMPED = Gate(limit=0.5)


@pytest.mark.parametrize(
    ("gate", "spread", "tile", "dtype"),
    [
        (SWIGLU, SPREADS[0], SMALL, torch.bfloat16),
        (CLAMPED, SPREADS[0], SMALL._replace(tma=False), torch.float32),
        (SWIGLU, SPREADS[1], SMALL._replace(tma=False), torch.bfloat16),
        (CLAMPED, SPREADS[1], ExpertTile(32, 32, 16, 2, 4, True, 1), torch.float32),
        (SWIGLU, SPREADS[2], ExpertTile(32, 32, 16, 2, 4, True, 2), torch.float32),
        (CLAMPED, SPREADS[2], SMALL, torch.bfloat16),
    ],
)
def test_up(gate: Gate, spread: str, tile: ExpertTile, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    tokens, experts, top_k, hidden, width = 21, 6, 3, 40, 24  # K in blocks of 32 with a tail
    routing = routing_of(tokens, experts, top_k, spread, tile.block_t, device)
    x = noise(tokens, 2 * hidden, dtype=dtype, device=device)[:, hidden:]
    weight = noise(experts, 2 * width, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    bias = noise(experts, 2 * width, dtype=dtype, device=device) if gate is CLAMPED else None
    out = torch.full((tokens * top_k, width), torch.nan, dtype=dtype, device=device)
    assert experts_up(x, weight, bias, routing, tile=tile, gate=gate, out=out, interpret=interpret) is out
    for pair in (0, 1, tokens * top_k - 1):  # the reference is checked by hand on a few pairs
        expert = int(routing.expert_ids.flatten()[pair])
        both = x[pair // top_k].double() @ weight[expert].double().T + (0 if bias is None else bias[expert].double())
        assert_near(out[pair], gate(both[:width], both[width:]), tolerance=TOLERANCE[dtype])
    assert_near(out, experts_up_reference(x, weight, bias, routing.expert_ids, gate=gate), tolerance=TOLERANCE[dtype])


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
    out = torch.full((tokens * top_k, hidden), torch.nan, dtype=torch.float32, device=device)
    experts_down(h, weight, bias, routing, tile=tile, out=out, interpret=interpret)
    wanted = experts_down_reference(h, weight, bias, routing.expert_ids)
    assert_near(out, wanted, tolerance=TOLERANCE[dtype])
    assert experts_down(h, weight, None, routing, tile=tile, interpret=interpret).dtype == dtype


def test_a_token_alone_has_the_bits_of_a_token_among_many(device: torch.device) -> None:
    tokens, experts, hidden, width = 40, 4, 48, 16
    x = noise(tokens, hidden, dtype=torch.float32, device=device)
    weight = noise(experts, 2 * width, hidden, dtype=torch.float32, device=device)
    many = routing_of(tokens, experts, 2, SPREADS[0], 32, device)
    alone = routing_of(1, experts, 2, SPREADS[0], 16, device)
    alone = alone._replace(expert_ids=many.expert_ids[:1], pairs=alone.pairs * 0 + many.expert_ids[0].argsort().int())
    alone.units[:, 0] = many.expert_ids[0].sort().values
    every = experts_up(x, weight, None, many, tile=SMALL._replace(block_t=32), interpret=True)
    one = experts_up(x[:1], weight, None, alone, tile=SMALL, interpret=True)
    assert torch.equal(one, every[:2])


def test_a_damaged_weight_is_not_clamped_to_a_number(interpret: bool, device: torch.device) -> None:
    """NaN in the gate's row 1 and in the up's row 2 must reach the output: the row of the job becomes an error."""
    tokens, hidden, width = 3, 32, 16
    routing = routing_of(tokens, 1, 1, SPREADS[0], 16, device)
    x = noise(tokens, hidden, dtype=torch.float32, device=device)
    weight = noise(1, 2 * width, hidden, dtype=torch.float32, device=device)
    weight[0, 1, 5] = weight[0, width + 2, 7] = torch.nan
    out = experts_up(x, weight, None, routing, tile=SMALL, gate=CLAMPED, interpret=interpret)
    nan = experts_up_reference(x, weight, None, routing.expert_ids, gate=CLAMPED).isnan()
    assert nan.any(0).nonzero().flatten().tolist() == [1, 2]
    assert torch.equal(out.isnan(), nan)


def test_no_tokens_is_no_work(interpret: bool, device: torch.device) -> None:
    routing = routing_of(0, 4, 2, SPREADS[0], 16, device)
    x, weight = torch.zeros(0, 32, device=device), torch.zeros(4, 32, 32, device=device)
    assert experts_up(x, weight, None, routing, tile=SMALL, interpret=interpret).shape == (0, 16)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    routing = routing_of(4, 6, 2, SPREADS[0], 16, device)
    x, weight = torch.zeros(4, 32), torch.zeros(6, 32, 32)
    with pytest.raises(ValueError, match="experts_up: x"):
        experts_up(x[:3], weight, None, routing, tile=SMALL, interpret=True)
    with pytest.raises(ValueError, match="experts_up: weight is bfloat16"):
        experts_up(x, weight.bfloat16(), None, routing, tile=SMALL, interpret=True)
    with pytest.raises(ValueError, match="experts_up: offsets"):
        experts_up(x, weight[:5], None, routing, tile=SMALL, interpret=True)
    with pytest.raises(ValueError, match="a tile of 32 pairs, but the routing's units have 16"):
        experts_up(x, weight, None, routing, tile=SMALL._replace(block_t=32), interpret=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_default_tiles_hold_the_pairs_of_an_expert_and_use_the_wide_instruction(dtype: torch.dtype) -> None:
    sizes = [unit_pairs_of(tokens, 8, 128) for tokens in (1, 16, 64, 256, 512, 1024, 16384)]
    assert sizes == [16, 16, 16, 32, 64, 128, 128]
    assert [unit_pairs_of(tokens, 1, 1) for tokens in (1, 17, 64, 65, 300)] == [16, 32, 64, 128, 128]
    assert [unit_pairs_of(tokens, 1, 1, torch.uint8) for tokens in (1, 17, 64, 65, 300)] == [16, 32, 32, 128, 128]
    for unit_pairs in sizes:
        for gated in (False, True):
            tile = expert_tile(unit_pairs, gated=gated, dtype=dtype)
            assert tile.block_t == unit_pairs
            assert tile.block_n % 64 == tile.warps % 4 == 0
            assert tile.block_k == expert_tile(16, gated=gated, dtype=dtype).block_k
