"""The programs of grouped products: each tile of each unit once, and those that read the same rows of W side by side."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from batchspec.kernels.moe.route import lists_reference
from batchspec.kernels.moe.units import program_place
from tests.kernels.moe_cases import SPREADS, pairs_of_units, routing_of

TILES = 3


@triton.jit
def places_kernel(units, out, num_tiles, UNIT_PAIRS: tl.constexpr):
    expert, begin, count, tile = program_place(units, num_tiles, UNIT_PAIRS)
    at = out + tl.program_id(0) * 4
    tl.store(at, expert)
    tl.store(at + 1, begin)
    tl.store(at + 2, count)
    tl.store(at + 3, tile)


@pytest.mark.parametrize("largest_first", [False, True])
@pytest.mark.parametrize("spread", SPREADS)
def test_an_expert_s_programs_run_tile_by_tile_and_for_a_tile_unit_by_unit(
    spread: str, largest_first: bool, interpret: bool, device: torch.device
) -> None:
    if not (interpret or device.type == "cuda"):
        pytest.skip("there is no reference: only kernels have programs")
    chosen = routing_of(50, 5, 2, spread, 16, device)
    routing = lists_reference(chosen.expert_ids, chosen.weights, 5, 16, largest_first=largest_first)
    out = torch.full((len(routing.units) * TILES, 4), -1, dtype=torch.int32, device=device)
    places_kernel[(len(out),)](routing.units, out, TILES, UNIT_PAIRS=16)
    units = pairs_of_units(routing)
    experts = list(dict.fromkeys(expert for expert, _, _ in units))
    wanted = [[*unit, tile] for expert in experts for tile in range(TILES) for unit in units if unit[0] == expert]
    found = out.tolist()
    assert found[: len(wanted)] == wanted
    assert {count for _, _, count, _ in found[len(wanted) :]} <= {0}
