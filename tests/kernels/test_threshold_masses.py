"""threshold_masses: numbers and masses of logits above 16 thresholds, and keys in the order of the numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.sampling.threshold_masses import BLOCK, LOWEST, THRESHOLDS, keys_of, threshold_masses, values_of

INF, NAN = float("inf"), float("nan")


def masses(logits: Tensor, low: Tensor, shift: int, interpret: bool, **options: Tensor) -> Tensor:
    out = torch.full((len(logits), THRESHOLDS), NAN, device=logits.device)
    threshold_masses(logits, low, shift, out=out, interpret=interpret, **options)
    return out


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20))
def test_keys_have_the_order_of_the_numbers(numbers: list[float]) -> None:
    x = torch.tensor(numbers)
    keys = keys_of(x)
    assert torch.equal(keys[:, None] < keys, x[:, None] < x)
    assert torch.equal(values_of(keys), x)
    assert (keys > LOWEST).all()
    assert values_of(torch.tensor([LOWEST], dtype=torch.int32)).tolist() == [-INF]


@settings(max_examples=20)
@given(width=st.sampled_from([1, 5, 100, BLOCK + 7]), shift=st.sampled_from([0, 4, 24, 28]), seed=st.integers(0, 99))
def test_numbers_and_masses_are_those_of_a_plain_loop(
    width: int, shift: int, seed: int, interpret: bool, device: torch.device
) -> None:
    noise = torch.Generator().manual_seed(seed)
    wide = torch.randn(2, 2 * width, generator=noise).to(device)
    logits = wide[:, width:]
    low = keys_of(logits[:, 0].contiguous()) - (3 << shift) if shift < 28 else torch.full((2,), LOWEST, device=device).int()
    top, temperature = logits.amax(1), torch.tensor([0.5, 2.0], device=device)
    numbers = masses(logits, low, shift, interpret)
    found = masses(logits, low, shift, interpret, top=top, temperature=temperature)
    keys = keys_of(logits.contiguous())
    for row in range(2):
        for place in range(THRESHOLDS):
            above = logits[row][keys[row] >= int(low[row]) + (place << shift)].double()
            mass = float(((above - float(top[row])) / float(temperature[row])).exp().sum())
            assert float(numbers[row, place]) == len(above)
            assert math.isclose(float(found[row, place]), mass, rel_tol=1e-5, abs_tol=1e-6)
    assert (found.diff(dim=1) <= 0).all(), "larger thresholds have no more mass"


def test_what_is_not_finite_counts_nothing_and_minus_zero_is_zero(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[NAN, INF, -INF, 1.0, -0.0, 0.0, -1.0]], device=device)
    low, one = torch.full((1,), LOWEST, dtype=torch.int32, device=device), torch.ones(1, device=device)
    assert masses(logits, low, 0, interpret).tolist() == [[4.0] * 16]
    assert masses(logits, torch.zeros_like(low), 0, interpret).tolist() == [[3.0] + [1.0] * 15]
    found = masses(logits, low, 0, interpret, top=one, temperature=one)
    torch.testing.assert_close(found[0, 0].item(), 1 + 2 * math.exp(-1) + math.exp(-2))


def test_no_rows_is_no_work(interpret: bool, device: torch.device) -> None:
    assert masses(torch.empty(0, 9, device=device), torch.empty(0, dtype=torch.int32, device=device), 28, interpret).numel() == 0


def test_wrong_arguments_are_refused() -> None:
    logits, low, out = torch.zeros(2, 9), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 16)
    with pytest.raises(ValueError, match=r"threshold_masses: logits is float64"):
        threshold_masses(logits.double(), low, 0, out=out)
    with pytest.raises(ValueError, match=r"threshold_masses: low is int64"):
        threshold_masses(logits, low.long(), 0, out=out)
    with pytest.raises(ValueError, match=r"threshold_masses: out is float32 \[2, 15\]"):
        threshold_masses(logits, low, 0, out=out[:, :15])
    with pytest.raises(ValueError, match=r"threshold_masses: top is float32 \[1\]"):
        threshold_masses(logits, low, 0, out=out, top=out[0, :1], temperature=out[:, 0].contiguous())
