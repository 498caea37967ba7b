"""model.quantize=fp8: the FP8 weights of a checkpoint whose files hold none. Each weight is quantised when it is read.

    scale = largest |w| of the block / 448     in the dtype of the file; the smallest number above 1 less 1 for a block of zeros
    value = w / scale, in the same dtype, clamped to -448 .. 448 and rounded to e4m3

So weights and scales are those that llm-compressor writes for its scheme FP8_BLOCK, bit for bit; a weight in float16, whose
smallest scales would lose bits, is quantised in fp32.
Source: vllm-project/compressed-tensors, quantization/utils/helpers.py (calculate_qparams) and lifecycle/forward_helpers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.common.e4m3 import E4M3
from batchspec.model.layers.base import GroupedSpec, Projection, Share, TensorSpec
from batchspec.model.layers.forward import GroupedProduct
from batchspec.model.quant.base import Slices, Weights, shard_bias, shard_matrix
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.quant.fp8_products import BLOCK, Fp8Experts, Fp8Weight, StackedFp8
from batchspec.model.quant.grouped import GroupedLinear, order_of, shard_stacked, stacked_biases
from batchspec.model.quant.plain import PLAIN

MOST = 448.0
"""The largest number of e4m3."""
STRIPE = 1 << 25
"""Numbers of a weight that are quantised at a time, about: fewer take more launches, more take more memory."""


@dataclass(frozen=True, slots=True)
class Fp8AtLoad(Fp8):
    """See the module's docstring. In memory all is as in a checkpoint of FP8 weights; in files as in one of plain weights."""

    @property
    def kept(self) -> str:
        return "FP8 weights and activations, quantised at load" if self.quantises else "weights rounded to FP8 at load"

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        return PLAIN.tensors(part)

    def spares(self, part: Projection) -> tuple[TensorSpec, ...]:
        return PLAIN.spares(part)

    def holds(self, spec: GroupedSpec) -> bool:
        return True

    def grouped_tensors(self, spec: GroupedSpec) -> tuple[TensorSpec, ...]:
        return PLAIN.grouped_tensors(spec)

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedProduct:
        if not spec.stacked:
            return Fp8.load_grouped(self, weights, spec)
        name, bias = spec.of(0).parts[0].name, stacked_biases(weights, spec)
        if spec.interleaved:  # gate and up have scales of their own, as if they were two projections
            spec = replace(spec, parts=("gate", "up"), part_rows=spec.rows // 2)
        if self.quantises:
            stacked = StackedFp8(spec, blocked=True, device=weights.device)
            for expert, rows, weight in _stacked_parts(weights, spec, name):
                stacked.put(expert, rows, weight)
            return Fp8Experts(stacked, bias, self.made_for, None, weights.dtype)
        matrices = torch.empty((spec.num_experts, spec.rows, spec.k), dtype=weights.dtype, device=weights.device)
        for expert, rows, weight in _stacked_parts(weights, spec, name):
            matrices[expert, rows].copy_(weight.matrix(weights.dtype))
        return GroupedLinear(matrices, bias)

    def shard(self, part: Projection, share: Share) -> Slices:
        return {f"{part.name}.weight": shard_matrix(part, share, block=BLOCK)} | shard_bias(part, share)

    def shard_grouped(self, spec: GroupedSpec, share: Share) -> Slices:
        if spec.stacked:
            shard_stacked(spec, share, block=BLOCK)  # raises if it divides a block
        return PLAIN.shard_grouped(spec, share) if spec.stacked else Fp8.shard_grouped(self, spec, share)

    def _part(self, weights: Weights, name: str) -> Fp8Weight:
        return quantised_weight(weights.stored(f"{name}.weight"))


def _stacked_parts(weights: Weights, spec: GroupedSpec, name: str) -> Iterator[tuple[int, slice, Fp8Weight]]:
    """Of each expert of a tensor [E, k, rows] every part, quantised, with its rows in the expert's matrix."""
    order = order_of(spec)
    for expert in range(spec.num_experts):
        matrix = order(weights.entry(name, expert).t())
        for first in range(0, spec.rows, spec.part_rows):
            rows = slice(first, first + spec.part_rows)
            yield expert, rows, quantised_weight(matrix[rows])


def quantised_weight(weight: Tensor) -> Fp8Weight:
    """A weight [N, K] of any floating-point dtype, in blocks of 128 x 128. Besides the result a stripe of it is in memory."""
    rows, k = weight.shape
    values = torch.empty((rows, k), dtype=E4M3, device=weight.device)
    scale = torch.empty((-(-rows // BLOCK), -(-k // BLOCK)), device=weight.device)
    blocks = max(1, STRIPE // (BLOCK * k))  # of each column of blocks
    for first in range(0, len(scale), blocks):
        own = slice(first * BLOCK, (first + blocks) * BLOCK)
        _quantise(weight[own], values[own], scale[first : first + blocks])
    return Fp8Weight(values, scale)


def _quantise(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write the values and scales of whole rows of blocks. A model has thousands of matrices, so each launch counts."""
    rows, k = weight.shape
    if weight.dtype is torch.float16:
        weight = weight.float()
    padding = (0, -k % BLOCK, 0, -rows % BLOCK)
    blocks = (F.pad(weight, padding) if any(padding) else weight).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = torch.linalg.vector_norm(blocks, torch.inf, (1, 3)).div_(MOST)
    scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)
    values.copy_((blocks / scale[:, None, :, None]).clamp_(-MOST, MOST).flatten(2).flatten(0, 1)[:rows, :k])
    scales.copy_(scale)


FP8_AT_LOAD = Fp8AtLoad("block", "group")
