"""The activation between the two products of an expert, gate and up -> one number, in a kernel and in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gate:
    """limit None: silu(g) * u. Else g' * sigmoid(alpha * g') * (u' + 1) with g' = min(g, limit), u' = u clamped to +-limit.

    g and u are the gate half and the up half of the first product, bias included. `alpha` is unused without a limit.
    The second form is that of gpt-oss (openai/gpt-oss, gpt_oss/torch/model.py, swiglu). The caller rounds the result.
    """

    limit: float | None = None
    alpha: float = 1.702

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation of gate and up, tensors of one shape, in their dtype."""
        if self.limit is None:
            return gate * torch.sigmoid(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


SWIGLU = Gate()


@triton.jit
def apply_gate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """`Gate` applied to two fp32 blocks of one shape. LIMIT None: silu(gate) * up. NaN stays NaN: it marks damaged weights."""
    if LIMIT is None:
        y = gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        y = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return y
