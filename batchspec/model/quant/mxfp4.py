"""MXFP4 experts of gpt-oss, converted to the model's dtype as they are read: the reference for kernels. All else is plain.

A file holds `NAME_blocks` u8 [E, N, K / 32, 16], two values a byte, the low half first, and `NAME_scales` u8 [E, N, K / 32].
A value is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (bit 3: negative) times 2^(scale - 127). In bf16 that is exact, so the model is
that of its bf16 weights. Source: OCP Microscaling Formats (MX) 1.0, sections 5.2, 5.3; transformers, integrations/mxfp4.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchspec.kernels.moe.mxfp4 import dequantise_blocks
from batchspec.model.blocks.base import GroupedSpec, TensorSpec
from batchspec.model.config_values import ConfigReader
from batchspec.model.quant.base import Cut, Slices, Weights
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.grouped import GroupedLinear, load_stacked, shard_stacked, shard_stacked_bias, stacked_bias
from batchspec.model.quant.plain import Plain

BLOCK = 32


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
            return dequantise_blocks(weights.entry(blocks, expert), weights.entry(scales, expert))[:, : spec.k]

        return load_stacked(weights, spec, matrix)

    def shard_grouped(self, spec: GroupedSpec, cut: Cut, rank: int, ranks: int) -> Slices:
        blocks, scales, *_ = (tensor.name for tensor in self.grouped_tensors(spec))
        rows, columns = shard_stacked(spec, cut, rank, ranks, multiple=BLOCK)
        own = (slice(0, spec.num_experts), rows, slice(columns.start // BLOCK, columns.stop // BLOCK))
        found: Slices = {blocks: (*own, slice(0, BLOCK // 2)), scales: own}
        return found | shard_stacked_bias(spec, cut, rank, rows)


def read_mxfp4(config: ConfigReader) -> Formats:
    """quantization_config with quant_method mxfp4; experts alone are quantised."""
    plain = config.texts("modules_to_not_convert") or ()
    # Names with a star for the layer's number, as in model.layers.*.self_attn.
    return Formats(Mxfp4(), tuple(name.rsplit("*.", 1)[-1] for name in plain))
