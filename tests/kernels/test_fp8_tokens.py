"""Tokens are quantised as rows are, padded for the library, and the activation or norm before them can be in the same launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.gemm.activation import gelu_tanh_and_mul, silu_and_mul
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens, quantise_activation, quantise_tokens
from batchspec.kernels.moe.quantise import Fp8Rows, quantise_rows_reference
from batchspec.kernels.norm_rope.norm import add_norm, rms_norm
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8
from tests.kernels.moe_cases import assert_near

FORMS = [Fp8Form(whole=False), Fp8Form(whole=True), Fp8Form(whole=True, scale=0.03125)]
DTYPES = [torch.float32, torch.bfloat16]


def live(x: Fp8Tokens) -> Fp8Rows:
    return Fp8Rows(x.rows.values[: x.num_tokens], x.rows.scales[:, : x.num_tokens])


def assert_same(found: Fp8Tokens, wanted: Fp8Rows) -> None:
    assert torch.equal(live(found).values.float(), wanted.values.float())
    assert torch.equal(live(found).scales, wanted.scales)


def assert_alike(found: Fp8Tokens, wanted: Fp8Rows) -> None:
    """Up to a last place of bf16, which the interpreter cuts off: the numbers that are meant."""
    means = [rows.values.double() * _spread(rows) for rows in (live(found), wanted)]
    assert_near(means[0], means[1], tolerance=0.02)


def _spread(rows: Fp8Rows) -> Tensor:
    k = rows.values.shape[1]
    return rows.scales.T.repeat_interleave(k if len(rows.scales) == 1 else 128, 1)[:, :k].double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [16, 300, 128 * 37 + 16])
def test_tokens_are_quantised_as_rows(k: int, dtype: torch.dtype, form: Fp8Form, interpret: bool, device: torch.device) -> None:
    """Of all sizes: zeros, tiny numbers, numbers that saturate a given scale. Longer rows are divided over programs."""
    wide = (torch.randn(7, 2 * k, device=device) * torch.logspace(-12, 6, 7, device=device)[:, None]).to(dtype)
    x = wide[:, k:]
    x[2] = 0
    found = quantise_tokens(x, form, interpret=interpret)
    assert_same(found, quantise_rows_reference(x, whole=form.whole, scale=form.scale))
    assert found.num_tokens == 7
    if interpret:
        assert len(found.rows.values) == found.rows.scales.shape[1] == 8
        assert found.rows.values.is_contiguous()
        assert found.rows.scales.is_contiguous()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quotients_are_rounded_as_a_division_rounds_them(
    dtype: torch.dtype, form: Fp8Form, interpret: bool, device: torch.device
) -> None:
    """On a GPU the kernel multiplies by a reciprocal and corrects: many values, of all magnitudes."""
    tokens = 4000 if device.type == "cuda" else 60
    x = torch.randn(tokens, 1040, device=device) * torch.logspace(-30, 30, tokens, device=device)[:, None]
    x[:, ::3] *= torch.logspace(-6, 0, 347, device=device)
    x = x.to(dtype)
    assert_same(quantise_tokens(x, form, interpret=interpret), quantise_rows_reference(x, whole=form.whole, scale=form.scale))


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_inf_are_not_lost_and_change_no_other_row(form: Fp8Form, interpret: bool, device: torch.device) -> None:
    x = torch.randn(4, 300, device=device)
    wanted = quantise_rows_reference(x, whole=form.whole, scale=form.scale)
    x[1, 5], x[2, 299] = torch.nan, torch.inf if form.scale is None else torch.nan
    found = live(quantise_tokens(x, form, interpret=interpret))
    products = found.values.float() * _spread(found).float()
    for row in (1, 2):
        assert products[row].sum().isnan()
    for row in (0, 3):
        assert torch.equal(found.values[row].float(), wanted.values[row].float())
        assert torch.equal(found.scales[:, row], wanted.scales[:, row])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_activation_is_rounded_then_quantised(
    dtype: torch.dtype, gelu: bool, form: Fp8Form, interpret: bool, device: torch.device
) -> None:
    k = 128 * 18 + 16
    gate_up = torch.randn(5, 2 * k + 32, device=device).to(dtype)[:, 16:-16]
    inner = torch.empty(5, k, dtype=dtype, device=device)
    (gelu_tanh_and_mul if gelu else silu_and_mul)(gate_up, out=inner, interpret=interpret)
    found = quantise_activation(gate_up, form, gelu=gelu, interpret=interpret)
    wanted = quantise_rows_reference(inner, whole=form.whole, scale=form.scale)
    (assert_same if dtype is torch.float32 or device.type == "cuda" else assert_alike)(found, wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [80, 300])
def test_the_norm_is_rounded_then_quantised(
    width: int, dtype: torch.dtype, wide_weight: bool, form: Fp8Form, interpret: bool, device: torch.device
) -> None:
    """With and without the residual sum, whose copies are those of `add_norm`."""

    def rows() -> Tensor:
        return torch.randn(5, 2 * width, device=device).to(dtype)[:, width:]

    hidden, residual, aux, own_aux, normed = rows(), rows(), rows(), rows(), rows().contiguous()
    weight = torch.randn(width, device=device).to(torch.float32 if wide_weight else dtype)
    own = residual.clone()
    alike = assert_same if dtype is torch.float32 or device.type == "cuda" else assert_alike
    rms_norm(hidden, weight, 1e-5, out=normed, interpret=interpret)
    alike(norm_fp8(hidden, None, weight, 1e-5, form, interpret=interpret), quantised(normed, form))
    add_norm(hidden, residual, weight, 1e-5, out=normed, out_aux=aux, interpret=interpret)
    found = norm_fp8(hidden, own, weight, 1e-5, form, out_aux=own_aux, interpret=interpret)
    alike(found, quantised(normed, form))
    assert torch.equal(own, residual)
    assert torch.equal(own_aux, aux)
    factor = torch.full((1,), 0.7, device=device).to(dtype)
    add_norm(hidden, residual, weight, 1e-5, out=normed, factor=factor, interpret=interpret)
    found = norm_fp8(hidden, own, weight, 1e-5, form, factor=factor, interpret=interpret)
    alike(found, quantised(normed, form))
    assert torch.equal(own, residual)


def quantised(x: Tensor, form: Fp8Form) -> Fp8Rows:
    return quantise_rows_reference(x, whole=form.whole, scale=form.scale)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    x, weight = torch.zeros(3, 32, device=device), torch.ones(32, device=device)
    scale: Any = Fp8Form(whole=False, scale=0.5)
    with pytest.raises(ValueError, match=r"scale=0\.5 applies to whole rows; pass whole=True, or scale=None"):
        quantise_tokens(x, scale, interpret=True)
    with pytest.raises(ValueError, match=r"norm_fp8: scale=0\.5 applies to whole rows"):
        norm_fp8(x, None, weight, 1e-5, scale, interpret=True)
    with pytest.raises(ValueError, match="quantise_activation: x"):
        quantise_activation(x[:, :31], FORMS[0], gelu=False, interpret=True)
    with pytest.raises(ValueError, match="norm_fp8: residual"):
        norm_fp8(x, x[:2], weight, 1e-5, FORMS[0], interpret=True)
    with pytest.raises(ValueError, match="out_aux and factor are of the sum"):
        norm_fp8(x, None, weight, 1e-5, FORMS[0], out_aux=x.clone(), interpret=True)


def test_no_tokens(device: torch.device) -> None:
    found = quantise_tokens(torch.zeros(0, 300, device=device), FORMS[0], interpret=True)
    assert found.rows.values.shape == (0, 300)
    assert found.rows.scales.shape == (3, 0)
