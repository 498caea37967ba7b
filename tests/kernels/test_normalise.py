"""normalise: q and k of length 1, decays and beta apart, and numbers that are not finite kept from other rows."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.gated_delta.layout import DeltaInputs
from batchspec.kernels.gated_delta.normalise import normalise
from tests.kernels.gated_delta_cases import NAN, ODD, SMALL, Row, Sizes, batch_of, random_inputs

# The interpreter cuts bf16 off instead of rounding it.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2**-7, torch.float16: 2**-10}
INF = float("inf")


def copied(inputs: DeltaInputs) -> DeltaInputs:
    return DeltaInputs(**{name: getattr(inputs, name).clone() for name in DeltaInputs.__slots__})


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("sizes", [SMALL, ODD])
def test_lengths_are_divided_out_and_gates_come_apart(
    sizes: Sizes, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    given = random_inputs(69, sizes, device, dtype=dtype)
    given.q[3] = 0.0
    inputs = copied(given)
    alpha, beta = normalise(inputs, batch_of([Row(1, 64, 66), Row(0, 0, 3)], device), interpret=interpret)
    for found, x in ((inputs.q, given.q.double()), (inputs.k, given.k.double())):
        wanted = x / (x.square().sum(2, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=1e-7)
    assert torch.equal(inputs.v, given.v)
    assert torch.equal(beta, given.gates[..., 1])
    torch.testing.assert_close(alpha, given.gates[..., 0].exp(), rtol=1e-6, atol=0)
    assert alpha.is_contiguous()
    assert beta.is_contiguous()


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_a_number_that_is_not_finite_stays_with_its_own_heads(number: float, interpret: bool, device: torch.device) -> None:
    """Key head 1 has value heads 3, 4 and 5. The rows begin at tokens 0 and 80, so another row may read tokens 80 .. 142."""
    given = random_inputs(150, SMALL, device, dtype=torch.bfloat16)
    batch = batch_of([Row(1, 0, 80), Row(0, 64, 70)], device)
    plain = copied(given)
    wanted, _ = normalise(plain, batch, interpret=interpret)
    given.k[70, 1, 5] = given.v[80, 0, 2] = given.v[142, 5, 0] = given.v[143, 4, 1] = number
    inputs = copied(given)
    alpha, _ = normalise(inputs, batch, interpret=interpret)
    for token, head in ((70, 3), (70, 4), (70, 5), (80, 0), (142, 5)):
        assert alpha[token, head].isnan()
        wanted[token, head] = NAN
    assert torch.equal(alpha.nan_to_num(-1.0), wanted.nan_to_num(-1.0))
    for token, head in ((80, 0), (142, 5)):
        plain.v[token, head] = 0.0
    plain.v[143, 4, 1] = number
    plain.k[70, 1] = 0.0
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(inputs, name).nan_to_num(-9.0), getattr(plain, name).nan_to_num(-9.0)), name


def test_shapes_that_do_not_match_are_refused(device: torch.device) -> None:
    inputs = random_inputs(4, SMALL, device)
    batch = batch_of([Row(0, 0, 4)], device)
    with pytest.raises(ValueError, match="normalise: k"):
        normalise(DeltaInputs(q=inputs.q, k=inputs.k.double(), v=inputs.v, gates=inputs.gates), batch)
    with pytest.raises(ValueError, match="5 value heads are no multiple of 2 key heads"):
        normalise(DeltaInputs(q=inputs.q, k=inputs.k, v=inputs.v[:, :5], gates=inputs.gates), batch)
