"""The gate of an expert: what its first product becomes before the second, in a kernel and in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gate:
    """silu(g) * u, or with a limit g' * sigmoid(alpha * g') * (u' + 1), g' = min(g, limit), u' = u within +-limit.

    The second form is gpt-oss's (openai/gpt-oss, gpt_oss/torch/model.py, swiglu). The caller rounds once.
    """

    limit: float | None = None
    alpha: float = 1.702

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Of the halves of a gate-up product, with bias."""
        if self.limit is None:
            return gate * torch.sigmoid(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


SWIGLU = Gate()


@triton.jit
def open_gate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """`Gate` of two blocks in fp32; LIMIT None: silu. NaN stays NaN: it marks damaged weights."""
    if LIMIT is None:
        y = gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        y = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return y
