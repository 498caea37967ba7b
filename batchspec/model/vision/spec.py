"""A vision encoder: the part of a checkpoint that encodes images. `VisionSpec`, its shape, is loaded as other parts are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from batchspec.batch.images import ImageEncoder
from batchspec.images.processor import ImageProcessor
from batchspec.model.checkpoint_part import CheckpointPart, Item
from batchspec.model.layers.base import WHOLE, BlockSpec, Shard
from batchspec.model.quant.base import Slices, Weights
from batchspec.model.quant.formats import ALL_PLAIN, Formats

PREFIXES = ("model.visual.", "visual.")
"""What the names of its tensors begin with in files: of transformers 5, and older ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec(CheckpointPart):
    """The shape of a vision encoder. Each rank has all of it, and its weights are not quantised."""

    processor: ImageProcessor
    sections: tuple[int, int, int]
    """mrope_section of the language model: see `AxisPositions`."""
    formats: Formats = ALL_PLAIN
    shard: Shard = WHOLE

    @property
    def complete(self) -> VisionSpec:
        return self

    def blocks(self) -> Iterator[tuple[str, BlockSpec]]:
        """None: its products are no part of what is tuned or quantised."""
        return iter(())

    def slices_beside_blocks(self) -> Slices:
        return {}

    def own(self, where: str, items: Mapping[str, Item]) -> dict[str, Item]:
        found: dict[str, Item] = {}
        for name, item in items.items():
            prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
            if prefix is not None:
                found[name.removeprefix(prefix)] = item
        return found

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of its weights in memory."""
        return dtype.itemsize * sum(prod(tensor.shape) for tensor in self.tensors())

    @abstractmethod
    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of what one token of an image reads."""

    @abstractmethod
    def activation_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that encoding takes at most, besides what it returns."""

    @abstractmethod
    def flop(self, patches: int) -> float:
        """Operations that encode an image of so many patches, two for each multiplication and addition."""

    @abstractmethod
    def build(self, weights: Weights) -> ImageEncoder:
        """The encoder with these weights."""
