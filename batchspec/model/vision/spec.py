"""A vision encoder: the part of a checkpoint that encodes images. `VisionSpec`, its shape, is loaded as other parts are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import ClassVar

import torch

from batchspec.batch.images import ImageEncoder
from batchspec.checkpoint.config_values import ConfigReader, Json
from batchspec.images.processor import ImageProcessor
from batchspec.model.checkpoint_part import CheckpointPart, Item
from batchspec.model.layers.base import WHOLE, BlockSpec, Shard
from batchspec.model.quant.base import Slices, Weights
from batchspec.model.quant.formats import ALL_PLAIN, Formats

MOST_PATCHES = 16_384
"""Images are encoded together up to so many patches; a larger one alone."""


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """What the files of a model say of its vision encoder. where: for messages."""

    folder: Path
    config: ConfigReader
    preprocessor: Json
    preprocessor_where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec(CheckpointPart):
    """The shape of a vision encoder. Each rank has all of it, and its weights are not quantised."""

    processor: ImageProcessor
    axes: tuple[int, ...]
    """Of the language model: see `AxisPositions.axes`; (): its tokens count positions, those of images too."""
    depth: int
    """Layers."""
    size: int
    """E"""
    heads: int
    inner: int
    """Numbers between the two products of an MLP."""
    hidden_size: int
    """H"""
    theta: float = 10_000.0
    """Of the rotation by rows and columns."""
    inner_tensors: ClassVar[int] = 2
    """Tensors of `inner` numbers a patch that an MLP has at a time."""
    prefixes: ClassVar[Mapping[str, str]] = {"model.visual.": "", "visual.": ""}
    """Beginnings of the names of its tensors in files, of transformers 5 and older ones -> that of `TensorSpec.name`."""
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
            prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)
            if prefix is not None:
                found[self.prefixes[prefix] + name.removeprefix(prefix)] = item
        return found

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of its weights in memory."""
        return dtype.itemsize * sum(prod(tensor.shape) for tensor in self.tensors())

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of what one token of an image reads."""
        return dtype.itemsize * self.hidden_size

    def activation_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that encoding takes at most, besides what it returns."""
        processor = self.processor
        most = max(MOST_PATCHES, processor.max_pixels // processor.patch**2)
        values = 3 * processor.patch**2 * processor.frames
        return most * (dtype.itemsize * (8 * self.size + self.inner_tensors * self.inner) + 4 * values)

    @abstractmethod
    def flop(self, patches: int) -> float:
        """Operations that encode an image of so many patches, two for each multiplication and addition."""

    @abstractmethod
    def build(self, weights: Weights) -> ImageEncoder:
        """The encoder with these weights."""
