"""A decoder layer as pure shapes."""

from __future__ import annotations

from dataclasses import dataclass

from batchspec.model.blocks.attention import AttentionSpec
from batchspec.model.blocks.base import BlockSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Attention, then an MLP of any kind."""

    attention: AttentionSpec
    mlp: BlockSpec

    @property
    def blocks(self) -> tuple[BlockSpec, BlockSpec]:
        return self.attention, self.mlp
