"""Acceptance of drafts that is made up, for benchmarks: rows of several kinds, whose drafts are accepted at given rates.

A row's kind is the remainder of its noise key. A draft's confidence is the logit of its rate with noise, as that of a real
drafter, which knows something of the outcome and not all; the outcome does not depend on the noise. The noise depends on the row
and its length alone, so all ranks have the same.
Legend: N kinds, R rows, K draft_len.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.kernels.sampling.argmax import CONFIDENCE_BINS
from batchspec.kernels.sampling.counter_rng import uniform_reference

NOISE = 0.7
"""Standard deviation of the Gaussian noise in the logit of a rate."""
MOST_DRAFTS = 64


class SimulatedAcceptance:
    """Rates of every kind of row, for every draft length."""

    def __init__(self, kinds: Sequence[Sequence[float]], max_len: int, device: torch.device) -> None:
        """kinds: of each kind the unconditional rates by position; missing ones are 0"""
        self._rates = [
            torch.tensor([conditional_rates(rates, draft_len) for rates in kinds], dtype=torch.float32, device=device)
            for draft_len in range(max_len + 1)
        ]
        self._logits = self._rates[max_len].logit(eps=1e-3)

    def rates(self, draft_len: int) -> Tensor | None:
        """float32 [N, K] rates at which each draft is accepted if all before it were; None for K = 0."""
        return self._rates[draft_len] if draft_len else None

    def write_confidence(self, rows: DeviceBatch, out_confidence: Tensor) -> None:
        """Write a confidence int32 [R, K] in the drafts of each row, in bins as those of `argmax`."""
        num_rows, draft_len = out_confidence.shape
        logits = self._logits[rows.keys[:num_rows] % len(self._logits), :draft_len]
        noise = _gaussian(rows.keys[:num_rows], rows.num_tokens[:num_rows], draft_len)
        bins = (4 * (noise.mul_(NOISE).add_(logits) + 3)).floor_()
        out_confidence.copy_(bins.clamp_(min=0, max=CONFIDENCE_BINS - 1))


def _gaussian(keys: Tensor, num_tokens: Tensor, draft_len: int) -> Tensor:
    """fp32 [R, K] of mean 0 and variance 1, by row, its length and the draft's place. Positions are negative, those of outcomes
    (`kernels/rounds/accept.py`) are not."""
    draws = num_tokens.long()[:, None] * MOST_DRAFTS + torch.arange(draft_len, device=keys.device)
    radius, angle = (uniform_reference(keys[:, None], -1 - 2 * draws - part) for part in (0, 1))
    return (-2 * torch.log1p(-radius)).sqrt_() * torch.cos(2 * math.pi * angle)


def conditional_rates(rates: Sequence[float], draft_len: int) -> list[float]:
    """The rate at which each of `draft_len` drafts is accepted if all before it were, from unconditional rates."""
    found, before = list[float](), 1.0
    for rate in rates[:draft_len]:
        found.append(rate / before if before > 0 else 0.0)
        before = rate
    return found + [0.0] * (draft_len - len(found))
