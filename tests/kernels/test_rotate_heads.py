"""rotate_heads: heads are normed, pairs of their values are turned, in place, and nothing beside them is touched."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.norm_rope.norm import rms_norm_reference
from batchspec.kernels.norm_rope.rotate_heads import norm_heads, rotate_heads
from tests.kernels.covering import covering


@pytest.mark.parametrize(
    ("dtype", "dim", "count"), covering([torch.float32, torch.bfloat16, torch.float64], [72, 64, 6], [1, 3, 32], one_in=2)
)
def test_pairs_are_turned_by_their_angles(
    dtype: torch.dtype, dim: int, count: int, interpret: bool, device: torch.device
) -> None:
    wide = torch.randn(5, count + 2, dim, device=device).to(dtype)
    before, angles = wide.clone(), torch.rand(5, dim // 2, device=device) * 7
    rotate_heads(wide[:, 1:-1], angles.cos(), angles.sin(), interpret=interpret)
    first, second = before[:, 1:-1].double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None].to(torch.complex128)
    atol = 0.04 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(wide[:, 1:-1].double(), torch.cat((turned.real, turned.imag), -1), atol=atol, rtol=0)
    assert torch.equal(wide[:, [0, -1]], before[:, [0, -1]])


@pytest.mark.parametrize(
    ("dtype", "wide", "dim", "count"),
    covering([torch.float32, torch.bfloat16, torch.float64], [False, True], [72, 64, 6], [1, 3, 32], one_in=2),
)
def test_heads_are_normed_before_they_are_turned(
    dtype: torch.dtype, wide: bool, dim: int, count: int, interpret: bool, device: torch.device
) -> None:
    """With the norm, the product with its weight and the rotation each rounded as by kernels of their own."""
    tokens = torch.randn(5, count + 2, dim, device=device).to(dtype)
    weight = torch.randn(dim, device=device).to(torch.promote_types(dtype, torch.float32) if wide else dtype)
    angles = torch.rand(5, dim // 2, device=device) * 7
    alone, turned = tokens.clone(), tokens.clone()
    norm_heads(alone[:, 1:-1], weight, 1e-6, interpret=interpret)
    rotate_heads(turned[:, 1:-1], angles.cos(), angles.sin(), weight=weight, eps=1e-6, interpret=interpret)
    expected = torch.empty(5 * count, dim, dtype=dtype, device=device)
    rms_norm_reference(tokens[:, 1:-1].reshape(-1, dim), weight, 1e-6, out=expected)
    of_dtype = {torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float64: 1e-12}[dtype]  # the interpreter cuts bf16 off
    torch.testing.assert_close(alone[:, 1:-1].reshape(-1, dim), expected, rtol=of_dtype, atol=of_dtype / 10)
    for found in (alone, turned):
        assert torch.equal(found[:, [0, -1]], tokens[:, [0, -1]])
    rotate_heads(alone[:, 1:-1], angles.cos(), angles.sin(), interpret=interpret)
    if interpret or dtype == torch.bfloat16:
        assert torch.equal(turned, alone)
    else:  # of two products and their sum a compiler rounds one product or the other
        bound = 4 * torch.finfo(dtype).eps * float(alone.abs().max())
        torch.testing.assert_close(turned, alone, rtol=0.0, atol=bound)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    heads, angles = torch.zeros(4, 2, 6, device=device), torch.zeros(4, 3, device=device)
    for name, bad in (("cos", angles.double()), ("sin", angles[:, :2]), ("heads", heads[..., :5])):
        given = {"heads": heads, "cos": angles, "sin": angles, name: bad}
        with pytest.raises(ValueError, match=f"rotate_heads: {name} is"):
            rotate_heads(given["heads"], given["cos"], given["sin"])
    with pytest.raises(ValueError, match="norm_heads: weight is"):
        norm_heads(heads, angles[0], 1e-6)
    with pytest.raises(ValueError, match="side by side"):
        rotate_heads(torch.zeros(4, 2, 12, device=device)[..., :6], angles, angles)
