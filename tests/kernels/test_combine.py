"""The sum of a token's experts, alone and with the residual sum and the next norm."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.moe.combine import combine, combine_norm, combine_norm_reference, combine_reference
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
    assert torch.equal(combine_reference(y, weights), out)
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
