"""soft_cross_entropy: cross entropy with a teacher, its gradient in place of the logits, and rows of weight 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from batchspec.kernels.train.soft_cross_entropy import BLOCK, soft_cross_entropy

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def learn(logits: Tensor, probs: Tensor, weights: Tensor, interpret: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Loss in nats and hits of each row, and the gradient."""
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    nats, hits = (torch.full((len(logits),), -7.0, dtype=wide, device=logits.device) for _ in range(2))
    gradient = logits.clone()
    soft_cross_entropy(gradient, probs, weights, probs.argmax(-1), out_loss=nats, out_hits=hits, interpret=interpret)
    return nats, hits, gradient


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("vocab", [1, 17, 300, BLOCK, 2 * BLOCK + 77])
def test_loss_hits_and_gradient_are_those_of_autograd(
    vocab: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    logits = (torch.randn(4, vocab, device=device) * 5).to(dtype)
    probs = torch.randn(4, vocab, dtype=torch.float64, device=device).softmax(-1)
    probs[1] = logits[1].double().softmax(-1)  # agrees on the likeliest
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0], device=device)
    nats, hits, gradient = learn(logits, probs, weights, interpret)
    x = logits.detach().double().clone().requires_grad_()
    expected = cross_entropy(x, probs, reduction="none") * weights
    expected.sum().backward()
    assert x.grad is not None
    tolerance = TOLERANCE[dtype]
    assert torch.allclose(nats.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    assert torch.allclose(gradient.double(), x.grad, atol=tolerance, rtol=tolerance)
    agree = logits.float().argmax(-1) == probs.argmax(-1)
    assert hits.tolist() == (agree * weights).tolist()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("vocab", [1, 300, 2 * BLOCK + 77])
def test_a_share_of_the_distance_joins_the_loss(vocab: int, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    logits = (torch.randn(4, vocab, device=device) * 3).to(dtype)
    probs = (torch.randn(4, vocab, dtype=torch.float64, device=device) * 3).softmax(-1)
    weights, share = torch.tensor([1.0, 0.5, 0.0, 2.0], device=device), 0.75
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    nats, hits, apart = (torch.full((4,), -7.0, dtype=wide, device=device) for _ in range(3))
    gradient = logits.clone()
    outs: dict[str, Any] = {"out_loss": nats, "out_hits": hits, "out_distance": apart}
    soft_cross_entropy(gradient, probs, weights, probs.argmax(-1), **outs, share=share, interpret=interpret)
    x = logits.detach().double().clone().requires_grad_()
    distance = (x.softmax(-1) - probs).abs().sum(-1)
    expected = ((1 - share) * cross_entropy(x, probs, reduction="none") + share * distance) * weights
    expected.sum().backward()
    assert x.grad is not None
    assert torch.allclose(nats.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    assert torch.allclose(apart.double(), distance.detach() * (weights != 0), atol=1e-5)
    assert torch.allclose(gradient.double(), x.grad, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert hits.tolist() == ((logits.float().argmax(-1) == probs.argmax(-1)) * weights).tolist()
    with pytest.raises(ValueError, match="soft_cross_entropy: share without out_distance; give both"):
        soft_cross_entropy(gradient, probs, weights, probs.argmax(-1), out_loss=nats, out_hits=hits, share=share)


def test_a_row_of_weight_0_is_skipped_whatever_it_holds(interpret: bool, device: torch.device) -> None:
    logits = torch.randn(3, 50, device=device)
    probs = torch.randn(3, 50, device=device).softmax(-1)
    if interpret:  # the reference multiplies
        logits[1] = torch.nan
    nats, hits, gradient = learn(logits, probs, torch.tensor([1.0, 0.0, 1.0], device=device), interpret)
    assert nats[1] == hits[1] == 0
    assert not gradient[1].any()
    assert torch.isfinite(nats).all()


def test_a_tie_goes_to_the_lowest_column(interpret: bool, device: torch.device) -> None:
    logits = torch.zeros(2, BLOCK + 9, device=device)
    logits[:, [5, BLOCK + 5]] = 1.0
    probs = torch.zeros_like(logits)
    probs[0, 5] = probs[1, BLOCK + 5] = 1.0
    assert learn(logits, probs, torch.ones(2, device=device), interpret)[1].tolist() == [1.0, 0.0]


def test_no_rows_is_no_work(interpret: bool, device: torch.device) -> None:
    nothing = torch.empty(0, 5, device=device)
    assert learn(nothing, nothing, torch.empty(0, device=device), interpret)[0].shape == (0,)


def test_wrong_arguments_are_refused() -> None:
    logits, row = torch.zeros(2, 8), torch.zeros(2)
    best = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"soft_cross_entropy: probs is float32 \[2, 7\].*must be .* \[2, 8\]"):
        soft_cross_entropy(logits, torch.zeros(2, 7), row, best, out_loss=row, out_hits=row)
    with pytest.raises(ValueError, match=r"soft_cross_entropy: out_hits is float64"):
        soft_cross_entropy(logits, logits, row, best, out_loss=row, out_hits=row.double())
    with pytest.raises(ValueError, match=r"soft_cross_entropy: logits is float32 \[2, 8\] with strides \[1, 2\]"):
        soft_cross_entropy(torch.zeros(8, 2).t(), logits, row, best, out_loss=row, out_hits=row)
