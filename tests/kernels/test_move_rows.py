"""compact: rows copied to other rows of the same tensor, bit for bit; -1 entries and all other rows untouched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.rounds.move_rows import BLOCK, move_rows

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.bool,
)


def ids(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 37), (6, BLOCK), (6, BLOCK + 3)])
def test_rows_move(shape: tuple[int, ...], dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    state = (torch.randn(shape, device=device) * 5).to(dtype)
    expected = state.clone()
    expected[0], expected[2] = state[5].clone(), state[3].clone()
    move_rows(state, ids([5, 3], device), ids([0, 2], device), interpret=interpret)
    assert torch.equal(state, expected)


def test_entries_of_minus_one_are_skipped(interpret: bool, device: torch.device) -> None:
    state = torch.arange(12, device=device).view(4, 3)
    before = state.clone()
    move_rows(state, ids([-1, 2, -1], device), ids([0, -1, -1], device), interpret=interpret)
    assert torch.equal(state, before)
    move_rows(state, ids([-1, 3, 2], device), ids([-1, 1, -1], device), interpret=interpret)
    assert state.tolist() == [[0, 1, 2], [9, 10, 11], [6, 7, 8], [9, 10, 11]]


def test_not_a_number_keeps_its_bits(interpret: bool, device: torch.device) -> None:
    state = torch.tensor([0, 0x7FC0_1234, -1], dtype=torch.int32, device=device).view(torch.float32)
    move_rows(state, ids([1], device), ids([0], device), interpret=interpret)
    assert state.view(torch.int32).tolist() == [0x7FC0_1234, 0x7FC0_1234, -1]


def test_columns_of_a_wider_state_move_alone(interpret: bool, device: torch.device) -> None:
    wide = torch.arange(24, dtype=torch.int64, device=device).view(4, 6)
    move_rows(wide[:, 1:4], ids([3], device), ids([0], device), interpret=interpret)
    assert wide[0].tolist() == [0, 19, 20, 21, 4, 5]
    assert torch.equal(wide[1:], torch.arange(6, 24, device=device).view(3, 6))


def test_no_moves_and_no_columns_are_no_work(interpret: bool, device: torch.device) -> None:
    state = torch.ones(3, 2, device=device)
    move_rows(state, ids([], device), ids([], device), interpret=interpret)
    move_rows(torch.ones(3, 0, device=device), ids([1], device), ids([0], device), interpret=interpret)
    assert bool((state == 1).all())


@settings(max_examples=30)
@given(order=st.permutations(range(8)), num_moves=st.integers(0, 4), width=st.integers(1, 5))
def test_equals_a_plain_loop(order: list[int], num_moves: int, width: int, interpret: bool, device: torch.device) -> None:
    src, dst = order[:num_moves], order[4 : 4 + num_moves]
    state = torch.arange(8 * width, dtype=torch.int32, device=device).view(8, width)
    expected = state.tolist()
    for source, destination in zip(src, dst, strict=True):
        expected[destination] = list(expected[source])
    move_rows(state, ids(src, device), ids(dst, device), interpret=interpret)
    assert state.tolist() == expected


def test_wrong_arguments_are_refused() -> None:
    cpu = torch.device("cpu")
    state = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="move_rows: src_ids is int64"):
        move_rows(state, torch.zeros(1, dtype=torch.int64), ids([0], cpu))
    with pytest.raises(ValueError, match=r"move_rows: dst_ids is int32 \[2\].*must be int32 \[1\]"):
        move_rows(state, ids([0], cpu), ids([0, 1], cpu))
    with pytest.raises(ValueError, match=r"move_rows: state .*contiguous in its last dimension"):
        move_rows(torch.zeros(3, 4).t(), ids([0], cpu), ids([1], cpu))
    with pytest.raises(ValueError, match=r"move_rows: state is float32 \[2, 2, 2\]"):
        move_rows(torch.zeros(2, 2, 2), ids([0], cpu), ids([1], cpu))
