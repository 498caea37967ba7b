"""rotate_heads: pairs of values are turned in place, and nothing beside them is touched."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.norm_rope.rotate_heads import rotate_heads
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


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    heads, angles = torch.zeros(4, 2, 6, device=device), torch.zeros(4, 3, device=device)
    for name, bad in (("cos", angles.double()), ("sin", angles[:, :2]), ("heads", heads[..., :5])):
        given = {"heads": heads, "cos": angles, "sin": angles, name: bad}
        with pytest.raises(ValueError, match=f"rotate_heads: {name} is"):
            rotate_heads(given["heads"], given["cos"], given["sin"])
    with pytest.raises(ValueError, match="side by side"):
        rotate_heads(torch.zeros(4, 2, 12, device=device)[..., :6], angles, angles)
