"""The vision encoder of Qwen2.5-VL: a ViT whose layers attend within windows of an image, some within all of it, and a merger.

    patch    rgb [frames * 3 * P * P], normalised, -> x = W p
    layer    x += proj(attend(rotate(qkv(rms(x)))));  x += down(act(gate(y)) * up(y)),  y = rms(x)
    merger   mlp.2(gelu(mlp.0(cat of rms(x) of merge^2 patches))) -> the embedding of a token

Patches are computed window by window, so that each window is a sequence of its own; the tokens are put back row by row.
Source: transformers 5, models/qwen2_5_vl (Qwen2_5_VisionTransformerPretrainedModel) and vision_utils.py. N patches, E hidden,
H of the text model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.upload import upload
from batchspec.checkpoint.config_values import ConfigReader
from batchspec.images.processor import read_processor
from batchspec.kernels.norm_rope.rotate_heads import rotate_heads
from batchspec.model.layers.attention.rope_config import read_sections
from batchspec.model.layers.base import TensorSpec
from batchspec.model.quant.base import Weights
from batchspec.model.vision.blocks import AttentionWithin, Grid, axial_angles, merge_order
from batchspec.model.vision.encoder import ACTIVATIONS, PatchEncoder, Patches, activate
from batchspec.model.vision.qwen3_vl import INTEGERS, UNREAD, checked_placeholder
from batchspec.model.vision.spec import VisionFiles, VisionSpec, checked_theta

EPS = 1e-6
_SHAPE = {
    "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16, "in_channels": 3,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
"""vision_config without a key: transformers' defaults."""
_INTEGERS = {**INTEGERS, "window_size": (1, 2**16), "fullatt_block_indexes": (0, 1023), "in_chans": (3, 3)}
_UNREAD = (*UNREAD, "tokens_per_second", "spatial_patch_size", "in_chans")
"""Of videos; other names of patch_size and in_channels in published files."""
_SECTIONS = (16, 24, 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2_5VlSpec(VisionSpec):
    """The shape of the ViT."""

    inner_tensors: ClassVar[int] = 3
    act: Literal["silu", "none", "tanh"]
    window: int
    """Tokens along each side of a window."""
    whole: tuple[int, ...]
    """Layers that attend to all of an image."""

    def tensors(self) -> Iterator[TensorSpec]:
        processor, size = self.processor, self.size
        wide, patch = size * processor.merge**2, (processor.frames, processor.patch, processor.patch)
        yield TensorSpec("patch_embed.proj.weight", (size, 3, *patch), "weight")
        for layer in range(self.depth):
            at = f"blocks.{layer}."
            yield TensorSpec(f"{at}norm1.weight", (size,), "norm")
            yield TensorSpec(f"{at}norm2.weight", (size,), "norm")
            products = {"attn.qkv": (3 * size, size), "attn.proj": (size, size), "mlp.gate_proj": (self.inner, size)}
            products |= {"mlp.up_proj": (self.inner, size), "mlp.down_proj": (size, self.inner)}
            for name, shape in products.items():
                yield TensorSpec(f"{at}{name}.weight", shape, "weight")
                yield TensorSpec(f"{at}{name}.bias", shape[:1], "bias")
        yield TensorSpec("merger.ln_q.weight", (size,), "norm")
        for name, rows in (("merger.mlp.0", wide), ("merger.mlp.2", self.hidden_size)):
            yield TensorSpec(f"{name}.weight", (rows, wide), "weight")
            yield TensorSpec(f"{name}.bias", (rows,), "bias")

    def flop(self, patches: int) -> float:
        size, wide = self.size, self.size * self.processor.merge**2
        weights = size * 3 * self.processor.frames * self.processor.patch**2 + self.depth * (4 * size**2 + 3 * size * self.inner)
        merger = (wide**2 + self.hidden_size * wide) / self.processor.merge**2
        within = min(patches, (self.window * self.processor.merge) ** 2)
        seen = len(self.whole) * patches + (self.depth - len(self.whole)) * within
        return 2.0 * patches * (weights + merger + 2 * size * seen)

    def build(self, weights: Weights) -> Qwen2_5VlEncoder:
        return Qwen2_5VlEncoder(self, weights, "patch_embed.proj.weight")


def read_qwen2_5_vl(files: VisionFiles) -> VisionSpec:
    """The vision encoder that config.json and preprocessor_config.json describe. Raises CheckpointError for a missing or unknown
    key, and for what is not supported."""
    config = files.config.ranged(_INTEGERS).filled({"image_token_id": 151_655})
    own = config.part("vision_config").ranged(_INTEGERS).filled(_SHAPE)
    theta, depth = checked_theta(own, {*_SHAPE, *_UNREAD, "rope_parameters"}, ACTIVATIONS), own.integer("depth")
    if own.integer("in_channels") != 3:
        raise own.refusal("in_channels must be 3; correct it")
    patch, merge = own.integer("patch_size"), own.integer("spatial_merge_size")
    window = own.integer("window_size") // merge // patch
    whole = own.integers("fullatt_block_indexes") or ()
    if not window or len({*whole}) < len(whole) or max(whole, default=0) >= depth:
        raise own.refusal(
            f"{own.shown('window_size')} must be at least {merge * patch}, and fullatt_block_indexes different layers; correct it"
        )
    text = config.part("text_config") if "text_config" in config.objects() else config  # older files have its keys beside it
    placeholder = checked_placeholder(config, own, text)
    processor = read_processor(
        files.preprocessor, files.preprocessor_where, patch=patch, merge=merge, frames=own.integer("temporal_patch_size"),
        placeholder=placeholder,
    )
    return Qwen2_5VlSpec(
        processor=processor, axes=contiguous(text, _SECTIONS), depth=depth, size=own.integer("hidden_size"),
        heads=own.integer("num_heads"), inner=own.integer("intermediate_size"), act=ACTIVATIONS[own.text("hidden_act")],
        hidden_size=own.integer("out_hidden_size"), window=window, whole=whole, theta=theta,
    )


def contiguous(text: ConfigReader, usual: tuple[int, ...]) -> tuple[int, ...]:
    """The axis that each frequency of whole heads reads: first those of the time, then of the height, then of the width. usual:
    mrope_section of a file without it. Raises CheckpointError."""
    name = "rope_scaling" if text.differs("rope_scaling", None, {}) else "rope_parameters"
    pairs = text.integer("head_dim", text.integer("hidden_size") // text.integer("num_attention_heads")) // 2
    sections = read_sections(text.part(name), usual, pairs)
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def window_order(grid: Grid, side: int) -> tuple[NDArray[np.int64], list[int]]:
    """int64 [n] the tokens of a grid, numbered row by row, window by window, and the size of each window. side: tokens along each
    side of a window; those at the end of a row or column may be smaller."""
    rows, cols = grid
    token = np.arange(rows * cols)
    number = token // cols // side * -(-cols // side) + token % cols // side
    return number.argsort(kind="stable"), np.bincount(number).tolist()


class Qwen2_5VlEncoder(PatchEncoder):
    """The ViT."""

    spec: Qwen2_5VlSpec

    def order(self, grid: Grid) -> Tensor:
        merge, (order, _) = self.spec.processor.merge, window_order(self._tokens(grid), self.spec.window)
        places = upload(order, torch.int64, self._device)
        coords: Tensor = merge_order(grid, merge, self._device).unflatten(1, (-1, merge**2)).index_select(1, places)
        return coords.flatten(1)

    def _tokens(self, grid: Grid) -> Grid:
        return grid[0] // self.spec.processor.merge, grid[1] // self.spec.processor.merge

    def rows_of(self, patches: Patches) -> Tensor:
        spec = self.spec
        x = self.product(patches.values, self._patch)
        angles = axial_angles(patches.coords, spec.size // spec.heads, spec.theta)
        places, sizes, begin = list[NDArray[np.int64]](), list[int](), 0
        for grid, count in zip(patches.grids, patches.counts, strict=True):
            own, of_windows = window_order(self._tokens(grid), spec.window)
            for _ in range(count):
                places.append(own + begin)
                sizes += of_windows
                begin += len(own)
        windows = [0, *accumulate(size * spec.processor.merge**2 for size in sizes)]
        within, whole = (AttentionWithin(own, x.dtype, self._device) for own in (windows, patches.cu_seqlens))
        for layer in range(spec.depth):
            x = self._layer(f"blocks.{layer}.", x, angles, whole if layer in spec.whole else within)
        wide = self._rms("merger.ln_q", x, EPS).view(-1, spec.size * spec.processor.merge**2)
        found = self._linear("merger.mlp.2", F.gelu(self._linear("merger.mlp.0", wide)))
        rows = torch.empty_like(found)
        rows[upload(np.concatenate(places), torch.int64, self._device)] = found
        return rows.unsqueeze(1)

    def _layer(self, name: str, x: Tensor, angles: tuple[Tensor, Tensor], attend: AttentionWithin) -> Tensor:
        heads = self.spec.heads
        qkv = self._linear(f"{name}attn.qkv", self._rms(f"{name}norm1", x, EPS)).unflatten(1, (3 * heads, -1))
        rotate_heads(qkv[:, : 2 * heads], *angles)
        x = x + self._linear(f"{name}attn.proj", attend(*qkv.split(heads, 1)))
        y = self._rms(f"{name}norm2", x, EPS)
        inner = activate(self.spec.act, self._linear(f"{name}mlp.gate_proj", y)).mul_(self._linear(f"{name}mlp.up_proj", y))
        return x + self._linear(f"{name}mlp.down_proj", inner)
