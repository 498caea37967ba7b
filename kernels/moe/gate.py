"""The activation between the two products of an expert, gate and up -> one number, in a kernel and in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.gemm.activation import GELU_SLOPE as SLOPE

GELU_SLOPE = tl.constexpr(SLOPE)


@dataclass(frozen=True, slots=True)
class Gate:
    """limit None: silu(g) * u, or with alpha 0 gelu_tanh(g) * u. Else g' * sigmoid(alpha * g') * (u' + 1) with g' = min(g, limit)
    and u' = u clamped to +-limit.

    g and u are the gate half and the up half of the first product, bias included. gelu_tanh as in `gemm/activation.py`.
    The last form is that of gpt-oss (openai/gpt-oss, gpt_oss/torch/model.py, swiglu). The caller rounds the result.
    """

    limit: float | None = None
    alpha: float = 1.702

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation of gate and up, tensors of one shape, in their dtype."""
        if self.limit is None:
            return (gate * torch.sigmoid(gate) if self.alpha else F.gelu(gate, approximate="tanh")) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


SWIGLU, GEGLU = Gate(), Gate(alpha=0.0)


@triton.jit
def apply_gate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """`Gate` applied to two fp32 blocks of one shape. NaN stays NaN: it marks damaged weights."""
    if LIMIT is None:
        z = gate
        if ALPHA == 0:
            z = GELU_SLOPE * (gate + 0.044715 * gate * gate * gate)
        y = gate / (1.0 + tl.exp(-z)) * up
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        y = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return y
