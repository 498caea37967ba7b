"""Top-k, top-p and min-p when each rank holds a part of the logits. Nothing is read back to the host: CUDA graphs can hold it.

The cutoff of a token is found 4 bits at a time: each rank measures how many, or what mass, of its logits are at or above 16
thresholds; the ranks add these numbers up; all continue between the same two thresholds. This takes 17 exchanges of 16 numbers a
token. `kernels/sampling/cutoff.py` defines what top-k, top-p and min-p keep; as there, the smallest kept logit of top-p depends
on rounding where masses are nearly equal.

T flat positions, v the tokens of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.distributed.collectives import Collectives
from batchspec.kernels.sampling.threshold_masses import LOWEST, THRESHOLDS, threshold_masses, values_of

SHIFTS = range(28, -1, -4)


def searched_cutoffs(logits: Tensor, row_ids: Tensor, rows: DeviceBatch, vocab: int, ranks: Collectives) -> Tensor:
    """fp32 [T]: the smallest logit of each kept set over the tokens of all ranks, -inf if all tokens are kept.

    logits  fp32 [T, v]; logits that are not finite are ignored
    vocab   tokens of all ranks
    """
    temperature = rows.temperature[row_ids]
    greedy = temperature <= 0
    temperature = torch.where(greedy, 1, temperature)
    k, p, p_floor = rows.top_k[row_ids], rows.top_p[row_ids], rows.min_p[row_ids]
    top = ranks.gather(logits.nan_to_num(-torch.inf, -torch.inf, -torch.inf).amax(1)).amax(0)
    lowest = torch.full_like(k, LOWEST)
    has_k = (k > 0) & (k < vocab)
    search = _Search(logits, top, temperature, ranks)
    kth = torch.where(has_k, search.smallest(k.float(), mass=False), lowest)
    kept_mass = search.sums(kth, 0, mass=True)[:, 0]
    nucleus = search.smallest(p * kept_mass, mass=True)
    cut = values_of(torch.where(p < 1, torch.maximum(nucleus, kth), kth))
    floor = top + temperature * p_floor.log()
    cut = torch.where(p_floor > 0, torch.maximum(cut, floor), cut)
    return torch.where(greedy, -torch.inf, cut)


class _Search:
    """A search over the logits of all ranks."""

    def __init__(self, logits: Tensor, top: Tensor, temperature: Tensor, ranks: Collectives) -> None:
        self._logits, self._top, self._temperature, self._ranks = logits, top, temperature.contiguous(), ranks

    def smallest(self, target: Tensor, *, mass: bool) -> Tensor:
        """int32 [T]: the largest key with at least `target` logits, or mass, at or above it; LOWEST if there is less in all."""
        low = torch.full(target.shape, LOWEST, dtype=torch.int32, device=target.device)
        for shift in SHIFTS:
            enough = self.sums(low, shift, mass=mass)[:, 1:] >= target[:, None]
            low = low + (enough.sum(1, dtype=torch.int32) << shift)
        return low

    def sums(self, low: Tensor, shift: int, *, mass: bool) -> Tensor:
        """fp32 [T, 16]: sums over all ranks above thresholds that are 2^shift apart."""
        own = torch.empty(len(low), THRESHOLDS, device=low.device)
        top, temperature = (self._top, self._temperature) if mass else (None, None)
        threshold_masses(self._logits, low, shift, out=own, top=top, temperature=temperature)
        return self._ranks.sum(own)
