"""The vision encoder of Qwen3-VL and of Qwen3.5 to 3.8: a ViT over patches and a 2 x 2 merger, for Qwen3-VL more of inner layers.

    patch      rgb [frames * 3 * P * P], normalised, -> x = W p + b + learned grid position
    layer      x += proj(attend(rotate(qkv(norm(x)))));  x += fc2(gelu(fc1(norm(x))))
    merger     fc2(gelu(fc1(cat of norm(x) of merge^2 patches))) -> the embedding of a token
    deepstack  after some layers fc2(gelu(fc1(norm(cat of x)))) -> what is added after the text model's first layers

Source: transformers 5, models/qwen3_vl and models/qwen3_5 (Qwen3VLVisionModel). N patches, E hidden, H of the text model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.checkpoint.config_values import ConfigReader, Ranges
from batchspec.images.processor import read_processor
from batchspec.kernels.norm_rope.rotate_heads import rotate_heads
from batchspec.model.layers.base import TensorSpec
from batchspec.model.quant.base import Weights
from batchspec.model.vision.blocks import AttentionWithin, axial_angles, grid_positions
from batchspec.model.vision.encoder import PatchEncoder, Patches
from batchspec.model.vision.spec import VisionFiles, VisionSpec, check_token, checked_theta

EPS = 1e-6
GELU: dict[str, Literal["none", "tanh"]] = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}
INTEGERS: Ranges = {
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
UNREAD = ("model_type", "initializer_range", "dtype", "torch_dtype", "transformers_version", "architectures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VlSpec(VisionSpec):
    """The shape of the ViT."""

    gelu: Literal["none", "tanh"]
    num_positions: int
    """Rows of the learned grid, a square."""

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


def read_qwen3_vl(files: VisionFiles, *, sections: tuple[int, ...], deepstack: tuple[int, ...] = ()) -> VisionSpec:
    """The vision encoder that config.json and preprocessor_config.json describe.

    sections, deepstack  what counts without mrope_section and deepstack_visual_indexes
    Raises CheckpointError for a missing or unknown key, and for what is not supported.
    """
    config = files.config.ranged(INTEGERS)
    own = config.part("vision_config").ranged(INTEGERS).filled(_SHAPE)
    given = own.integers("deepstack_visual_indexes")
    deepstack = deepstack if given is None else given
    theta = checked_theta(own, {*_SHAPE, *UNREAD, "deepstack_visual_indexes", "rope_parameters"}, GELU)
    num_positions = own.integer("num_position_embeddings")
    if own.integer("in_channels") != 3 or round(num_positions**0.5) ** 2 != num_positions:
        raise own.refusal("in_channels must be 3 and num_position_embeddings a square; correct them")
    text = config.part("text_config")
    placeholder, layers = checked_placeholder(config, own, text), text.integer("num_hidden_layers")
    if len({*deepstack}) < len(deepstack) or len(deepstack) > layers or max(deepstack, default=0) >= own.integer("depth"):
        raise own.refusal(f"{own.shown('deepstack_visual_indexes')} must be different layers of the vision encoder; correct it")
    processor = read_processor(
        files.preprocessor, files.preprocessor_where, patch=own.integer("patch_size"), merge=own.integer("spatial_merge_size"),
        frames=own.integer("temporal_patch_size"), placeholder=placeholder,
    )
    return Qwen3VlSpec(
        processor=processor, axes=interleaved(_sections(text, sections)), depth=own.integer("depth"),
        size=own.integer("hidden_size"), heads=own.integer("num_heads"), inner=own.integer("intermediate_size"),
        gelu=GELU[own.text("hidden_act")], hidden_size=own.integer("out_hidden_size"), num_positions=num_positions,
        deepstack=deepstack, theta=theta,
    )


def checked_placeholder(config: ConfigReader, own: ConfigReader, text: ConfigReader) -> int:
    """image_token_id of config.json. own: vision_config; text: the keys of the language model. Raises CheckpointError if it is
    outside the vocabulary, or embeddings of images have another size than those of tokens."""
    if (hidden := own.integer("out_hidden_size")) != text.integer("hidden_size"):
        raise own.refusal(f"out_hidden_size={hidden} is not the hidden_size of the language model; correct it")
    check_token(text, image_token_id=(placeholder := config.integer("image_token_id")))
    return placeholder


def _sections(text: ConfigReader, usual: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of frequencies that read each axis of positions."""
    name = "rope_scaling" if text.differs("rope_scaling", None, {}) else "rope_parameters"
    rope = text.part(name).ranged(INTEGERS) if name in text.objects() else None
    found = usual if rope is None else rope.integers("mrope_section") or usual
    if len(found) != 3 or (rope is not None and not rope.flag("mrope_interleaved", True)):
        raise text.refusal(f"{name}.mrope_section must be three numbers, and mrope_interleaved true; correct it")
    return found


def interleaved(sections: tuple[int, ...]) -> tuple[int, ...]:
    """The axis that each frequency reads: 1, 4, 7, ... the height, 2, 5, 8, ... the width, as often as mrope_section says, the
    others the time. Source: transformers, models/qwen3_vl (recomposition_frequencies)."""
    axes = [0] * max(sum(sections), 3 * max(sections[1:]))
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    return tuple(axes)


class Qwen3VlEncoder(PatchEncoder):
    """The ViT."""

    spec: Qwen3VlSpec

    def __init__(self, spec: Qwen3VlSpec, weights: Weights) -> None:
        super().__init__(spec, weights, "patch_embed.proj.weight")

    def rows_of(self, patches: Patches) -> Tensor:
        spec, table, dtype = self.spec, self._weights["pos_embed.weight"], self._patch.dtype
        x = self.product(patches.values, self._patch, self._weights["patch_embed.proj.bias"])
        coords = [self.order(grid) for grid in patches.grids]
        of_groups = zip(coords, patches.grids, patches.counts, strict=True)
        x = x + torch.cat([grid_positions(table, own, grid).to(dtype).repeat(count, 1) for own, grid, count in of_groups])
        angles = axial_angles(patches.coords, spec.size // spec.heads, spec.theta)
        attend = AttentionWithin(patches.cu_seqlens, dtype, self._device)
        deeper: list[Tensor] = []
        for layer in range(spec.depth):
            x = self._layer(f"blocks.{layer}.", x, angles, attend)
            if layer in spec.deepstack:
                name = f"deepstack_merger_list.{spec.deepstack.index(layer)}."
                deeper.append(self._merged(name, x, inner_norm=False))
        return torch.stack([self._merged("merger.", x, inner_norm=True), *deeper], 1)

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
