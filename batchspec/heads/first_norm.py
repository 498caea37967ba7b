"""The final norm with which a head or an MTP layer begins that has random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.model.target import Target

_ROWS = 1 << 14
"""Number of rows that are multiplied at once."""


def norm_of_random_states(target: Target, rows: Tensor) -> Tensor:
    """[H] the target's final norm, scaled so that the products of normed random hidden states with `rows` [V', H] have a standard
    deviation of 1: unscaled, the loss of a new head for SmolLM2-135M began at 22 nats. On the CPU, fp32, or fp64 for fp64."""
    norm = target.final_norm.to("cpu", torch.promote_types(target.dtype, torch.float32))
    return norm / torch.cat([(part.to(norm) * norm).norm(dim=1) for part in rows.split(_ROWS)]).mean()
