"""Attention over paged latents: chooses what computes a batch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.model.layers.latent.attend import HeadSizes, Matrices, TorchLatentPlan
from batchspec.model.layers.latent.pages import LatentPages
from batchspec.model.layers.latent.prefill import LatentPrefillPlan, fits_prefill
from batchspec.model.layers.latent.verify import LatentVerifyPlan, fits_verify


class LatentPlan(Protocol):
    """Which latents the queries of a pass read: the same for all layers."""

    def attend(
        self, q: Tensor, pages: LatentPages, matrices: Matrices, sizes: HeadSizes, scale: float, positions: Tensor | None = None
    ) -> Tensor:
        """q [T, NH, N + P], its last P numbers rotated -> attended values [T, NH, V], 0 for dead rows.

        positions  int64 [T] to use instead of the batch's: not earlier, and below the row's kv_len, as of `AttentionPlan`
        """


def plan_latents(
    batch: FlatBatch, pages: LatentPages, *, num_heads: int, sizes: HeadSizes, window: int | None, sink: int
) -> LatentPlan:
    """The plan that all such layers share for this batch. window, sink: as of `Pass`."""
    if fits_verify(batch, pages):
        return LatentVerifyPlan(batch, pages, num_heads, sizes, window=window, sink=sink)
    if fits_prefill(batch, pages, sizes, sink):
        return LatentPrefillPlan(batch, pages, num_heads, sizes, window=window)
    return TorchLatentPlan(batch, window=window, sink=sink)
