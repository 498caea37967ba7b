"""Products with weights of four bits, INT4 or NVFP4 (W4A16), which stay packed: in bf16 on a GPU Triton kernels, elsewhere plain
torch, here of INT4 weights and in `nvfp4.py` of NVFP4 weights, which have this form for kernels alone.

    y = x W' + b     W [N, K] as `kernels/common/four_bit.py` defines it, in the dtype of x

So the result is that of the model with dequantised weights, up to the order of sums; in fp64 it has the same bits, unless a
matrix is multiplied in pieces (`dequantised.py`). Kernels unpack weights in registers (`kernels/gemm/four_bit_linear.py`). For
many tokens weights are dequantised piece by piece, and the library multiplies; `tuning.policy.four_bit_tile` says for how many.
Only then are NVFP4 weights rounded (`kernels/common/nvfp4.py`). Plain torch dequantises for any number of tokens. It also
computes what the kernels do not support: INT4 in groups of other sizes than 32, 64 and multiples of 128, and in act order if a
group is split between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from batchspec.kernels.common.four_bit import ROWS, FourBitWeight, dequantise
from batchspec.kernels.gemm.four_bit_dequantise import multiply_dequantised
from batchspec.kernels.gemm.four_bit_linear import four_bit_linear, four_bit_swiglu
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.layers.forward import Product
from batchspec.model.quant.dequantised import multiply_in_pieces
from batchspec.tuning.policy import four_bit_tile, has_fast_experts, ordered_four_bit_tile


class FourBitLinear(Product):
    """x [T, K] -> x @ W.T + bias [T, N]; W is that of all parts, their rows one after another.

    ordered  a token's bits do not depend on the number of tokens (decode.deterministic), so the library's product is never used
    """

    def __init__(self, parts: Sequence[FourBitWeight], bias: Tensor | None = None, *, ordered: bool = False) -> None:
        self.weights, self._bias, self._ordered = joined(parts), bias, ordered

    def __call__(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        if not all(is_fast(weight, x.dtype) for weight in self.weights):
            return multiply_in_pieces(x, self.weights, dequantise, self._bias)
        outs, first = [], 0
        for weight in self.weights:
            bias = None if self._bias is None else self._bias[first : first + weight.num_rows]
            tile, rows, interpret = self._tile(x, weight, gated=False), in_order_of(x, weight), not x.is_cuda
            if tile is None:
                outs.append(multiply_dequantised(rows, weight, bias, interpret=interpret))
            else:
                outs.append(four_bit_linear(rows, weight, bias, tile=tile, interpret=interpret))
            first += weight.num_rows
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    def swiglu(self, x: Tensor, lora: LoraTokens | None) -> Tensor:
        weight = self.weights[0]
        if len(self.weights) == 1 and is_fast(weight, x.dtype) and weight.num_rows % (2 * ROWS) == 0:
            tile = self._tile(x, weight, gated=True)
            if tile is not None and weight.words.is_contiguous():
                return four_bit_swiglu(in_order_of(x, weight), weight, self._bias, tile=tile, interpret=not x.is_cuda)
        return super().swiglu(x, lora)

    def _tile(self, x: Tensor, weight: FourBitWeight, *, gated: bool) -> Tile | None:
        if self._ordered:
            return ordered_four_bit_tile(len(x), gated=gated)
        group = weight.kernel_group
        assert group is not None
        return four_bit_tile(len(x), weight.num_rows, weight.k, group, x.device, gated=gated)

    def rows_from(self, first: int) -> Product:
        """Without copies if `first` is a multiple of 16 in its weight."""
        at, own = 0, []
        for weight in self.weights:
            start = max(first - at, 0)
            if start < weight.num_rows:
                if start % ROWS:
                    return super().rows_from(first)
                own.append(weight.rows(slice(start, weight.num_rows)))
            at += weight.num_rows
        return FourBitLinear(own, None if self._bias is None else self._bias[first:], ordered=self._ordered)


def is_fast(weight: FourBitWeight, dtype: torch.dtype) -> bool:
    """Whether kernels multiply activations of this dtype, the model's, with this weight."""
    return has_fast_experts(weight.words.device, dtype) and weight.kernel_group is not None


def in_order_of(x: Tensor, weight: FourBitWeight) -> Tensor:
    """x [T, K], columns in the order of the weight in memory."""
    return x if weight.columns is None else x.index_select(1, weight.columns)


def joined(parts: Sequence[FourBitWeight]) -> tuple[FourBitWeight, ...]:
    """The parts as one weight, if all divide their columns in the same way and their rows can follow each other; otherwise as
    they are."""
    first, *others = parts
    in_blocks = all(part.num_rows % ROWS == 0 for part in parts[:-1])
    if not others or not in_blocks or not all(first.has_columns_of(part) for part in others):
        return tuple(parts)

    def whole_of(own: Sequence[Tensor | None]) -> Tensor | None:
        given = [part for part in own if part is not None]
        assert len(given) in (0, len(parts))
        return torch.cat(given, 1) if given else None

    shifts, row_scales = whole_of([part.shifts for part in parts]), whole_of([part.row_scales for part in parts])
    words, scales = torch.cat([part.words for part in parts], 1), torch.cat([part.scales for part in parts], 1)
    num_rows = sum(part.num_rows for part in parts)
    return (replace(first, words=words, scales=scales, shifts=shifts, row_scales=row_scales, num_rows=num_rows),)
