"""A decoder layer: a mixer of a row's tokens, then an MLP of any kind, or one of them alone. Target, EAGLE-3 heads, PARD and
training share it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from batchspec.cache.kept import Kept
from batchspec.cache.layer_state import LayerState
from batchspec.model.layers.attention.block import Attention, AttentionSpec
from batchspec.model.layers.base import BlockSpec, Shard
from batchspec.model.layers.forward import Block, BlockSource, Selected, SelectedTokens, Stream
from batchspec.model.layers.head_mixer import HeadMixer, HeadMixerSpec
from batchspec.model.layers.kind import Computing, Inputs, Mixer, MixerSpec
from batchspec.model.layers.passes import Pass


class MlpSpec(BlockSpec, Protocol):
    """The shape of a block that computes each token by itself."""

    def build(self, source: BlockSource) -> Block:
        """The block that computes, its weights taken from `source`."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The shapes of a layer."""

    mixer: MixerSpec | None
    """None: the layer is an MLP."""
    mlps: tuple[MlpSpec, ...]
    """The blocks after the mixer, in their order: usually one; (): the layer is a mixer."""

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        return self.mlps if self.mixer is None else (self.mixer, *self.mlps)

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, AttentionSpec), self.mixer
        return self.mixer

    @property
    def of_head(self) -> HeadMixerSpec:
        """The mixer of a draft head's layer, which is of a kind that heads may have."""
        return cast(HeadMixerSpec, self.mixer)

    @property
    def mlp(self) -> MlpSpec:
        """The block after the mixer, of a layer that has one."""
        return self.mlps[0]

    def kept(self, run: Computing) -> LayerState:
        """What it keeps of a row."""
        return LayerState(None) if self.mixer is None else self.mixer.kept(run)

    def inputs(self, pass_: Pass, kept: Kept) -> Inputs:
        """What the layer reads in a pass besides the stream."""
        return Inputs(None, SelectedTokens(pass_.lora)) if self.mixer is None else self.mixer.inputs(pass_, kept)

    def sharded(self, shard: Shard, units: Iterable[int]) -> LayerSpec:
        """The shape of what one rank computes. units: of each of `blocks`, see `BlockSpec.sharded`."""
        units = iter(units)
        mixer = None if self.mixer is None else self.mixer.sharded(shard, next(units))
        return LayerSpec(mixer, tuple(mlp.sharded(shard, unit) for mlp, unit in zip(self.mlps, units, strict=True)))

    def build(self, source: BlockSource) -> DecoderLayer:
        mixer = None if self.mixer is None else self.mixer.build(source)
        return DecoderLayer(mixer, *(mlp.build(source) for mlp in self.mlps))


class DecoderLayer:
    """A layer's forward pass is `begin` and then `finish`."""

    def __init__(self, mixer: Mixer | None, *mlps: Block) -> None:
        self.mixer, self._mlps = mixer, mlps

    @property
    def attention(self) -> Attention:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, Attention), self.mixer
        return self.mixer

    @property
    def of_head(self) -> HeadMixer:
        """The mixer of a draft head's layer."""
        return cast(HeadMixer, self.mixer)

    @property
    def num_experts_read(self) -> Tensor | None:
        """int32 [1]: number of experts that had tokens in the latest forward pass; None without experts."""
        return next((mlp.num_experts_read for mlp in self._mlps if mlp.num_experts_read is not None), None)

    def pass_sizes(self, most: int) -> set[int]:
        """Of its blocks after the mixer: see `Block`."""
        return {size for mlp in self._mlps for size in mlp.pass_sizes(most)}

    def norms_in_product(self, stream: Stream) -> bool:
        """Of its first block: see `Block`."""
        return (self._mlps[0] if self.mixer is None else self.mixer).norms_in_product(stream)

    def begin(self, stream: Stream, store: Any, out_aux: Tensor | None = None) -> Tensor | None:
        """The first part of the mixer: see `Mixer`; None without one. out_aux [T, H]: the layer's input stream is written here if
        it is given."""
        if self.mixer is not None:
            return self.mixer.begin(stream, store, out_aux)
        if out_aux is not None:
            stream.settle(out_aux)
        return None

    def finish(self, begun: Tensor | None, stream: Stream, attend: Selected, *, add_in_product: bool) -> None:
        """Continue from the result of `begin` to the end of the layer.

        attend  `Inputs.finish`
        add_in_product  the next norm is fused into a product, so the last product of the layer adds to the stream itself
        """
        if self.mixer is not None and begun is not None:
            follows = self._mlps[0].norms_in_product(stream) if self._mlps else add_in_product
            self.mixer.finish(begun, stream, attend, add_in_product=follows)
        for index, mlp in enumerate(self._mlps, 1):
            follows = self._mlps[index].norms_in_product(stream) if index < len(self._mlps) else add_in_product
            mlp(stream, attend.lora, add_in_product=follows)
