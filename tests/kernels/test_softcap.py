"""softcap: cap * tanh(logit / cap) of every logit, in place."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.sampling.softcap import softcap


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (2, 4096), (5, 1700)])
def test_logits_are_capped(shape: tuple[int, int], cap: float, interpret: bool, device: torch.device) -> None:
    logits = torch.randn(shape, device=device) * torch.logspace(-4, 1, shape[1], device=device) * cap
    exact = cap * torch.tanh(logits.double() / cap)
    softcap(logits, cap, interpret=interpret)
    torch.testing.assert_close(logits.double(), exact, rtol=6e-7, atol=0)


def test_order_is_kept_where_the_two_formulas_meet(interpret: bool, device: torch.device) -> None:
    logits = torch.linspace(0.299, 0.301, 20_000, device=device).view(1, -1)
    softcap(logits, 1.0, interpret=interpret)
    assert logits.diff().min() > -2e-7


def test_infinities_are_capped_and_nan_stays(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[float("inf"), float("-inf"), float("nan"), 3e38, 0.0]], device=device)
    softcap(logits, 20.0, interpret=interpret)
    assert logits[0, [0, 1, 3, 4]].tolist() == [20.0, -20.0, 20.0, 0.0]
    assert logits[0, 2].isnan()


def test_doubles_are_capped_in_plain_torch(device: torch.device) -> None:
    logits = torch.tensor([[1.0, -40.0]], dtype=torch.float64, device=device)
    softcap(logits, 30.0)
    assert torch.equal(logits, 30 * torch.tanh(torch.tensor([[1.0, -40.0]], dtype=torch.float64, device=device) / 30))


def test_logits_that_are_not_contiguous_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="softcap: logits"):
        softcap(torch.zeros(4, 6, device=device)[:, :5], 30.0, interpret=device.type != "cuda")
