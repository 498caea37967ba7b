"""Products of weights that stay packed and are dequantised at each call, a piece at a time, in plain torch on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.common.four_bit import ROWS

PIECE = 1 << 22
"""Maximum number of weights that are dequantised at once; they take about 50 MB in bf16."""


class Packed(Protocol):
    """A weight [N, K] of four bits a number."""

    @property
    def num_rows(self) -> int:
        """N"""

    def rows(self, own: slice) -> Self:
        """Some rows of it, without copies. The first one is a multiple of 16."""


Weight = TypeVar("Weight", bound=Packed)


def multiply_in_pieces(
    x: Tensor, weights: Sequence[Weight], dequantise: Callable[[Weight, torch.dtype], Tensor], bias: Tensor | None
) -> Tensor:
    """x [T, K] -> x W' + b, [T, N]; W is that of all weights, their rows one after another. Does not synchronise.

    dequantise  (weight, dtype) -> [rows of the weight, K]

    One product if the weights have at most PIECE numbers, with the bits of the dequantised model.
    """
    most = PIECE // x.shape[1]
    if sum(weight.num_rows for weight in weights) <= most:
        matrices = [dequantise(weight, x.dtype) for weight in weights]
        return F.linear(x, matrices[0] if len(matrices) == 1 else torch.cat(matrices), bias)
    outs, at, step = [], 0, max(1, most // ROWS) * ROWS
    for weight in weights:
        for first in range(0, weight.num_rows, step):
            part = weight.rows(slice(first, min(first + step, weight.num_rows)))
            outs.append(F.linear(x, dequantise(part, x.dtype), None if bias is None else bias[at : at + part.num_rows]))
            at += part.num_rows
    return torch.cat(outs, -1)
