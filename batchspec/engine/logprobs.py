"""Log-probabilities of the tokens that a round emits."""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.batch.logits import LogitRows


def logprobs_by_row(
    raw: Tensor, target_ids: Tensor, places: LogitRows, num_rows: int, width: int, num_top: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-softmax of the raw logits, laid out by row and number of drafts before the token. R num_rows, S width, N num_top.

    raw         [T, V] the target's logits before any rule is applied
    target_ids  int32 [T] chosen tokens; NO_TOKEN counts as token 0
    places      the row and the number of drafted tokens of each of the T logits
    Returns float32 [R, S] of the chosen tokens, and int32 and float32 [R, S, N] ids and values of the likeliest ones (None if N
    is 0). Does not synchronise.
    """
    normaliser = torch.logsumexp(raw, 1, keepdim=True)
    chosen = (raw.gather(1, target_ids.clamp(min=0).long().unsqueeze(1)) - normaliser).squeeze(1).float()
    column = torch.zeros_like(places.positions) if places.num_drafted is None else places.num_drafted
    # Padding and dead rows have columns out of range: their values go to an extra column, which is cut off.
    column = torch.where((column >= 0) & (column < width), column, width)
    indices = (places.row_ids.long(), column)

    def by_row(values: Tensor) -> Tensor:
        laid_out = values.new_zeros((num_rows, width + 1, *values.shape[1:]))
        laid_out[indices] = values
        return laid_out[:, :width]

    if not num_top:
        return by_row(chosen), None, None
    best = raw.topk(num_top, dim=1)
    return by_row(chosen), by_row(best.indices.int()), by_row((best.values - normaliser).float())
