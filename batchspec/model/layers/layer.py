"""A decoder layer: a mixer of a row's tokens, then an MLP of any kind. Target, EAGLE-3 heads, PARD and training share it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from batchspec.model.layers.attention.block import Attention, AttentionSpec
from batchspec.model.layers.base import BlockSpec, Shard
from batchspec.model.layers.forward import Block, BlockSource, Selected, Stream
from batchspec.model.layers.kind import Mixer, MixerSpec


class MlpSpec(BlockSpec, Protocol):
    """The shape of a block that follows the mixer."""

    def build(self, source: BlockSource) -> Block:
        """The block that computes, its weights taken from `source`."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The shapes of a layer."""

    mixer: MixerSpec
    mlp: MlpSpec
    last: MlpSpec | None = None
    """A block after the MLP, if there is one."""

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        return self.mixer, self.mlp, *(() if self.last is None else (self.last,))

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, AttentionSpec), self.mixer
        return self.mixer

    def sharded(self, shard: Shard, units: Iterable[int]) -> LayerSpec:
        """The shape of what one rank computes. units: of each of `blocks`, see `BlockSpec.sharded`."""
        of_mixer, of_mlp, *of_last = units
        last = None if self.last is None else self.last.sharded(shard, *of_last)
        return LayerSpec(self.mixer.sharded(shard, of_mixer), self.mlp.sharded(shard, of_mlp), last)

    def build(self, source: BlockSource) -> DecoderLayer:
        last = None if self.last is None else self.last.build(source)
        return DecoderLayer(self.mixer.build(source), self.mlp.build(source), last)


class DecoderLayer:
    """A layer's forward pass is `mixer.begin` and then `finish`."""

    def __init__(self, mixer: Mixer, mlp: Block, last: Block | None = None) -> None:
        self.mixer, self._mlp, self._last = mixer, mlp, last

    @property
    def attention(self) -> Attention:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, Attention), self.mixer
        return self.mixer

    @property
    def num_experts_read(self) -> Tensor | None:
        """int32 [1]: number of experts that had tokens in the latest forward pass; None without experts."""
        return self._mlp.num_experts_read

    def finish(self, begun: Tensor, stream: Stream, attend: Selected, *, add_in_product: bool) -> None:
        """Continue from the result of `mixer.begin` to the end of the layer.

        attend  for attention an `Attend`
        add_in_product  the next norm is fused into a product, so the last product of the layer adds to the stream itself
        """
        self.mixer.finish(begun, stream, attend, add_in_product=self._mlp.norms_in_product(stream))
        if self._last is None:
            self._mlp(stream, attend.lora, add_in_product=add_in_product)
        else:
            self._mlp(stream, attend.lora, add_in_product=self._last.norms_in_product(stream))
            self._last(stream, attend.lora, add_in_product=add_in_product)
