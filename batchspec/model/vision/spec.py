"""A vision encoder: the part of a checkpoint that encodes images. `VisionSpec`, its shape, is loaded as other parts are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
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

MOST_PATCHES, PASS_BYTES = 32_768, 768 << 20
"""Images are encoded together up to so many patches, which fill any card, and up to so many bytes of activations; a larger one
alone. The bytes are two pages of 2.1 million pixels in the encoders of 8B models; more would be taken from K/V."""


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """What the files of a model say of its vision encoder. where: for messages."""

    folder: Path
    config: ConfigReader
    preprocessor: Json
    preprocessor_where: str


def checked_theta(
    own: ConfigReader, known: Collection[str], acts: Collection[str], *, heads: str = "num_heads", usual: float = 10_000.0
) -> float:
    """The base of the rotation by rows and columns, after the checks of vision_config that all encoders share.

    known  its supported keys; acts: supported values of hidden_act; heads: the key of the number of heads; usual: the base of
           files that name none
    Raises CheckpointError for another key or activation, heads that do not divide hidden_size or are not a multiple of 4, and
    another rotation.
    """
    if unknown := [key for key in own if key not in known and own.given(key)]:
        raise own.refusal(f"{own.shown(unknown[0])} is unknown; remove the key if it changes nothing")
    if own.text("hidden_act") not in acts:
        raise own.refusal(f"{own.shown('hidden_act')} is not supported; supported are {', '.join(acts)}")
    size, number = own.integer("hidden_size"), own.integer(heads)
    if size % number or (size // number) % 4:
        raise own.refusal(f"{heads}={number} does not divide hidden_size={size} into heads of a multiple of 4; correct it")
    rope = own.part("rope_parameters") if "rope_parameters" in own.objects() else own
    if rope.text("rope_type", "axial") not in ("axial", "default"):  # transformers reads default as axial
        raise rope.refusal(f"{rope.shown('rope_type')} is not supported; supported is axial")
    return rope.number("rope_theta", usual)


def check_token(text: ConfigReader, **ids: int) -> None:
    """Raises CheckpointError for a token of images outside the vocabulary. ids: by the keys or texts that name them."""
    for name, token in ids.items():
        if token >= (size := text.integer("vocab_size")):
            raise text.refusal(f"{name}={token} is outside the vocabulary of {size} tokens; correct it")


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
    deepstack: tuple[int, ...] = ()
    """deepstack_visual_indexes of Qwen3-VL: layers whose outputs each have a merger, in the order of deepstack_merger_list. The
    outputs are added after layers 0, 1, ... of the language model in the order of the encoder's layers."""
    ordered: bool = False
    """Whether the bits of an image depend on no other image (decode.deterministic)."""
    inner_tensors: ClassVar[int] = 2
    """How many tensors of [patches, inner] an MLP has in memory at the same time."""
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

    def patch_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of activations that encoding takes for each patch of a pass, at most."""
        values = 3 * self.processor.patch**2 * self.processor.frames
        return dtype.itemsize * (8 * self.size + self.inner_tensors * self.inner) + 4 * values

    def most_patches(self, dtype: torch.dtype) -> int:
        """Patches up to which images are encoded together."""
        return min(MOST_PATCHES, PASS_BYTES // self.patch_bytes(dtype))

    def activation_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that encoding takes at most, besides what it returns."""
        largest = self.processor.max_pixels // self.processor.patch**2
        return max(self.most_patches(dtype), largest) * self.patch_bytes(dtype)

    @abstractmethod
    def flop(self, patches: int) -> float:
        """Operations that encode an image of so many patches, two for each multiplication and addition."""

    @abstractmethod
    def build(self, weights: Weights) -> ImageEncoder:
        """The encoder with these weights."""
