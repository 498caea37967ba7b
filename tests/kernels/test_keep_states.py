"""keep_states: the target's states of positions, in places of their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchspec.kernels.drafting.keep_states import keep_states

PLACES = 4


def drawn(width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Four rows of which one is dead, and padding; states are the middle of wider rows."""
    wide = torch.randn(5, width + 7, generator=torch.Generator().manual_seed(width)).to(dtype)
    return {
        "states": wide[:, 3 : 3 + width], "row_ids": torch.tensor([0, 1, 2, 3, 0], dtype=torch.int32),
        "positions": torch.tensor([9, 4, 0, 7, 2]), "slot_mapping": torch.tensor([3, 77, 0, 8, 0]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 96, 1025])
def test_each_position_goes_to_its_place_and_no_other_changes(
    width: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    found = {name: value.to(device) for name, value in drawn(width, dtype).items()}
    states = torch.full((4, PLACES, width), -7.0, dtype=dtype, device=device)
    positions = torch.full((4, PLACES), -7, device=device)
    keep_states(**found, out_states=states, out_positions=positions, interpret=interpret)
    expected = torch.full_like(states, -7.0)
    for row, place, token in ((0, 1, 0), (1, 0, 1), (3, 3, 3)):
        expected[row, place] = found["states"][token]
    assert torch.equal(states, expected)
    assert positions.tolist() == [[-7, 9, -7, -7], [4, -7, -7, -7], [-7] * 4, [-7, -7, -7, 7]]


def test_wrong_arguments_are_refused() -> None:
    good = drawn(6, torch.float32) | {
        "out_states": torch.zeros(4, PLACES, 6), "out_positions": torch.zeros(4, PLACES, dtype=torch.int64)
    }
    keep_states(**good)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"row_ids": good["row_ids"].long()}, "keep_states: row_ids is int64"),
        ({"positions": good["positions"].int()}, "keep_states: positions is int32"),
        ({"slot_mapping": good["slot_mapping"][:4]}, r"keep_states: slot_mapping is int64 \[4\]"),
        ({"out_states": good["out_states"].double()}, "keep_states: out_states is float64"),
        ({"out_states": torch.zeros(4, PLACES, 5)}, r"keep_states: out_states is float32 \[4, 4, 5\]"),
        ({"out_positions": good["out_positions"].int()}, "keep_states: out_positions is int32"),
    ]
    for changes, said in bad:
        with pytest.raises(ValueError, match=said):
            keep_states(**(good | changes))
