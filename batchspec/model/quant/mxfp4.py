"""MXFP4 experts of gpt-oss. In bf16 on a GPU they stay MXFP4; elsewhere loading converts them to the model's dtype.

A file holds `NAME_blocks` u8 [E, N, K / 32, 16], two values per byte, low half first, and `NAME_scales` u8 [E, N, K / 32].
A value is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (negative if bit 3 is set) times 2^(scale - 127). bf16 holds it exactly, so
conversion does not change the model. All other weights are plain.
Source: OCP Microscaling Formats (MX) 1.0, sections 5.2, 5.3; transformers, integrations/mxfp4.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.errors import CheckpointError
from batchspec.kernels.moe.experts_mxfp4 import experts_mxfp4_down, experts_mxfp4_up
from batchspec.kernels.moe.mxfp4 import LARGEST_SCALE, Mxfp4Weight, dequantise_blocks, mxfp4_shapes, shuffle_mxfp4
from batchspec.kernels.moe.quantise import Fp8Rows
from batchspec.kernels.moe.units import Routing
from batchspec.model.layers.base import Gating, GroupedSpec, Share, TensorSpec
from batchspec.model.layers.forward import GroupedProduct
from batchspec.model.quant.base import Slices, Weights
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.grouped import (
    gate_of,
    load_stacked,
    order_of,
    rows_in_order,
    shard_stacked,
    shard_stacked_bias,
    stacked_bias,
    stacked_biases,
    tile_of,
)
from batchspec.model.quant.plain import Plain

BLOCK = 32
UNPACKING = 0.4
"""Time to unpack a weight, relative to INT4. Fitted to the experts' products of gpt-oss-20b and -120b with 16 to 256 tokens on an
H200 (2026-11)."""


@dataclass(frozen=True, slots=True)
class Mxfp4(Plain):
    """See the module's docstring."""

    packed: bool = False
    """True: weights stay MXFP4 where `packs` allows it. False: loading converts them to the model's dtype."""

    def packs(self, k: int, dtype: torch.dtype) -> bool:
        """Whether a weight of k columns stays MXFP4 in a model of `dtype`. The kernels need whole blocks of 32 and bf16."""
        return self.packed and k % BLOCK == 0 and dtype is torch.bfloat16

    @property
    def kept(self) -> str:
        return "MXFP4 experts" if self.packed else ""

    def unpacking(self, *, grouped: bool) -> float | None:
        return UNPACKING if grouped and self.packed else None

    def for_kernels(self) -> Mxfp4:
        return Mxfp4(packed=True)

    def holds(self, spec: GroupedSpec) -> bool:
        return spec.stacked

    def grouped_tensors(self, spec: GroupedSpec) -> tuple[TensorSpec, ...]:
        name, blocks = spec.of(0).parts[0].name, (spec.num_experts, spec.rows, -(-spec.k // BLOCK))
        return (
            TensorSpec(f"{name}_blocks", (*blocks, BLOCK // 2), "weight", ("U8",)),
            TensorSpec(f"{name}_scales", blocks, "scale", ("U8",)),
            *stacked_bias(spec),
        )

    def expert_nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        if not self.packs(k, dtype):
            return self.nbytes(rows, k, dtype)
        return sum(math.prod(shape) for shape in mxfp4_shapes(rows, k))

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedProduct:
        if self.packs(spec.k, weights.dtype):
            return self._load_packed(weights, spec)
        blocks, scales, *_ = (tensor.name for tensor in self.grouped_tensors(spec))

        def matrix(expert: int) -> Tensor:
            return dequantise_blocks(weights.entry(blocks, expert), weights.entry(scales, expert))[:, : spec.k]

        return load_stacked(weights, spec, matrix)

    def _load_packed(self, weights: Weights, spec: GroupedSpec) -> PackedExperts:
        """Load one expert at a time and shuffle it on the model's device. Raises CheckpointError for scales above 2."""
        blocks, scales, *_ = (tensor.name for tensor in self.grouped_tensors(spec))
        shapes, order = mxfp4_shapes(spec.rows, spec.k), order_of(spec)
        words, exponents = (torch.empty((spec.num_experts, *shape), dtype=torch.uint8, device=weights.device) for shape in shapes)
        largest = torch.zeros((), dtype=torch.uint8, device=weights.device)
        for expert in range(spec.num_experts):
            values, own = order(weights.entry(blocks, expert)), order(weights.entry(scales, expert))
            largest = torch.maximum(largest, own.max())
            shuffled = shuffle_mxfp4(values, own.clamp(max=LARGEST_SCALE), gated=spec.interleaved)
            words[expert].copy_(shuffled.words)
            exponents[expert].copy_(shuffled.scales)
        if int(largest) > LARGEST_SCALE:
            raise CheckpointError(
                f"{scales}: a scale is 2^{int(largest) - 127}, but the kernels for MXFP4 weights read at most 2^1; "
                "set model.dtype=float32, which converts the weights"
            )
        return PackedExperts(Mxfp4Weight(words, exponents, spec.rows, spec.k, spec.interleaved), stacked_biases(weights, spec))

    @property
    def block(self) -> int:
        return BLOCK

    def shard_grouped(self, spec: GroupedSpec, share: Share) -> Slices:
        blocks, scales, *_ = (tensor.name for tensor in self.grouped_tensors(spec))
        rows, columns = shard_stacked(spec, share, block=BLOCK)
        own = (slice(0, spec.num_experts), rows, slice(columns.start // BLOCK, -(-columns.stop // BLOCK)))
        found: Slices = {blocks: ((*own, slice(0, BLOCK // 2)),), scales: (own,)}
        return found | shard_stacked_bias(spec, share, rows)


class PackedExperts:
    """A GroupedProduct with MXFP4 weights that the kernels unpack in registers. It has no plain torch version."""

    reads_rows, reads_groups = True, False
    weight_dtype = torch.uint8

    def __init__(self, weight: Mxfp4Weight, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def up(self, x: Tensor, routing: Routing, gating: Gating, *, quantise: bool) -> Tensor:
        interpret, tile = not x.is_cuda, tile_of(routing, gated=True, dtype=torch.uint8)
        rows = rows_in_order(x, routing)
        return experts_mxfp4_up(rows, self.weight, self._bias, routing, tile=tile, gate=gate_of(gating), interpret=interpret)

    def down(self, inner: Tensor | Fp8Rows, routing: Routing) -> Tensor:
        assert isinstance(inner, Tensor)
        tile = tile_of(routing, gated=False, dtype=torch.uint8)
        return experts_mxfp4_down(inner, self.weight, self._bias, routing, tile=tile, interpret=not inner.is_cuda)


def read_mxfp4(config: ConfigReader) -> Formats:
    """`quantization_config` with quant_method mxfp4 -> formats. Only experts are quantised."""
    plain = config.texts("modules_to_not_convert") or ()
    # Names have a star for the number of the layer, as in model.layers.*.self_attn: keep what follows the star.
    return Formats(Mxfp4(), tuple(name.rsplit("*.", 1)[-1] for name in plain))
