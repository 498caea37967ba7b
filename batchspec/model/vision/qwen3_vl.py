"""The vision encoder of Qwen3-VL and of Qwen3.5 to 3.8: a ViT over patches and a 2 x 2 merger, for Qwen3-VL more of inner layers.

    patch      rgb [frames * 3 * P * P], normalised, -> x = W p + b + learned grid position
    layer      x += proj(attend(rotate(qkv(norm(x)))));  x += fc2(gelu(fc1(norm(x))))
    merger     fc2(gelu(fc1(cat of norm(x) of merge^2 patches))) -> the embedding of a token
    deepstack  after some layers fc2(gelu(fc1(norm(cat of x)))) -> what is added after the text model's first layers

Source: transformers 5, models/qwen3_vl and models/qwen3_5 (Qwen3VLVisionModel). N patches, E hidden, H of the text model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.upload import upload
from batchspec.checkpoint.config_values import ConfigReader, Json
from batchspec.images.processor import read_processor
from batchspec.kernels.norm_rope.rotate_heads import rotate_heads
from batchspec.model.layers.base import TensorSpec
from batchspec.model.quant.base import Weights
from batchspec.model.vision.blocks import AttentionWithin, axial_angles, grid_positions, merge_order
from batchspec.model.vision.spec import VisionSpec

EPS = 1e-6
MOST_PATCHES = 16_384
"""Images are encoded together up to so many patches; a larger one alone."""
GELU: dict[str, Literal["none", "tanh"]] = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}
_INTEGERS = {
    "depth": (1, 1024), "num_heads": (1, 2**12), "in_channels": (1, 16), "patch_size": (1, 256), "spatial_merge_size": (1, 16),
    "temporal_patch_size": (1, 16), "out_hidden_size": (1, 2**20), "num_position_embeddings": (4, 2**24),
    "deepstack_visual_indexes": (0, 1023), "image_token_id": (0, 2**31 - 1), "mrope_section": (0, 2**12),
}
_SHAPE = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
"""vision_config without a key: transformers' defaults."""
_UNREAD = ("model_type", "initializer_range", "dtype", "torch_dtype", "transformers_version", "architectures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VlSpec(VisionSpec):
    """The shape of the ViT."""

    depth: int
    size: int
    """E"""
    heads: int
    inner: int
    """Numbers between the two products of an MLP."""
    gelu: Literal["none", "tanh"]
    hidden_size: int
    """H"""
    num_positions: int
    """Rows of the learned grid, a square."""
    deepstack: tuple[int, ...] = ()
    """deepstack_visual_indexes: layers of the ViT whose outputs each have a merger, in the order of deepstack_merger_list. The
    outputs are added after text layers 0, 1, ... in the order of the ViT's layers."""
    theta: float = 10_000.0

    def tensors(self) -> Iterator[TensorSpec]:
        processor, size = self.processor, self.size
        patch, wide = (processor.frames, processor.patch, processor.patch), size * processor.merge**2
        yield TensorSpec("patch_embed.proj.weight", (size, 3, *patch), "weight")
        yield TensorSpec("patch_embed.proj.bias", (size,), "bias")
        yield TensorSpec("pos_embed.weight", (self.num_positions, size), "weight")
        for layer in range(self.depth):
            for norm in ("norm1", "norm2"):
                yield from _norm(f"blocks.{layer}.{norm}", size)
            products = {"attn.qkv": (3 * size, size), "attn.proj": (size, size), "mlp.linear_fc1": (self.inner, size)}
            for name, (rows, k) in {**products, "mlp.linear_fc2": (size, self.inner)}.items():
                yield from _linear(f"blocks.{layer}.{name}", rows, k)
        for name, normed in [("merger", size), *((f"deepstack_merger_list.{i}", wide) for i in range(len(self.deepstack)))]:
            yield from _norm(f"{name}.norm", normed)
            yield from _linear(f"{name}.linear_fc1", wide, wide)
            yield from _linear(f"{name}.linear_fc2", self.hidden_size, wide)

    def row_bytes(self, dtype: torch.dtype) -> int:
        return dtype.itemsize * (1 + len(self.deepstack)) * self.hidden_size

    def activation_bytes(self, dtype: torch.dtype) -> int:
        processor = self.processor
        most = max(MOST_PATCHES, processor.max_pixels // processor.patch**2)
        return most * (dtype.itemsize * (8 * self.size + 2 * self.inner) + 4 * (3 * processor.patch**2 * processor.frames))

    def flop(self, patches: int) -> float:
        size, wide = self.size, self.size * self.processor.merge**2
        weights = size * 3 * self.processor.frames * self.processor.patch**2 + self.depth * (4 * size**2 + 2 * size * self.inner)
        mergers = (1 + len(self.deepstack)) * (wide**2 + self.hidden_size * wide) / self.processor.merge**2
        return 2.0 * patches * (weights + mergers + 2 * self.depth * size * patches)

    def build(self, weights: Weights) -> Qwen3VlEncoder:
        return Qwen3VlEncoder(self, weights)


def _norm(name: str, size: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (size,), "norm")
    yield TensorSpec(f"{name}.bias", (size,), "bias")


def _linear(name: str, rows: int, k: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (rows, k), "weight")
    yield TensorSpec(f"{name}.bias", (rows,), "bias")


def read_qwen3_vl(
    values: Json, where: str, preprocessor: Json, preprocessor_where: str, *, sections: tuple[int, ...],
    deepstack: tuple[int, ...] = (),
) -> VisionSpec:
    """The vision encoder that config.json and preprocessor_config.json describe.

    sections, deepstack  what counts without mrope_section and deepstack_visual_indexes
    Raises CheckpointError for a missing or unknown key, and for what is not supported.
    """
    config = ConfigReader(values, where).ranged(_INTEGERS)
    own = config.part("vision_config").ranged(_INTEGERS).filled(_SHAPE)
    given = own.integers("deepstack_visual_indexes")
    deepstack = deepstack if given is None else given
    rope = own.part("rope_parameters") if "rope_parameters" in own.objects() else None
    known = {*_SHAPE, *_UNREAD, "deepstack_visual_indexes", "rope_parameters"}
    if unknown := [key for key in own if key not in known and own.given(key)]:
        raise own.refusal(f"{own.shown(unknown[0])} is unknown; remove the key if it changes nothing")
    act, size, heads = own.text("hidden_act"), own.integer("hidden_size"), own.integer("num_heads")
    if act not in GELU:
        raise own.refusal(f"{own.shown('hidden_act')} is not supported; supported are {', '.join(GELU)}")
    if size % heads or (size // heads) % 4:
        raise own.refusal(f"num_heads={heads} does not divide hidden_size={size} into heads of a multiple of 4; correct it")
    num_positions = own.integer("num_position_embeddings")
    if own.integer("in_channels") != 3 or round(num_positions**0.5) ** 2 != num_positions:
        raise own.refusal("in_channels must be 3 and num_position_embeddings a square; correct them")
    if rope is not None and rope.text("rope_type", "axial") != "axial":
        raise rope.refusal(f"{rope.shown('rope_type')} is not supported; supported is axial")
    text = config.part("text_config")
    hidden, layers = own.integer("out_hidden_size"), text.integer("num_hidden_layers")
    if hidden != text.integer("hidden_size"):
        raise own.refusal(f"out_hidden_size={hidden} is not the hidden_size of the language model; correct it")
    if len({*deepstack}) < len(deepstack) or len(deepstack) > layers or max(deepstack, default=0) >= own.integer("depth"):
        raise own.refusal(f"{own.shown('deepstack_visual_indexes')} must be different layers of the vision encoder; correct it")
    placeholder = config.integer("image_token_id")
    if placeholder >= text.integer("vocab_size"):
        raise config.refusal(f"image_token_id={placeholder} is outside the vocabulary; correct it")
    processor = read_processor(
        preprocessor, preprocessor_where, patch=own.integer("patch_size"), merge=own.integer("spatial_merge_size"),
        frames=own.integer("temporal_patch_size"), placeholder=placeholder,
    )
    return Qwen3VlSpec(
        processor=processor, sections=_sections(text, sections), depth=own.integer("depth"), size=size, heads=heads,
        inner=own.integer("intermediate_size"), gelu=GELU[act], hidden_size=hidden,
        num_positions=num_positions, deepstack=deepstack,
        theta=10_000.0 if rope is None else rope.number("rope_theta", 10_000.0),
    )


def _sections(text: ConfigReader, usual: tuple[int, ...]) -> tuple[int, int, int]:
    """The numbers of frequencies that read each axis of positions."""
    name = "rope_scaling" if text.differs("rope_scaling", None, {}) else "rope_parameters"
    rope = text.part(name).ranged(_INTEGERS) if name in text.objects() else None
    found = usual if rope is None else rope.integers("mrope_section") or usual
    if len(found) != 3 or (rope is not None and not rope.flag("mrope_interleaved", True)):
        raise text.refusal(f"{name}.mrope_section must be three numbers, and mrope_interleaved true; correct it")
    return found[0], found[1], found[2]


class Qwen3VlEncoder:
    """An `ImageEncoder`. All images of a call are computed together, in passes of up to MOST_PATCHES patches."""

    def __init__(self, spec: Qwen3VlSpec, weights: Weights) -> None:
        self.spec = spec
        self._weights = {tensor.name: weights.tensor(tensor.name) for tensor in spec.tensors()}
        self._patch = self._weights["patch_embed.proj.weight"].flatten(1)
        self._device = self._patch.device
        self._values = torch.from_numpy(spec.processor.values).to(self._device)

    @property
    def sections(self) -> tuple[int, int, int]:
        return self.spec.sections

    @torch.inference_mode()
    def encode(self, images: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        order = sorted(range(len(images)), key=lambda i: images[i].shape)  # equal sizes are prepared together
        encoded: list[Tensor] = []
        group: list[NDArray[np.uint8]] = []
        count, area = 0, self.spec.processor.patch**2
        for image in (images[i] for i in order):
            own = image.shape[0] * image.shape[1] // area
            if group and count + own > MOST_PATCHES:
                encoded += self._pass(group)
                group, count = [], 0
            group.append(image)
            count += own
        of_image = dict(zip(order, encoded + self._pass(group), strict=True))
        return [of_image[i] for i in range(len(images))]

    def _pass(self, images: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """images: those of one size one after another."""
        processor, spec, dtype = self.spec.processor, self.spec, self._patch.dtype
        groups = [list(group) for _, group in groupby(images, key=lambda image: image.shape)]
        grids = [(group[0].shape[0] // processor.patch, group[0].shape[1] // processor.patch) for group in groups]
        coords = [merge_order(grid, processor.merge).to(self._device) for grid in grids]
        sizes = [rows * cols for (rows, cols), group in zip(grids, groups, strict=True) for _ in group]
        cu_seqlens = [0, *accumulate(sizes)]
        patches = torch.cat([self._patches(group, own) for group, own in zip(groups, coords, strict=True)])
        x = F.linear(patches.to(dtype), self._patch, self._weights["patch_embed.proj.bias"])
        table, of_groups = self._weights["pos_embed.weight"], list(zip(groups, coords, grids, strict=True))
        x = x + torch.cat([grid_positions(table, own, grid).to(dtype).repeat(len(group), 1) for group, own, grid in of_groups])
        all_coords = torch.cat([own.repeat(1, len(group)) for group, own, _ in of_groups], 1)
        angles = axial_angles(all_coords, spec.size // spec.heads, spec.theta)
        attend = AttentionWithin(cu_seqlens, dtype, self._device)
        deeper: list[Tensor] = []
        for layer in range(spec.depth):
            x = self._layer(f"blocks.{layer}.", x, angles, attend)
            if layer in spec.deepstack:
                name = f"deepstack_merger_list.{spec.deepstack.index(layer)}."
                deeper.append(self._merged(name, x, inner_norm=False))
        rows = [self._merged("merger.", x, inner_norm=True), *deeper]
        parts = torch.stack(rows, 1).split([size // processor.merge**2 for size in sizes])
        return [part.clone() for part in parts] if len(parts) > 1 else list(parts)  # a view would keep all parts in memory

    def _patches(self, images: Sequence[NDArray[np.uint8]], coords: Tensor) -> Tensor:
        """The normalised patches of images of one size, fp32 [images * n, 3 * frames * P * P], each image's in the order of
        coords int64 [2, n]."""
        side = self.spec.processor.patch
        cells = upload(np.stack(images), torch.uint8, self._device).unflatten(2, (-1, side)).unflatten(1, (-1, side))
        cells = cells.permute(0, 1, 3, 5, 2, 4)[:, coords[0], coords[1]].flatten(0, 1).long()  # [images * n, 3, P, P]
        colours = torch.arange(3, device=self._device).view(1, 3, 1, 1)
        values = self._values[colours, cells]
        return values[:, :, None].expand(-1, -1, self.spec.processor.frames, -1, -1).flatten(1)

    def _layer(self, name: str, x: Tensor, angles: tuple[Tensor, Tensor], attend: AttentionWithin) -> Tensor:
        heads = self.spec.heads
        qkv = self._linear(f"{name}attn.qkv", self._normed(f"{name}norm1", x)).unflatten(1, (3 * heads, -1))
        rotate_heads(qkv[:, : 2 * heads], *angles)
        x = x + self._linear(f"{name}attn.proj", attend(*qkv.split(heads, 1)))
        inner = F.gelu(self._linear(f"{name}mlp.linear_fc1", self._normed(f"{name}norm2", x)), approximate=self.spec.gelu)
        return x + self._linear(f"{name}mlp.linear_fc2", inner)

    def _merged(self, name: str, x: Tensor, *, inner_norm: bool) -> Tensor:
        """[tokens, H]. inner_norm: each patch is normed, else the patches of a token together."""
        width = self.spec.processor.merge**2 * self.spec.size
        x = self._normed(f"{name}norm", x).view(-1, width) if inner_norm else self._normed(f"{name}norm", x.reshape(-1, width))
        return self._linear(f"{name}linear_fc2", F.gelu(self._linear(f"{name}linear_fc1", x)))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, EPS)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])
