"""Products with NVFP4 weights (W4A16) in plain torch, where no kernel computes them: weights stay packed, and each call
dequantises them. In bf16 on a GPU their products are those of `four_bit.py` and `four_bit_experts.py`, by kernels.

    y = x W' + b     W [N, K] as `kernels/common/nvfp4.py` defines it, in the dtype of x

So the result is that of the model with dequantised weights; in fp64 it has the same bits, unless a matrix is multiplied in pieces
(`dequantised.py`).
Activations are not quantised: the hardware that multiplies FP4 activations is newer than Hopper.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.common.fp4 import GROUP
from batchspec.kernels.common.nvfp4 import Nvfp4Weight, dequantise, joined
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.kernels.moe.quantise import Fp8Rows
from batchspec.kernels.moe.units import Routing
from batchspec.model.layers.base import Gating, GroupedSpec
from batchspec.model.layers.forward import Product
from batchspec.model.quant.dequantised import multiply_in_pieces
from batchspec.model.quant.grouped import PlainExperts


class Nvfp4Linear(Product):
    """x [T, K] -> x @ W.T + bias [T, N]; W is that of all parts, their rows one after another."""

    def __init__(self, parts: Sequence[Nvfp4Weight], bias: Tensor | None = None) -> None:
        self.weight, self._bias = joined(parts), bias

    def __call__(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        return multiply_in_pieces(x, [self.weight], dequantise, self._bias)

    def rows_from(self, first: int) -> Product:
        rows = slice(first, self.weight.num_rows)
        return Nvfp4Linear([self.weight.rows(rows)], None if self._bias is None else self._bias[rows])


class StackedNvfp4:
    """The weights of all experts of a grouped product, in one allocation that is filled one projection at a time."""

    def __init__(self, spec: GroupedSpec, *, divides: bool, device: torch.device) -> None:
        rows = (spec.num_experts, spec.rows)
        self.codes = torch.empty((*rows, spec.k // 2), dtype=torch.uint8, device=device)
        self.scales = torch.empty((*rows, spec.k // GROUP), dtype=E4M3, device=device)
        self.row_scales, self.divides = torch.empty(rows, device=device), divides

    def put(self, expert: int, rows: slice, part: Nvfp4Weight) -> None:
        """Copy a projection. rows: its rows in the matrix of its expert."""
        self.codes[expert, rows].copy_(part.codes)
        self.scales[expert, rows].copy_(part.scales)
        self.row_scales[expert, rows].copy_(part.row_scales)

    def of(self, expert: int) -> Nvfp4Weight:
        """The weight of an expert, without copies."""
        return Nvfp4Weight(self.codes[expert], self.scales[expert], self.row_scales[expert], self.divides)


class Nvfp4Experts(PlainExperts):
    """A GroupedProduct with NVFP4 weights."""

    weight_dtype = torch.float4_e2m1fn_x2
    reads_rows = reads_groups = False

    def __init__(self, weight: StackedNvfp4, bias: Tensor | None) -> None:
        self.weight, self._bias, self.rows = weight, bias, weight.codes.shape[1]

    def up(self, x: Tensor, routing: Routing, gating: Gating, *, quantise: bool) -> Tensor:
        return self.plain_up(x, routing, gating)

    def down(self, inner: Tensor | Fp8Rows, routing: Routing) -> Tensor:
        assert isinstance(inner, Tensor)
        return self.plain_down(inner, routing)

    def product(self, expert: int, x: Tensor) -> Tensor:
        return multiply_in_pieces(x, [self.weight.of(expert)], dequantise, None if self._bias is None else self._bias[expert])
