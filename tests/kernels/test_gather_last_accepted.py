"""gather_last_accepted: each row's last accepted flat token of those just verified, and its number of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.drafting.gather_last_accepted import gather_last_accepted

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
POISON = -7


def make(q_len: list[int], q_width: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q and residual as slices of wider rows, and cu_seqlens_q."""
    num_tokens_flat = sum(q_len)
    q = torch.randn(num_tokens_flat, q_width + 9, device=device).to(dtype)[:, :q_width]
    residual = torch.randn(num_tokens_flat, 2 * width, device=device).to(dtype)[:, width:]
    return q, residual, torch.tensor([0, *q_len], device=device).cumsum(0).int()


def run(
    q: Tensor, residual: Tensor, cu_seqlens_q: Tensor, rows: list[tuple[int, int, int]], interpret: bool
) -> dict[str, Tensor]:
    """rows: (accepted_len, num_tokens, live); flat token t has position 100 + t and slot 200 + t."""
    device, count = q.device, len(rows)
    accepted_len, num_tokens, live = (x.contiguous() for x in torch.tensor(rows, dtype=torch.int32, device=device).unbind(1))
    out = {
        "out_q": torch.full((count, q.shape[1]), float("nan"), dtype=q.dtype, device=device),
        "out_residual": torch.full((count, residual.shape[1]), float("nan"), dtype=q.dtype, device=device),
        "out_positions": torch.full((count,), POISON, device=device),
        "out_slots": torch.full((count,), POISON, device=device),
        "out_kv_len": torch.full((count,), POISON, dtype=torch.int32, device=device),
    }
    positions = 100 + torch.arange(len(q), device=device)
    gather_last_accepted(
        q, residual, cu_seqlens_q, accepted_len, positions, num_tokens, live, slot_mapping=positions + 100, interpret=interpret,
        **out,
    )
    return {name.removeprefix("out_"): values for name, values in out.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_width", "width"), [(1, 1), (24, 16), (100, 576), (1536, 80)])
def test_the_last_accepted_token_of_each_row(
    q_width: int, width: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    q, residual, cu_seqlens_q = make([3, 3, 3], q_width, width, dtype, device)
    found = run(q, residual, cu_seqlens_q, [(0, 11, 1), (2, 21, 1), (1, 31, 1)], interpret)
    assert torch.equal(found["q"], q[[0, 5, 7]])
    assert torch.equal(found["residual"], residual[[0, 5, 7]])
    assert found["positions"].tolist() == [100, 105, 107]
    assert found["slots"].tolist() == [200, 205, 207]
    assert found["kv_len"].tolist() == [10, 20, 30]


def test_rows_of_different_lengths(interpret: bool, device: torch.device) -> None:
    q, residual, cu_seqlens_q = make([1, 4, 2], 8, 8, torch.float32, device)
    found = run(q, residual, cu_seqlens_q, [(0, 5, 1), (3, 6, 1), (1, 7, 1)], interpret)
    assert torch.equal(found["q"], q[[0, 4, 6]])
    assert found["positions"].tolist() == [100, 104, 106]


def test_dead_rows_have_no_keys_and_read_any_token(interpret: bool, device: torch.device) -> None:
    """In a packed batch, dead rows at the end own no flat token and begin past the last one."""
    q, residual, cu_seqlens_q = make([2, 0, 0], 8, 4, torch.float32, device)
    found = run(q, residual, cu_seqlens_q, [(1, 9, 1), (0, 30, 0), (0, 0, 0)], interpret)
    assert found["kv_len"].tolist() == [8, 0, 0]
    assert found["slots"].tolist() == [201, 0, 0]
    assert torch.equal(found["q"], q[[1, 1, 1]])
    assert torch.equal(found["residual"], residual[[1, 1, 1]])


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 99), st.integers(0, 1)), min_size=1, max_size=5), st.integers(0, 9))
def test_kernel_and_reference_agree(rows: list[tuple[int, int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q, residual, cu_seqlens_q = make([4] * len(rows), 12, 20, torch.float32, device)
    kernel = run(q, residual, cu_seqlens_q, rows, True)
    reference = run(q.cpu(), residual.cpu(), cu_seqlens_q.cpu(), rows, False)
    for name, values in kernel.items():
        assert torch.equal(values.cpu(), reference[name]), name


def test_wrong_arguments_are_refused() -> None:
    ints, q = torch.zeros(2, dtype=torch.int32), torch.zeros(4, 8)
    good: dict[str, Any] = {
        "q": q, "residual": q[:, :6], "cu_seqlens_q": torch.zeros(3, dtype=torch.int32), "accepted_len": ints,
        "positions": torch.zeros(4, dtype=torch.int64), "num_tokens": ints, "live": ints, "out_q": torch.zeros(2, 8),
        "out_residual": torch.zeros(2, 6), "out_positions": torch.zeros(2, dtype=torch.int64), "out_kv_len": ints,
    }
    bad: list[tuple[dict[str, Any], str]] = [
        ({"residual": q.double()}, r"gather_last_accepted: residual is float64 \[4, 8\].* must be float32"),
        ({"q": q[:0]}, r"gather_last_accepted: q is float32 \[0, 8\]"),
        ({"cu_seqlens_q": ints}, r"gather_last_accepted: cu_seqlens_q is int32 \[2\].* must be int32 \[3\]"),
        ({"accepted_len": ints.long()}, "gather_last_accepted: accepted_len is int64"),
        ({"out_slots": ints.long()}, "slot_mapping and out_slots go together"),
        ({"out_q": torch.zeros(3, 8)}, r"gather_last_accepted: out_q is float32 \[3, 8\]"),
    ]
    for changes, said in bad:
        with pytest.raises(ValueError, match=said):
            gather_last_accepted(**(good | changes))
