"""The sum of a token's experts, alone and with the residual sum and the next norm."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.gemm.fp8_tokens import Fp8Form, quantise_tokens
from batchspec.kernels.moe.combine import combine, combine_norm, combine_norm_reference, combine_reference
from batchspec.kernels.moe.combine_fp8 import combine_fp8, combine_fp8_reference
from tests.kernels.moe_cases import assert_near

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(1, 1, 16), (5, 3, 72), (3, 8, 130)])
def test_weighted_sum_in_slot_order(
    tokens: int, top_k: int, width: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    y = torch.randn(tokens * top_k, width, device=device).to(dtype)
    weights = torch.rand(tokens, top_k, device=device, dtype=torch.promote_types(dtype, torch.float32))
    wide = torch.full((tokens, 2 * width), torch.nan, dtype=dtype, device=device)
    combine(y, weights, out=wide[:, width:], interpret=interpret)
    wanted = torch.einsum("tk,tkh->th", weights.double(), y.view(tokens, top_k, width).double())
    torch.testing.assert_close(wide[:, width:].double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(combine_reference(y, weights).double(), wanted, rtol=1e-5, atol=1e-5)
    assert wide[:, :width].isnan().all()


@pytest.mark.parametrize("fp32_gain", [False, True])
@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_and_norm(dtype: torch.dtype, aux: bool, fp32_gain: bool, interpret: bool, device: torch.device) -> None:
    tokens, top_k, width = 6, 4, 90
    y = torch.randn(tokens * top_k, width, device=device).to(dtype)
    weights = torch.rand(tokens, top_k, device=device)
    gain = torch.randn(width, device=device).to(torch.float32 if fp32_gain else dtype)
    residual = torch.randn(tokens, width, device=device).to(dtype)
    found, wanted = residual.clone(), residual.clone()
    out, expected, copy = (torch.full_like(residual, torch.nan) for _ in range(3))
    combine_norm(y, weights, found, gain, 1e-5, out=out, out_aux=copy if aux else None, interpret=interpret)
    combine_norm_reference(y, weights, wanted, gain, 1e-5, out=expected)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2  # the interpreter cuts bf16 off
    assert_near(found, wanted, tolerance=tolerance)
    assert_near(out, expected, tolerance=tolerance)
    assert torch.equal(copy, found) if aux else copy.isnan().all()


def test_rows_of_weight_0_are_not_read(interpret: bool, device: torch.device) -> None:
    """The products do not write the rows of dead tokens; NaN in a row that counts, or as a weight, is not lost."""
    y, weights = torch.randn(8, 20, device=device), torch.tensor([[0.7, 0.3], [0.0, 0.0], [0.5, 0.0], [0.2, 0.8]], device=device)
    y[[2, 3, 5]] = torch.nan
    out = torch.full((4, 20), 7.0, device=device)
    combine(y, weights, out=out, interpret=interpret)
    torch.testing.assert_close(out[0], 0.7 * y[0] + 0.3 * y[1])
    assert (out[1] == 0).all()
    assert torch.equal(out[2], 0.5 * y[4])
    torch.testing.assert_close(combine_reference(y, weights), out)
    y[7], weights[0, 1] = torch.nan, torch.nan
    combine(y, weights, out=out, interpret=interpret)
    assert out[[0, 3]].isnan().all()
    assert combine_reference(y, weights)[[0, 3]].isnan().all()


def test_wrong_arguments_are_refused() -> None:
    y, weights, out = torch.zeros(6, 8), torch.zeros(3, 2), torch.zeros(3, 8)
    with pytest.raises(ValueError, match="combine: y"):
        combine(y[:5], weights, out=out)
    with pytest.raises(ValueError, match="combine: weights"):
        combine(y, weights.double(), out=out)
    with pytest.raises(ValueError, match="combine_norm: residual"):
        combine_norm(y, weights, out.bfloat16(), torch.zeros(8), 1e-5, out=out)


@pytest.mark.parametrize("form", [Fp8Form(whole=False), Fp8Form(whole=True), Fp8Form(whole=True, scale=0.02)])
@pytest.mark.parametrize("width", [90, 300])
@pytest.mark.parametrize(
    ("dtype", "gain_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_a_quantised_norm_has_the_bits_of_two_launches(
    dtype: torch.dtype, gain_dtype: torch.dtype, width: int, form: Fp8Form, interpret: bool, device: torch.device
) -> None:
    """Also of what is left in the residual and copied for a drafter; a row of NaN stays one that is not finite."""
    tokens, top_k = 6, 3
    y = torch.randn(tokens * top_k, width, device=device).to(dtype)
    y[3 * top_k] = torch.nan
    weights, gain = torch.rand(tokens, top_k, device=device), torch.randn(width, device=device).to(gain_dtype)
    wide = torch.randn(tokens, 2 * width, device=device).to(dtype)
    residual, expected = wide.clone()[:, width:], wide.clone()[:, width:]
    copy, out = torch.zeros(tokens, width, dtype=dtype, device=device), torch.empty(tokens, width, dtype=dtype, device=device)
    found = combine_fp8(y, weights, residual, gain, 1e-5, form, out_aux=copy, interpret=interpret)
    combine_norm(y, weights, expected, gain, 1e-5, out=out, interpret=interpret)
    wanted = quantise_tokens(out, form, interpret=interpret)
    live = [0, 1, 2, 4, 5]
    assert found.num_tokens == tokens
    assert torch.equal(found.rows.values[live].float(), wanted.rows.values[live].float())
    assert torch.equal(found.rows.scales[:, live], wanted.rows.scales[:, live])
    assert not (found.rows.values[3].float().sum() * found.rows.scales[:, 3].sum()).isfinite()
    torch.testing.assert_close(residual, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(copy, expected, rtol=0, atol=0, equal_nan=True)
    reference = combine_fp8_reference(y, weights, wide.clone()[:, width:], gain, 1e-5, form)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-4  # the interpreter cuts bf16 off
    torch.testing.assert_close(found.rows.scales[:, live], reference.rows.scales[:, live], rtol=tolerance, atol=0)


def test_a_quantised_norm_refuses_other_shapes(device: torch.device) -> None:
    y, weights, residual = torch.zeros(6, 20, device=device), torch.ones(3, 2, device=device), torch.zeros(3, 20, device=device)
    form = Fp8Form(whole=False)
    with pytest.raises(ValueError, match="combine_fp8: weight is"):
        combine_fp8(y, weights, residual, torch.ones(19, device=device), 1e-5, form, interpret=True)
    with pytest.raises(ValueError, match="combine_fp8: y is"):
        combine_fp8(y[:5], weights, residual, torch.ones(20, device=device), 1e-5, form, interpret=True)
    with pytest.raises(ValueError, match="combine_fp8: out_aux"):
        combine_fp8(y, weights, residual, torch.ones(20, device=device), 1e-5, form, out_aux=residual[:2], interpret=True)
    with pytest.raises(ValueError, match=r"combine_fp8: scale=0\.5 applies to whole rows"):
        combine_fp8(y, weights, residual, torch.ones(20, device=device), 1e-5, Fp8Form(False, 0.5), interpret=True)
    none = combine_fp8(y[:0], weights[:0], residual[:0], torch.ones(20, device=device), 1e-5, form, interpret=True)
    assert none.num_tokens == 0
