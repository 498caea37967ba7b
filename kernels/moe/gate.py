"""The activation between the two products of an expert: gate and up, or up alone -> one number, in a kernel and in torch."""

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
    and u' = u clamped to +-limit. squared: relu(u)^2, without a gate.

    g and u are the gate half and the up half of the first product, bias included. gelu_tanh as in `gemm/activation.py`.
    The form with a limit is that of gpt-oss (openai/gpt-oss, gpt_oss/torch/model.py, swiglu). The caller rounds the result.
    """

    limit: float | None = None
    alpha: float = 1.702
    squared: bool = False

    @property
    def parts(self) -> int:
        """Number of products of the same input: of gate and up, or of up alone."""
        return 1 if self.squared else 2

    def of(self, sums: Tensor) -> Tensor:
        """The activation of the first product [P, parts * I], gate columns before up columns, in its dtype: [P, I]."""
        return F.relu(sums).square() if self.squared else self(*sums.chunk(2, dim=-1))

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation of gate and up, tensors of one shape, in their dtype; not of a form without a gate."""
        assert not self.squared
        if self.limit is None:
            return (gate * torch.sigmoid(gate) if self.alpha else F.gelu(gate, approximate="tanh")) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


SWIGLU, GEGLU, SQUARED_RELU = Gate(), Gate(alpha=0.0), Gate(squared=True)


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
