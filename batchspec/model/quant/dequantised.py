"""Products of weights that stay packed and are dequantised at each call, a piece at a time, in plain torch on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.moe.quantise import Fp8Rows
from batchspec.kernels.moe.units import Routing
from batchspec.model.blocks.base import Gating
from batchspec.model.quant.grouped import PlainExperts

PIECE = 1 << 22
"""Maximum number of weights that are dequantised at once; they take about 50 MB in bf16."""


def multiply_in_pieces(x: Tensor, num_rows: int, matrix: Callable[[slice], Tensor], bias: Tensor | None) -> Tensor:
    """x [T, K] -> x W' + b, [T, num_rows]. Does not synchronise.

    matrix  a range of the rows of W, dequantised to the dtype of x
    """
    step, outs = max(1, PIECE // x.shape[1]), []
    for first in range(0, num_rows, step):
        own = slice(first, min(first + step, num_rows))
        outs.append(F.linear(x, matrix(own), None if bias is None else bias[own]))
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


class DequantisedExperts(PlainExperts):
    """A GroupedProduct that only the reference computes."""

    reads_rows = reads_groups = False

    def up(self, x: Tensor, routing: Routing, gating: Gating, *, quantise: bool) -> Tensor:
        return self.plain_up(x, routing, gating)

    def down(self, inner: Tensor | Fp8Rows, routing: Routing) -> Tensor:
        assert isinstance(inner, Tensor)
        return self.plain_down(inner, routing)
