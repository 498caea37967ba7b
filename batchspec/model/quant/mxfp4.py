"""MXFP4 experts of gpt-oss, converted to the model's dtype as they are read: the reference for kernels. All else is plain.

A file holds `NAME_blocks` u8 [E, N, K / 32, 16], two values a byte, the low half first, and `NAME_scales` u8 [E, N, K / 32].
A value is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (bit 3: negative) times 2^(scale - 127). In bf16 that is exact, so the model is
that of its bf16 weights. Source: OCP Microscaling Formats (MX) 1.0, sections 5.2, 5.3; transformers, integrations/mxfp4.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.model.blocks.base import GroupedSpec, TensorSpec
from batchspec.model.config_values import ConfigReader
from batchspec.model.quant.base import Cut, Slices, Weights, share
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.grouped import GroupedLinear, load_stacked, shard_stacked, stacked_bias
from batchspec.model.quant.plain import Plain

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Mxfp4(Plain):
    """See the module's docstring."""

    def grouped_tensors(self, spec: GroupedSpec) -> tuple[TensorSpec, ...]:
        name, blocks = spec.of(0).parts[0].name, (spec.num_experts, spec.rows, -(-spec.k // BLOCK))
        return (
            TensorSpec(f"{name}_blocks", (*blocks, BLOCK // 2), "weight", ("U8",)),
            TensorSpec(f"{name}_scales", blocks, "scale", ("U8",)),
            *stacked_bias(spec),
        )

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedLinear:
        blocks, scales, *_ = (tensor.name for tensor in self.grouped_tensors(spec))

        def matrix(expert: int) -> Tensor:
            return dequantised(weights.entry(blocks, expert), weights.entry(scales, expert))

        return load_stacked(weights, spec, matrix)

    def shard_grouped(self, spec: GroupedSpec, cut: Cut, rank: int, ranks: int) -> Slices:
        blocks, scales, *bias = (tensor.name for tensor in self.grouped_tensors(spec))
        experts, (rows, _) = slice(0, spec.num_experts), shard_stacked(spec, cut, rank, ranks)
        columns = slice(0, spec.k) if cut == "columns" else share(spec.of(0).parts[0], spec.k, rank, ranks, multiple=BLOCK)
        own = (experts, rows, slice(columns.start // BLOCK, columns.stop // BLOCK))
        found: Slices = {blocks: (*own, slice(0, BLOCK // 2)), scales: own}
        return found | {name: (experts, rows) for name in bias if cut == "columns" or rank == 0}


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """u8 [N, K / 32, 16] and u8 [N, K / 32] -> fp32 [N, K]."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=blocks.device)
    values = table[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()]
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(1)


def read_mxfp4(config: ConfigReader) -> Formats:
    """quantization_config with quant_method mxfp4, of which the experts alone are quantised."""
    plain = config.texts("modules_to_not_convert") or ()
    # Names with a star for the layer's number, as in model.layers.*.self_attn.
    return Formats(Mxfp4(), tuple(name.rsplit("*.", 1)[-1] for name in plain))
