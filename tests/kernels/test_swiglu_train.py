"""swiglu_train: silu(gate) * up of two tensors, and its backward pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchspec.kernels.train.swiglu_train import (
    BLOCK,
    swiglu_train,
    swiglu_train_backward,
    swiglu_train_backward_reference,
    swiglu_train_reference,
)

# Two roundings of the dtype; the interpreter cuts bf16 off instead of rounding it.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float64: 1e-12}
NAN = float("nan")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1,), (3, 33), (2, BLOCK), (3, BLOCK + 8)])
def test_values_and_gradients_are_those_of_autograd_in_fp64(
    shape: tuple[int, ...], dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    opened, up, grad = ((torch.randn(shape, device=device) * 3).to(dtype) for _ in range(3))
    exact = [tensor.double().requires_grad_() for tensor in (opened, up)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    expected.backward(grad.double())
    out, out_gate, out_up = (torch.full_like(up, NAN) for _ in range(3))
    swiglu_train(opened, up, out=out, interpret=interpret)
    swiglu_train_backward(opened, up, grad, out_gate=out_gate, out_up=out_up, interpret=interpret)
    for found, wanted in ((out, expected), (out_gate, exact[0].grad), (out_up, exact[1].grad)):
        assert wanted is not None
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=20)
@example(count=78, scale=100.0, seed=93)  # a gate near the minimum of silu
@given(count=st.integers(0, 300), scale=st.sampled_from([0.1, 1.0, 100.0]), seed=st.integers(0, 99))
def test_kernel_and_reference_agree(count: int, scale: float, seed: int, interpret: bool, device: torch.device) -> None:
    given_ = (torch.randn(3, count, generator=torch.Generator().manual_seed(seed)) * scale).to(device)
    found, wanted = torch.full((2, 3, count), NAN, device=device)
    swiglu_train(given_[0], given_[1], out=found[0], interpret=interpret)
    swiglu_train_backward(*given_, out_gate=found[1], out_up=found[2], interpret=interpret)
    swiglu_train_reference(given_[0], given_[1], out=wanted[0])
    swiglu_train_backward_reference(*given_, out_gate=wanted[1], out_up=wanted[2])
    # The gradient of the gate is a sum of two terms that cancel near the minimum of silu: what is left has the terms' error.
    gate, up, grad = (tensor.double() for tensor in given_)
    terms = wanted.double().abs()
    terms[1] = (grad * up * gate.sigmoid()).abs() * (1 + gate.abs() * (-gate).sigmoid())
    assert ((found.double() - wanted.double()).abs() <= 1e-6 + 1e-5 * terms).all()


def test_wrong_arguments_are_refused() -> None:
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"swiglu_train: up is float32 \[4, 4\]"):
        swiglu_train(x, torch.zeros(4, 4), out=x)
    with pytest.raises(ValueError, match="swiglu_train_backward: grad is float64"):
        swiglu_train_backward(x, x, x.double(), out_gate=x, out_up=x)
