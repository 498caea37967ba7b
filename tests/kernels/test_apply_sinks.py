"""apply_sinks: attention with one more key of each head, from attention without it and its denominators."""

from __future__ import annotations

import math

import pytest
import torch

from batchspec.kernels.attention.apply_sinks import apply_sinks


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 64), (37, 6, 40), (130, 3, 128), (5, 7, 256)])
@pytest.mark.parametrize(("dtype", "base_2", "by_head"), [(torch.bfloat16, False, True), (torch.float16, True, False)])
def test_the_sink_joins_the_denominator(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, base_2: bool, by_head: bool, interpret: bool, device: torch.device
) -> None:
    out = torch.randn(tokens, heads, dim, device=device).to(dtype)
    mass, sinks = torch.rand(tokens, heads, device=device) * 9 + 0.01, torch.randn(heads, device=device) * 3
    expected = out.double() * (mass.double() / (mass.double() + sinks.double().exp()))[:, :, None]
    lse = mass.log2() if base_2 else mass.log()
    lse = lse.t().contiguous().t() if by_head else lse
    apply_sinks(out, lse, sinks, base_2=base_2, interpret=interpret)
    half_ulp = 2**-10 if dtype is torch.float16 else 2**-7 if interpret else 2**-8  # the interpreter cuts bf16 off
    torch.testing.assert_close(out.double(), expected, rtol=half_ulp, atol=1e-6)


def test_extremes(interpret: bool, device: torch.device) -> None:
    """A row without keys, a sink without weight, one with all of it, and NaN, which stays in its line."""
    out = torch.ones(2, 4, 16, device=device).bfloat16()
    lse = torch.tensor([[-math.inf, 0.0, 0.0, math.nan], [0.0, 90.0, -90.0, 0.0]], device=device)
    apply_sinks(out, lse, torch.tensor([0.0, -math.inf, 900.0, 0.0], device=device), interpret=interpret)
    expected = torch.tensor([[0.0, 1.0, 0.0, math.nan], [0.5, 1.0, 0.0, 0.5]], device=device)
    assert torch.equal(out.float().nan_to_num(-1), expected.nan_to_num(-1)[:, :, None].expand(2, 4, 16))


@pytest.mark.parametrize("change", ["dtype of lse", "shape of lse", "sinks", "strides"])
def test_other_arguments_are_refused(change: str, interpret: bool, device: torch.device) -> None:
    out, lse, sinks = (torch.zeros(size, device=device) for size in ((3, 4, 8), (3, 4), (4,)))
    out = out.bfloat16()
    if change == "dtype of lse":
        lse = lse.half()
    elif change == "shape of lse":
        lse = lse.t()
    elif change == "sinks":
        sinks = sinks[:3]
    else:
        out = out.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="apply_sinks"):
        apply_sinks(out, lse, sinks, interpret=interpret)
