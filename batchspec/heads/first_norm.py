"""The target's output matrix, from which a head begins and with which an MTP layer drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.model.target import Target

_UNITS, _ROWS = 256, 1 << 14
"""Number of columns, and of rows, that are computed at once."""


def output_rows(target: Target, ids: Tensor | None = None) -> Tensor:
    """The rows [V', H] of these tokens int64 [V'], or of all, on the CPU in the target's dtype. They are computed as logits of
    unit vectors, so that any weight format works."""
    units = torch.eye(target.spec.hidden_size, dtype=target.dtype, device=target.device)
    chosen = None if ids is None else ids.to(target.device)
    parts = []
    for unit in units.split(_UNITS):
        logits = target.logits(unit)
        columns = (logits if chosen is None else logits.index_select(1, chosen)).t()
        parts.append(columns.to("cpu", target.dtype))
    return torch.cat(parts, 1).clone()


def norm_of_random_states(target: Target, rows: Tensor) -> Tensor:
    """[H] the target's final norm, scaled so that the products of normed random hidden states with `rows` [V', H] have a standard
    deviation of 1: unscaled, the loss of a new head for SmolLM2-135M began at 22 nats. On the CPU, fp32, or fp64 for fp64."""
    norm = target.final_norm.to("cpu", torch.promote_types(target.dtype, torch.float32))
    return norm / torch.cat([(part.to(norm) * norm).norm(dim=1) for part in rows.split(_ROWS)]).mean()
