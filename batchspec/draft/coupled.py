"""Drafts for sampled rows that share the noise of the target's own draws: argmax(draft logits / T + the same Gumbel noise).

The target draws the token at a position by noise of (row key, position, token) alone, so a drafter that adds that noise to its
own logits proposes what the target will draw wherever the two distributions are alike; a plain argmax is right only where the
likeliest token is drawn. No probability of a draft is kept: drafts are compared with draws, and any draft is lossless.
Filters narrow the draft's logits as they will narrow the target's; penalties, which depend on the drafts before, are left out.
Source: Gumbel-coupled drafts, Daliri et al. 2025, "Coupling without communication and drafter-invariant speculative decoding"
(arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.kernels.sampling.add_gumbel_noise import add_gumbel_noise
from batchspec.kernels.sampling.argmax import argmax
from batchspec.kernels.sampling.cutoff import cutoff


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """What the target will draw by at each of T places.

    row_ids    int32 [T] line of `rows`
    positions  int64 [T] position, in prompt + output, of the token that is drafted
    """

    rows: DeviceBatch
    row_ids: Tensor
    positions: Tensor
    filters: bool

    def perturb(self, logits: Tensor, map_ids: Tensor | None = None) -> None:
        """Add the noise to logits [T, V] in place; map_ids [V] the token of each column, None: its number."""
        rows, dtype = self.rows, torch.float64 if logits.dtype == torch.float64 else torch.float32
        low = torch.full_like(logits[:, 0], -torch.inf, dtype=dtype)
        if self.filters:
            cutoff(logits, self.row_ids, rows.temperature, rows.top_k, rows.top_p, rows.min_p, out_cutoff=low)
        add_gumbel_noise(logits, self.row_ids, self.positions, rows.keys, rows.temperature, low, map_ids)

    def choose(self, logits: Tensor, out_ids: Tensor, map_ids: Tensor | None = None) -> None:
        """The draft at each place, int32 [T] of any stride. Changes `logits`."""
        self.perturb(logits, map_ids)
        argmax(logits, out_ids=out_ids, map_ids=map_ids)


def draws_of(mode: SamplingMode | None, rows: DeviceBatch, row_ids: Tensor, positions: Tensor, ahead: int = 0) -> Draws | None:
    """For tokens at `positions` + ahead; None where drafts are plain argmaxes."""
    return None if mode is None else Draws(rows, row_ids, positions.long() + ahead, mode.filters)
