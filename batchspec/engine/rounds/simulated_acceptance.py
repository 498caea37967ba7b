"""Acceptance of drafts that is made up, for benchmarks: rows of several kinds, whose drafts are accepted at given rates.

A row's kind is the remainder of its noise key. A draft's confidence is the logit of its rate with noise, as that of a real
drafter, which knows something of the outcome and not all; the outcome does not depend on the noise. The noise depends on the row
and its length alone, so all ranks have the same.
Legend: N kinds, R rows, K draft_len.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.kernels.sampling.argmax import CONFIDENCE_BINS

NOISE = 0.7
"""Standard deviation of the Gaussian noise in the logit of a rate."""
NUM_DRAWS = 1 << 16
ROW_STEP, TOKEN_STEP, PLACE_STEP = 31765, 40503, 25717
"""Odd numbers: a row, its number of tokens and the draft's place choose one of the draws."""


class SimulatedAcceptance:
    """Rates of every kind of row, for every draft length."""

    def __init__(self, kinds: Sequence[Sequence[float]], draft_len: int, device: torch.device) -> None:
        """kinds: of each kind the unconditional rates by position; missing ones are 0"""
        self._rates = [
            torch.tensor([conditional_rates(rates, length) for rates in kinds], dtype=torch.float32, device=device)
            for length in range(draft_len + 1)
        ]
        self._logits = self._rates[draft_len].logit(eps=1e-3)
        draws = torch.randn(NUM_DRAWS, generator=torch.Generator().manual_seed(0))  # on the CPU: the same on every rank
        self._noise = (NOISE * draws).to(device)
        self._places = PLACE_STEP * torch.arange(draft_len, device=device)

    def rates(self, draft_len: int) -> Tensor | None:
        """float32 [N, K] rates at which each draft is accepted if all before it were; None for K = 0."""
        return self._rates[draft_len] if draft_len else None

    def write_confidence(self, rows: DeviceBatch, out_confidence: Tensor) -> None:
        """Write a confidence int32 [R, K] in the drafts of each row, in bins as those of `argmax`."""
        draft_len = out_confidence.shape[1]
        logits = self._logits[rows.keys % len(self._logits), :draft_len]
        first = rows.keys * ROW_STEP + rows.num_tokens * TOKEN_STEP
        noise = self._noise[(first[:, None] + self._places[:draft_len]) & (NUM_DRAWS - 1)]
        bins = (4 * (noise.add_(logits) + 3)).floor_()
        out_confidence.copy_(bins.clamp_(min=0, max=CONFIDENCE_BINS - 1))


def conditional_rates(rates: Sequence[float], draft_len: int) -> list[float]:
    """The rate at which each of `draft_len` drafts is accepted if all before it were, from unconditional rates."""
    found, before = list[float](), 1.0
    for rate in rates[:draft_len]:
        found.append(rate / before if before > 0 else 0.0)
        before = rate
    return found + [0.0] * (draft_len - len(found))
