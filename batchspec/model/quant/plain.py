"""Weights in the model's own dtype: bf16, fp32 or fp64."""

from __future__ import annotations

import torch

from batchspec.model.blocks.base import Projection, TensorSpec
from batchspec.model.quant.base import Cut, Slices, bias_of, shard_bias, share


class Plain:
    """`NAME.weight` [N, K] of any floating-point dtype, converted to the model's as it is read."""

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        return TensorSpec(f"{part.name}.weight", (part.rows, part.k), "weight"), *bias_of(part)

    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        return rows * k * dtype.itemsize

    def shard(self, part: Projection, cut: Cut, rank: int, ranks: int) -> Slices:
        rows, columns = slice(0, part.rows), slice(0, part.k)
        if cut == "columns":
            rows = share(part, part.rows, rank, ranks)
        else:
            columns = share(part, part.k, rank, ranks)
        return {f"{part.name}.weight": (rows, columns)} | shard_bias(part, cut, rank, ranks)


PLAIN = Plain()
