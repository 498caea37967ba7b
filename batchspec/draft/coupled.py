"""Drafts of sampled rows that share the noise of the target's own draws: argmax(draft logits / T + the same Gumbel noise).

The noise of a draw depends on (row key, position, token) alone. A drafter that adds it to its own logits proposes what the target
will draw if the two distributions are alike; a plain argmax is right only if the most likely token is drawn. No probability of a
draft is kept: drafts are compared with draws, and any draft is lossless.
top_k, top_p and min_p narrow the draft's logits as they narrow the target's. Penalties are left out: they depend on the drafts
before.
Source: Gumbel-coupled drafts, Daliri et al. 2025, "Coupling without communication and drafter-invariant speculative decoding"
(arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.logits import LogitRows, adjust_draft_logits
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.kernels.sampling.add_gumbel_noise import add_gumbel_noise
from batchspec.kernels.sampling.argmax import argmax
from batchspec.kernels.sampling.cutoff import cutoff


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """What is done to a drafter's logits before it chooses: the noise that the target will draw with at each of T places.

    row_ids    int32 [T] row of `rows`
    positions  int64 [T] position, in prompt + output, of the token that is drafted
    mode       what the rows of the pass need: rules of `batch/logits.py`, filters

    Nothing else in `draft` changes logits: whatever masks or biases the target's comes in here, for chains and trees alike.
    """

    rows: DeviceBatch
    row_ids: Tensor
    positions: Tensor
    mode: SamplingMode

    def choose(self, logits: Tensor, out_ids: Tensor, map_ids: Tensor | None = None) -> None:
        """Of a chain: the draft token at each place, int32 [T] of any stride.

        logits   [T, V], changed in place
        map_ids  int32 [V] token of each column; None: its number
        """
        self._perturb(logits, map_ids)
        argmax(logits, out_ids=out_ids, map_ids=map_ids)

    def branches(self, logits: Tensor, map_ids: Tensor | None = None) -> None:
        """Of a tree: change logits [T, V] in place; the largest are the children. Siblings share the noise of their position."""
        self._perturb(logits, map_ids)

    def _perturb(self, logits: Tensor, map_ids: Tensor | None) -> None:
        rows, dtype = self.rows, torch.float64 if logits.dtype == torch.float64 else torch.float32
        low = torch.full_like(logits[:, 0], -torch.inf, dtype=dtype)
        adjust_draft_logits(logits, LogitRows(self.row_ids, self.positions), rows, self.mode, map_ids)
        if self.mode.filters:
            cutoff(logits, self.row_ids, rows.temperature, rows.top_k, rows.top_p, rows.min_p, out_cutoff=low)
        add_gumbel_noise(logits, self.row_ids, self.positions, rows.keys, rows.temperature, low, map_ids)


def draws_of(mode: SamplingMode | None, rows: DeviceBatch, row_ids: Tensor, positions: Tensor, ahead: int = 0) -> Draws | None:
    """For tokens at `positions` + ahead; None: drafts are argmaxes of the logits as they are."""
    return None if mode is None else Draws(rows, row_ids, positions.long() + ahead, mode)
