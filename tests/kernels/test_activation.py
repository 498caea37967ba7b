"""activation: silu or gelu of the first half of each row times its second half, and the square of what is positive."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.gemm.activation import (
    BLOCK,
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    relu_squared_,
    silu_and_mul,
    silu_and_mul_reference,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Two roundings of the dtype; the interpreter cuts bf16 off instead of rounding it.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float64: 1e-12}
NAN = float("nan")


def by_hand(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, 1)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_flat_tokens", "width"), [(1, 1), (3, 33), (2, 1536), (2, BLOCK), (3, 2 * BLOCK + 8)])
def test_gate_times_up(num_flat_tokens: int, width: int, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    gate_up = (torch.randn(num_flat_tokens, 2 * width, device=device) * 3).to(dtype)
    out = torch.full((num_flat_tokens, width), NAN, dtype=dtype, device=device)
    silu_and_mul(gate_up, out=out, interpret=interpret)
    torch.testing.assert_close(out.double(), by_hand(gate_up), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gelu_s_gate_times_up(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    gate_up = (torch.randn(4, 2 * 45, device=device) * 3).to(dtype)
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -8.0])
    out, reference = (torch.full((4, 45), NAN, dtype=dtype, device=device) for _ in range(2))
    gelu_tanh_and_mul(gate_up, out=out, interpret=interpret)
    gelu_tanh_and_mul_reference(gate_up, out=reference)
    gate, up = gate_up.double().chunk(2, 1)
    exact = gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    for found in (out, reference):
        torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, BLOCK - 5)])
def test_without_a_gate_it_squares_what_is_positive(
    shape: tuple[int, int], dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    up = (torch.randn(shape, device=device) * 3).to(dtype)
    exact = up.double().clamp(min=0).square()
    assert relu_squared_(up, interpret=interpret) is up
    torch.testing.assert_close(up.double(), exact, rtol=TOLERANCE[dtype], atol=2**-24)


def test_of_what_is_not_finite_nothing_is_hidden(interpret: bool, device: torch.device) -> None:
    found = relu_squared_(torch.tensor([[NAN, float("inf"), -float("inf"), -0.0]], device=device), interpret=interpret)
    torch.testing.assert_close(found.cpu(), torch.tensor([[NAN, float("inf"), 0.0, 0.0]]), equal_nan=True)


def test_a_closed_gate_is_zero_and_an_open_one_lets_through(interpret: bool, device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, -1e30, 0.0, 200.0, 3.0, 3.0, 3.0, 3.0]], device=device)
    out = torch.full((1, 4), NAN, device=device)
    silu_and_mul(gate_up, out=out, interpret=interpret)
    assert out.tolist() == [[0.0, 0.0, 0.0, 600.0]]


def test_rows_of_a_wider_tensor_are_read_in_place(interpret: bool, device: torch.device) -> None:
    wide = torch.full((5, 100), NAN, device=device)
    wide[:, 4:64] = torch.randn(5, 60, device=device)
    out = torch.full((5, 30), NAN, device=device)
    silu_and_mul(wide[:, 4:64], out=out, interpret=interpret)
    torch.testing.assert_close(out.double(), by_hand(wide[:, 4:64]), rtol=1e-5, atol=1e-6)


@settings(max_examples=20)
@given(
    num_flat_tokens=st.integers(0, 5), width=st.integers(1, 70), scale=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 99)
)
def test_kernel_and_reference_agree(
    num_flat_tokens: int, width: int, scale: float, seed: int, interpret: bool, device: torch.device
) -> None:
    gate_up = (torch.randn(num_flat_tokens, 2 * width, generator=torch.Generator().manual_seed(seed)) * scale).to(device)
    out, expected = torch.full((2, num_flat_tokens, width), NAN, device=device)
    silu_and_mul_reference(gate_up, out=expected)
    silu_and_mul(gate_up, out=out, interpret=interpret)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"silu_and_mul: gate_up is float32 \[2, 9\].* must be .* \[2, 8\]"):
        silu_and_mul(torch.zeros(2, 9), out=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="silu_and_mul: gate_up is int32"):
        silu_and_mul(torch.zeros(2, 8, dtype=torch.int32), out=torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"silu_and_mul: out is float64 .* must be float32"):
        silu_and_mul(torch.zeros(2, 8), out=torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"silu_and_mul: out is float32 .* contiguous"):
        silu_and_mul(torch.zeros(2, 8), out=torch.zeros(2, 8)[:, ::2])
