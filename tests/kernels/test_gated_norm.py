"""gated_norm: the RMS norm of each value head, its weight and its gate, with the roundings of transformers' class."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchspec.kernels.gated_delta.gated_norm import gated_norm
from batchspec.kernels.gated_delta.layout import DeltaColumns, interleaved_columns, split_columns
from tests.kernels.gated_delta_cases import NAN, ODD, SMALL, Sizes

EPS = 1e-6
# Three roundings of the dtype; the interpreter cuts bf16 off instead of rounding it.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float64: 1e-12}


def values_and_gates(num_tokens: int, sizes: Sizes, columns: DeltaColumns, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """o and z [T, HV, DV], and an x of NaN but for z."""
    key_heads, value_heads, _, value_dim = sizes.four
    o, z = torch.randn(2, num_tokens, value_heads, value_dim, dtype=torch.float64, device=device)
    x = torch.full((num_tokens, sizes.channels + value_heads * value_dim), NAN, dtype=torch.float64, device=device)
    for head in range(value_heads):
        group, place = divmod(head, value_heads // key_heads)
        begin = columns.z.offset + group * columns.z.stride + place * value_dim
        x[:, begin : begin + value_dim] = z[:, head]
    return o, z, x


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("columns_of", [split_columns, interleaved_columns])
@pytest.mark.parametrize("sizes", [SMALL, ODD])
def test_norm_and_gate_of_each_head(sizes: Sizes, columns_of, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    columns = columns_of(*sizes.four)
    o, z, x = (values.to(dtype) for values in values_and_gates(7, sizes, columns, device))
    weight = torch.randn(sizes.value_dim, device=device).to(dtype)
    found = gated_norm(o, x, columns, weight, EPS, interpret=interpret)
    o, z, weight = o.double(), z.double(), weight.double()
    wanted = o / (o.square().mean(2, keepdim=True) + EPS).sqrt() * weight * z / (1 + (-z).exp())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted.flatten(1), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 8)


def test_a_weight_in_fp32_is_not_rounded_before_the_gate(interpret: bool, device: torch.device) -> None:
    columns = split_columns(*SMALL.four)
    o, z, x = (values.half() for values in values_and_gates(9, SMALL, columns, device))
    weight = torch.randn(SMALL.value_dim, device=device)
    normed = (o.float() * (o.float().square().mean(2, keepdim=True) + EPS).rsqrt()).half()
    wanted = (normed.float() * weight * z.float() / (1 + (-z.float()).exp())).half()
    found = gated_norm(o, x, columns, weight, EPS, interpret=interpret)
    torch.testing.assert_close(found, wanted.flatten(1), rtol=2**-10, atol=1e-6)


def test_x_may_be_a_slice_of_wider_rows(interpret: bool, device: torch.device) -> None:
    columns = split_columns(*SMALL.four)
    o, _, x = (values.float() for values in values_and_gates(3, SMALL, columns, device))
    weight = torch.ones(SMALL.value_dim, device=device)
    wider = torch.cat((x, x), 1)[:, : x.shape[1]]
    given = (columns, weight, EPS)
    assert torch.equal(gated_norm(o, wider, *given, interpret=interpret), gated_norm(o, x, *given, interpret=interpret))


def test_wrong_shapes_and_dtypes_are_refused(device: torch.device) -> None:
    columns = split_columns(*SMALL.four)
    o, _, x = (values.float() for values in values_and_gates(3, SMALL, columns, device))
    weight = torch.ones(SMALL.value_dim, device=device)
    with pytest.raises(ValueError, match="gated_norm: x"):
        gated_norm(o, x[:2], columns, weight, EPS)
    with pytest.raises(ValueError, match="gated_norm: weight"):
        gated_norm(o, x, columns, weight.half(), EPS)
