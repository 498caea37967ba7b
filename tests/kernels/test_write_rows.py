"""write_rows: rows of a state tensor are set bit for bit; rows with a mask of 0, and all other slots, are untouched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.rounds.move_rows import BLOCK
from batchspec.kernels.rounds.write_rows import write_rows, write_rows_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int32, torch.int64, torch.bool)


def ints(values: list[int], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (37,), (BLOCK,), (BLOCK + 3,)])
def test_rows_are_written_to_their_slots(
    shape: tuple[int, ...], dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    state, values = ((torch.randn((count, *shape), device=device) * 5).to(dtype) for count in (6, 3))
    expected = state.clone()
    expected[4], expected[0] = values[0], values[2]
    write_rows(state, ints([4, 1, 0], device), ints([1, 0, 7], device, torch.int32), values, interpret=interpret)
    assert torch.equal(state, expected)


def test_not_a_number_keeps_its_bits(interpret: bool, device: torch.device) -> None:
    values = torch.tensor([0x7FC0_1234], dtype=torch.int32, device=device).view(torch.float32)
    state = torch.zeros(2, device=device)
    write_rows(state, ints([1], device), ints([1], device, torch.int32), values, interpret=interpret)
    assert state.view(torch.int32).tolist() == [0, 0x7FC0_1234]


def test_rows_may_be_parts_of_wider_ones(interpret: bool, device: torch.device) -> None:
    state, values = torch.zeros(3, 6, dtype=torch.int32, device=device), torch.arange(12, dtype=torch.int32, device=device)
    write_rows(
        state[:, 1:4], ints([2, 0], device), ints([1, 1], device, torch.int32), values.view(2, 6)[:, 2:5], interpret=interpret
    )
    assert state.tolist() == [[0, 8, 9, 10, 0, 0], [0] * 6, [0, 2, 3, 4, 0, 0]]


@settings(max_examples=30)
@given(data=st.data())
def test_it_does_what_the_reference_does(data: st.DataObject, interpret: bool, device: torch.device) -> None:
    slots, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    chosen = data.draw(st.lists(st.integers(0, slots - 1), unique=True))
    mask = ints(data.draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen))), device, torch.int32)
    found, values = torch.randn(slots, width, device=device), torch.randn(len(chosen), width, device=device)
    expected = found.clone()
    write_rows(found, ints(chosen, device), mask, values, interpret=interpret)
    write_rows_reference(expected, ints(chosen, device), mask, values)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("wrong", ["slots", "mask", "values", "dtype"])
def test_wrong_arguments_are_refused(wrong: str, device: torch.device) -> None:
    state, values = torch.zeros(3, 2, device=device), torch.zeros(2, 2, device=device)
    slot_ids, mask = ints([0, 1], device), ints([1, 1], device, torch.int32)
    match wrong:
        case "slots":
            slot_ids = slot_ids.int()
        case "mask":
            mask = mask[:1]
        case "values":
            values = values[:, :1]
        case "dtype":
            values = values.double()
    with pytest.raises(ValueError, match="write_rows: "):
        write_rows(state, slot_ids, mask, values)
