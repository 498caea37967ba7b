"""gated_group_norm: a gate, then the RMS norm of each group of channels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from batchspec.kernels.mamba2.gated_group_norm import gated_group_norm

EPS = 1e-5
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("groups", "size"), [(3, 20), (1, 700), (8, 64)])
def test_gate_and_norm_of_each_group(
    groups: int, size: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    """z is a slice of wider rows."""
    y, z = torch.randn(2, 7, groups * size, device=device).to(dtype)
    weight = torch.randn(groups * size, device=device).to(dtype)
    wider = F.pad(z, (5, 3), value=float("nan"))[:, 5:-3]
    found = gated_group_norm(y, wider, weight, groups, EPS, interpret=interpret)
    v = (y.double() * z.double() / (1 + (-z.double()).exp())).view(7, groups, size)
    wanted = (v / (v.square().mean(2, keepdim=True) + EPS).sqrt()).flatten(1) * weight.double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_without_a_weight_values_are_gated_alone(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    y, z = torch.randn(2, 7, 60, device=device).to(dtype)
    wanted = y.double() * z.double() / (1 + (-z.double()).exp())
    found = gated_group_norm(y, z, None, 3, EPS, interpret=interpret)
    torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_wrong_shapes_and_dtypes_are_refused(device: torch.device) -> None:
    y, weight = torch.randn(3, 12, device=device), torch.ones(12, device=device)
    for own, z, scale, name in ((y, y[:2], weight, "z"), (y, y, weight.half(), "weight"), (y.T, y.T, weight, "y")):
        with pytest.raises(ValueError, match=f"gated_group_norm: {name} is "):
            gated_group_norm(own, z, scale, 3, EPS)
    with pytest.raises(ValueError, match="gated_group_norm: 12 channels are no multiple of 5 groups"):
        gated_group_norm(y, y, weight, 5, EPS)
