"""rope_train: RoPE of heads in the layout of the projections, by position, and its backward pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.train.rope_train import rope_train, rope_train_reference

# The interpreter cuts bf16 off instead of rounding it.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float64: 1e-14}


def tables(length: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of a row from position 3 on, the first half of sin negated."""
    angles = torch.outer(torch.arange(3, 3 + length).double(), 50.0 ** -(torch.arange(size // 2) / (size // 2)).double())
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], 1)
    return cos.to(device, wide), sin.to(device, wide)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "length", "heads", "size"), [(1, 1, 1, 2), (2, 5, 3, 6), (3, 40, 9, 64)])
def test_each_pair_of_a_head_is_rotated_by_the_angle_of_its_position(
    rows: int, length: int, heads: int, size: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    x = torch.randn(rows * length, heads, size, device=device).to(dtype)
    cos, sin = tables(length, size, dtype, device)
    out = torch.full_like(x, float("nan"))
    rope_train(x, cos, sin, out=out, interpret=interpret)
    pairs = torch.view_as_complex(torch.stack(x.double().chunk(2, -1), -1).contiguous())
    by = torch.polar(torch.ones(length, size // 2).double(), torch.atan2(sin[:, size // 2 :], cos[:, size // 2 :]).double().cpu())
    turned = torch.view_as_real(pairs * by.repeat(rows, 1).unsqueeze(1).to(device))
    torch.testing.assert_close(out.double(), torch.cat(turned.unbind(-1), -1), atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=20)
@given(
    rows=st.integers(0, 3), length=st.integers(1, 9), heads=st.integers(1, 5), half=st.integers(1, 20), seed=st.integers(0, 99)
)
def test_kernel_and_reference_agree_for_any_tables(
    rows: int, length: int, heads: int, half: int, seed: int, interpret: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows * length, heads, 2 * half, generator=generator).to(device)
    cos, sin = torch.randn(2, length, 2 * half, generator=generator).to(device)
    out, expected = torch.full((2, *x.shape), float("nan"), device=device)
    rope_train_reference(x, cos, sin, out=expected)
    rope_train(x, cos, sin, out=out, interpret=interpret)
    torch.testing.assert_close(out, expected)


def test_the_backward_pass_is_the_forward_pass_with_sin_rolled(interpret: bool, device: torch.device) -> None:
    x, grad = torch.randn(2, 6, 2, 8, device=device).double()
    cos, sin = torch.randn(2, 3, 8, device=device).double()
    found, out = torch.empty_like(x), torch.empty_like(x)
    rope_train(grad, cos, sin.roll(4, -1).contiguous(), out=found, interpret=interpret)
    rope_train(x, cos, sin, out=out, interpret=interpret)
    assert float((out * grad).sum()) == pytest.approx(float((x * found).sum()))  # the transpose of a linear map


def test_wrong_arguments_are_refused() -> None:
    x, table = torch.zeros(6, 2, 8), torch.zeros(3, 8)
    with pytest.raises(ValueError, match="rope_train: sin is float64"):
        rope_train(x, table, table.double(), out=torch.empty_like(x))
    with pytest.raises(ValueError, match=r"rope_train: x is float32 .* contiguous"):
        rope_train(x.transpose(0, 1), table, table, out=torch.empty_like(x))
    with pytest.raises(ValueError, match="6 tokens of 8 values; must be a multiple of 4 tokens"):
        rope_train(x, torch.zeros(4, 8), torch.zeros(4, 8), out=torch.empty_like(x))
