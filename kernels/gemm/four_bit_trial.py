"""Autotune of dense products with weights of four bits: tiles of our kernel, and dequantising the weight for the library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.common.four_bit import FourBitWeight, multiplied
from batchspec.kernels.common.fp4 import GROUP
from batchspec.kernels.common.graph_clock import MAX_COPIES, Call
from batchspec.kernels.common.int4 import arrange
from batchspec.kernels.common.nvfp4 import Nvfp4Weight, arranged
from batchspec.kernels.gemm.activation import silu_and_mul
from batchspec.kernels.gemm.autotune import COPIES_BYTES, Trial
from batchspec.kernels.gemm.four_bit_dequantise import multiply_dequantised
from batchspec.kernels.gemm.four_bit_linear import launch
from batchspec.kernels.gemm.four_bit_tiles import candidates, compiled_as, group_of
from batchspec.kernels.gemm.tiles import Tile


def random_four_bit(rows: int, k: int, group: int, device: torch.device) -> FourBitWeight:
    """Weights of about the size k^-0.5, INT4 symmetric. group: columns of a group, 0: all of a row, 16: NVFP4."""
    if group == GROUP:
        codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device)
        scales = torch.randint(0x30, 0x40, (rows, k // GROUP), dtype=torch.uint8, device=device)  # 0.5 to 1.9
        return arranged(Nvfp4Weight(codes, scales.view(E4M3), torch.full((rows,), k**-0.5 / 3, device=device), divides=False))
    size = group or k
    words = torch.randint(-(2**31), 2**31, (rows, k // 8), device=device).int()
    scales = (torch.rand(rows, -(-k // size), device=device) + 0.5) * (k**-0.5 / 4.6)
    return arrange(words, scales.bfloat16(), None, size)


class FourBitTrial(Trial):
    """One op of `four_bit_tiles.op_of`. Zero points of their own, which take a few more instructions, are not timed."""

    more_tokens = (2048, 4096)

    def make_weights(self) -> Sequence[Any]:
        copies = min(MAX_COPIES, -(-COPIES_BYTES // (self.rows * self.k // 2)))
        return [random_four_bit(self.rows, self.k, group_of(self.op), self.device) for _ in range(copies)]

    def candidates(self, tokens: int) -> list[Tile]:
        return candidates(tokens, self.rows, self.k, group_of(self.op), card_of(self.device), gated=self.gated)

    def kernel_of(self, tile: Tile, tokens: int) -> tuple[Any, ...]:
        return tuple(compiled_as(tile))

    def calls(self, tile: Tile, x: Tensor, out: Tensor, *, compile_only: bool = False) -> list[Call]:
        options: dict[str, Any] = {"out": out, "tile": tile, "gated": self.gated, "compile_only": compile_only}
        return [partial(launch, x, w, None, **options) for w in self.weights]

    def library(self, x: Tensor, out: Tensor) -> list[Call]:
        def run(w: FourBitWeight) -> None:
            y = multiply_dequantised(x, w, interpret=not x.is_cuda)
            if self.gated:
                silu_and_mul(y, out=out)

        return [partial(run, w) for w in self.weights]

    def matrix(self) -> Tensor:
        return multiplied(self.weights[0], torch.float32)
