"""A decoder layer: attention, then an MLP of any kind. Target, EAGLE-3 heads, PARD and training share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from batchspec.model.blocks.attention import Attention, AttentionSpec
from batchspec.model.blocks.base import BlockSpec
from batchspec.model.blocks.forward import Attend, Block, BlockSource, Stream


class MlpSpec(BlockSpec, Protocol):
    """The shape of a block that follows attention."""

    def build(self, source: BlockSource) -> Block:
        """The block that computes, its weights taken from `source`."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The shapes of a layer."""

    attention: AttentionSpec
    mlp: MlpSpec

    @property
    def blocks(self) -> tuple[BlockSpec, BlockSpec]:
        return self.attention, self.mlp

    def build(self, source: BlockSource) -> DecoderLayer:
        return DecoderLayer(self.attention.build(source), self.mlp.build(source))


class DecoderLayer:
    """A layer's forward pass is `attention.queries`, or `queries_of` an input that the caller has normed, and then `finish`."""

    def __init__(self, attention: Attention, mlp: Block) -> None:
        self.attention, self._mlp = attention, mlp

    @property
    def num_experts_read(self) -> Tensor | None:
        """int32 [1]: number of experts that had tokens in the latest forward pass; None without experts."""
        return self._mlp.num_experts_read

    def finish(self, q: Tensor, stream: Stream, attend: Attend, *, add_in_product: bool) -> None:
        """Continue from q [T, NH, D] to the end of the layer.

        add_in_product  the next norm is fused into a product, so the last product of the layer adds to the stream itself
        """
        self.attention.finish(q, stream, attend, add_in_product=self._mlp.norms_in_product(stream))
        self._mlp(stream, attend.lora, add_in_product=add_in_product)
