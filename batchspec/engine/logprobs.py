"""Log-probabilities of the tokens that a round emits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchspec.batch.logits import LogitRows
from batchspec.kernels.sampling.log_normaliser import log_normaliser


class Logprobs(NamedTuple):
    """Log-softmax of T rows of raw logits."""

    chosen: Tensor
    """float32 [T] of the chosen tokens"""
    top_ids: Tensor | None
    """int32 [T, N] the likeliest tokens; None if N is 0"""
    top: Tensor | None
    """float32 [T, N] theirs"""


def logprobs_of(raw: Tensor, target_ids: Tensor, num_top: int) -> Logprobs:
    """
    raw         [T, V] the target's logits before any rule is applied
    target_ids  int32 [T] chosen tokens; NO_TOKEN counts as token 0
    num_top     N
    """
    normaliser = torch.empty(raw.shape[0], 1, dtype=raw.dtype, device=raw.device)
    log_normaliser(raw, out=normaliser[:, 0])
    chosen = (raw.gather(1, target_ids.clamp(min=0).long().unsqueeze(1)) - normaliser).squeeze(1).float()
    if not num_top:
        return Logprobs(chosen, None, None)
    best = raw.topk(num_top, dim=1)
    return Logprobs(chosen, best.indices.int(), (best.values - normaliser).float())


def logprobs_by_row(found: Logprobs, places: LogitRows, num_rows: int, width: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logprobs laid out by row and number of drafts before the token. R num_rows, S width, N likeliest tokens.

    places  the row and the number of drafted tokens of each of the T logits
    Returns float32 [R, S] of the chosen tokens, and int32 and float32 [R, S, N] ids and values of the likeliest ones, or None.
    Does not synchronise.
    """
    column = torch.zeros_like(places.positions) if places.num_drafted is None else places.num_drafted
    # Padding and dead rows have column numbers out of range: their values go to an extra column, which is dropped.
    column = torch.where((column >= 0) & (column < width), column, width)
    indices = (places.row_ids.long(), column)

    def by_row(values: Tensor) -> Tensor:
        laid_out = values.new_zeros((num_rows, width + 1, *values.shape[1:]))
        laid_out[indices] = values
        return laid_out[:, :width]

    if found.top_ids is None or found.top is None:
        return by_row(found.chosen), None, None
    return by_row(found.chosen), by_row(found.top_ids), by_row(found.top)
