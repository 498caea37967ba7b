"""norm: the RMS norm of rows, the residual sum in place before it, and the copy of the sum for a drafter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.norm_rope.norm import add_norm, add_norm_reference, rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Three roundings of the dtype; the interpreter cuts bf16 off instead of rounding it.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float64: 1e-12}
NAN = float("nan")
EPS = 1e-5


def noise(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def by_hand(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()


def assert_near(actual: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance / 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 7), (5, 576), (2, 1024), (2, 8191)])
def test_norm_of_each_row(num_tokens: int, width: int, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    hidden, weight = noise(num_tokens, width, dtype=dtype, device=device), noise(width, dtype=dtype, device=device)
    out = torch.full_like(hidden, NAN)
    rms_norm(hidden, weight, EPS, out=out, interpret=interpret)
    assert_near(out, by_hand(hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_in_fp32_is_rounded_with_the_product_once(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    hidden, weight = noise(40, 96, dtype=dtype, device=device), noise(96, dtype=torch.float32, device=device)
    exact, out = by_hand(hidden, weight), hidden.clone()
    rms_norm(out, weight, EPS, out=out, interpret=interpret)  # in place
    one_rounding = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and interpret else 2)  # bf16 is cut off there
    torch.testing.assert_close(out.double(), exact, rtol=1.01 * one_rounding, atol=1e-6)
    residual = torch.zeros_like(hidden)
    summed = torch.empty_like(hidden)
    add_norm(hidden, residual, weight, EPS, out=summed, interpret=interpret)
    assert torch.equal(summed, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_aux", [False, True])
def test_the_residual_takes_the_sum_and_the_norm_is_that_of_the_rounded_sum(
    dtype: torch.dtype, with_aux: bool, interpret: bool, device: torch.device
) -> None:
    hidden, residual = noise(4, 576, dtype=dtype, device=device), noise(4, 576, dtype=dtype, device=device)
    weight = noise(576, dtype=dtype, device=device)
    total = (hidden.double() + residual.double()).to(dtype)
    aux = torch.full((4, 3, 576), NAN, dtype=dtype, device=device)
    out = torch.full_like(hidden, NAN)
    add_norm(hidden, residual, weight, EPS, out=out, out_aux=aux[:, 1] if with_aux else None, interpret=interpret)
    rounding = 2**-7 if dtype == torch.bfloat16 and interpret else 0
    torch.testing.assert_close(residual, total, rtol=rounding, atol=0)
    assert_near(out, by_hand(residual, weight))
    assert bool(aux[:, [0, 2]].isnan().all())
    if with_aux:
        assert torch.equal(aux[:, 1], residual)
    else:
        assert bool(aux.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounded_sum_is_multiplied_by_a_number(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    hidden, residual = noise(4, 70, dtype=dtype, device=device), noise(4, 70, dtype=dtype, device=device)
    weight, factor = noise(70, dtype=dtype, device=device), torch.full((1,), 0.7, device=device).to(dtype)
    total = ((hidden.double() + residual.double()).to(dtype).double() * factor.double()).to(dtype)
    out, aux = torch.full_like(hidden, NAN), torch.full_like(hidden, NAN)
    add_norm(hidden, residual, weight, EPS, out=out, out_aux=aux, factor=factor, interpret=interpret)
    rounding = 2**-6 if dtype == torch.bfloat16 and interpret else torch.finfo(dtype).eps / 2
    torch.testing.assert_close(residual, total, rtol=rounding, atol=0)
    assert torch.equal(aux, residual)
    assert_near(out, by_hand(residual, weight))
    with pytest.raises(ValueError, match="add_norm: factor is"):
        add_norm(hidden, residual, weight, EPS, out=out, factor=factor.repeat(2), interpret=interpret)


def test_rows_of_wider_tensors_are_read_and_summed_in_place(interpret: bool, device: torch.device) -> None:
    wide, wide_residual = torch.full((2, 3, 50), NAN, device=device), torch.full((3, 60), NAN, device=device)
    hidden, residual = wide[0, :, 8:40], wide_residual[:, 16:48]
    hidden.copy_(torch.randn(3, 32, device=device))
    residual.copy_(torch.randn(3, 32, device=device))
    total, weight, out = hidden + residual, torch.randn(32, device=device), torch.full((3, 32), NAN, device=device)
    add_norm(hidden, residual, weight, EPS, out=out, interpret=interpret)
    assert torch.equal(residual, total)
    assert bool(wide_residual[:, :16].isnan().all() and wide_residual[:, 48:].isnan().all())
    assert_near(out, by_hand(total, weight))
    both = torch.full((3, 70), NAN, device=device)
    rms_norm(hidden, weight, EPS, out=both[:, 32:64], interpret=interpret)
    assert_near(both[:, 32:64], by_hand(hidden, weight))
    assert bool(both[:, :32].isnan().all() and both[:, 64:].isnan().all())


def test_zero_rows_stay_zero_and_eps_counts(interpret: bool, device: torch.device) -> None:
    hidden = torch.zeros(2, 48, device=device)
    hidden[1] = 1e-3
    out = torch.full_like(hidden, NAN)
    rms_norm(hidden, torch.ones(48, device=device), 3e-6, out=out, interpret=interpret)
    assert out[0].tolist() == [0.0] * 48
    torch.testing.assert_close(out[1], torch.full((48,), 0.5, device=device))


@settings(max_examples=20)
@given(num_tokens=st.integers(0, 5), width=st.integers(1, 70), scale=st.sampled_from([1e-3, 1.0, 1e4]), seed=st.integers(0, 99))
def test_kernel_and_reference_agree(
    num_tokens: int, width: int, scale: float, seed: int, interpret: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, residual = (torch.randn(2, num_tokens, width, generator=generator) * scale).to(device)
    weight = torch.randn(width, generator=generator).to(device)
    expected, total = torch.full_like(hidden, NAN), residual.clone()
    add_norm_reference(hidden, total, weight, EPS, out=expected)
    out = torch.full_like(hidden, NAN)
    add_norm(hidden, residual, weight, EPS, out=out, interpret=interpret)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_refused() -> None:
    good: dict[str, Any] = {
        "hidden": torch.zeros(2, 8), "residual": torch.zeros(2, 8), "weight": torch.zeros(8), "eps": EPS,
        "out": torch.zeros(2, 8), "out_aux": torch.zeros(2, 3, 8)[:, 1],
    }
    add_norm(**good)
    for name, bad in (
        ("hidden", torch.zeros(2, 8, dtype=torch.int32)),
        ("residual", torch.zeros(2, 8, dtype=torch.float64)),
        ("weight", torch.zeros(9)),
        ("out", torch.zeros(2, 16)[:, ::2]),
        ("out_aux", torch.zeros(2, 16)[:, ::2]),
    ):
        with pytest.raises(ValueError, match=f"add_norm: {name} is "):
            add_norm(**{**good, name: bad})
        norm_alone: dict[str, Any] = {key: good[key] for key in ("hidden", "weight", "eps", "out")}
        if name in norm_alone:
            with pytest.raises(ValueError, match=f"rms_norm: {name} is "):
                rms_norm(**{**norm_alone, name: bad})
