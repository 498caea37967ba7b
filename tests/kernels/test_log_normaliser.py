"""log_normaliser: torch's logsumexp, with the bits of the row alone."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.sampling import log_normaliser as module
from batchspec.kernels.sampling.log_normaliser import log_normaliser


@pytest.mark.parametrize("vocab", [1, 17, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_logsumexp(vocab: int, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    wide = torch.randn(5, vocab + 3, dtype=dtype, device=device) * 9 + torch.tensor(
        [[0], [500], [-500], [1e4], [0]], device=device
    )
    logits = wide[:, 1 : vocab + 1]
    out = torch.full((5,), torch.nan, dtype=dtype, device=device)
    log_normaliser(logits, out=out, interpret=interpret)
    torch.testing.assert_close(out, logits.double().logsumexp(1).to(dtype), atol=1e-5, rtol=1e-6)


def test_logits_that_are_not_finite(interpret: bool, device: torch.device) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, -inf, 1.0], [-inf, -inf, -inf], [inf, 0.0, 1.0], [nan, 0.0, 1.0]], device=device)
    out = torch.zeros(4, device=device)
    log_normaliser(logits, out=out, interpret=interpret)
    torch.testing.assert_close(out, torch.tensor([1.31326169, -inf, inf, nan], device=device), equal_nan=True)


def test_a_row_has_the_same_bits_among_any_others(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 128)
    logits = torch.randn(40, 1000, device=device)
    whole, some, one = (torch.empty(count, device=device) for count in (40, 7, 1))
    for rows, out in ((logits, whole), (logits[20:27], some), (logits[26:27], one)):
        log_normaliser(rows, out=out, interpret=True)
    assert torch.equal(some.view(torch.int32), whole[20:27].view(torch.int32))
    assert torch.equal(one.view(torch.int32), whole[26:27].view(torch.int32))


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"log_normaliser: out is float32 \[3\]"):
        log_normaliser(torch.zeros(2, 5, device=device), out=torch.zeros(3, device=device))
