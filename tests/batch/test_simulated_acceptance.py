"""Simulated acceptance: a draft's confidence is its rate with noise, and tells nothing of its outcome."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.engine.rounds.simulated_acceptance import NOISE, SimulatedAcceptance
from batchspec.kernels.sampling.argmax import CONFIDENCE_BINS
from batchspec.kernels.sampling.counter_rng import uniform_reference
from tests.helpers.engines import DEVICE, VOCAB, packed

ROWS, K = 4096, 2
RATES = ((0.5, 0.25), (0.8, 0.32))
LOGITS = torch.tensor([[0.0, 0.0], [math.log(4), math.log(2 / 3)]])
"""Of each kind: those of the rate of the first draft, and of the second one if the first was accepted."""


def bins_of(rows: DeviceBatch) -> Tensor:
    found = torch.full((ROWS, K), -1, dtype=torch.int32, device=DEVICE)
    SimulatedAcceptance(RATES, K, DEVICE).write_confidence(rows, found)
    return found


def some_rows() -> DeviceBatch:
    rows = DeviceBatch.allocate(packed(ROWS, num_verified=K), vocab_size=VOCAB, device=DEVICE)
    rows.keys.copy_(torch.arange(ROWS) - 7)
    rows.num_tokens.copy_(torch.arange(ROWS) % 30)
    return rows


def test_a_confidence_is_the_logit_of_the_rate_with_gaussian_noise() -> None:
    rows = some_rows()
    middle = (bins_of(rows).double() + 0.5) / 4 - 3
    for kind, logits in enumerate(LOGITS):
        own = middle[rows.keys % 2 == kind]
        inside = (logits - 3 * NOISE > -3).all() and (logits + 3 * NOISE < CONFIDENCE_BINS / 4 - 3).all()
        assert inside, "few are cut off at the first or last bin"
        assert (own.mean(0).cpu() - logits).abs().max() < 5 * NOISE / len(own) ** 0.5 + 0.01
        assert (own.std(0).cpu() - NOISE).abs().max() < 0.05


def test_it_depends_on_the_row_and_its_length_alone() -> None:
    """Not on earlier draws, which other ranks may not have made."""
    rows = some_rows()
    first = bins_of(rows)
    torch.randn(5, device=DEVICE)
    assert bins_of(rows).equal(first)
    rows.num_tokens.add_(1)
    assert (bins_of(rows) != first).float().mean() > 0.5, "the next round has other noise"


def test_it_tells_nothing_of_the_outcome() -> None:
    """Of drafts with one rate, those with high confidence are accepted as often as the others."""
    rows = some_rows()
    own = rows.keys % 2 == 0
    outcome = uniform_reference(rows.keys, rows.num_tokens.long()) < RATES[0][0]  # as in kernels/rounds/accept.py
    sure = bins_of(rows)[:, 0] >= 4 * 3
    shares = [float(outcome[own & half].float().mean()) for half in (sure, ~sure)]
    assert abs(shares[0] - shares[1]) < 5 * (0.25 * 4 / own.sum().item()) ** 0.5
