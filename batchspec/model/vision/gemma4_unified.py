"""What reads the images of Gemma 4 12B in place of an encoder: each patch of 48 x 48 pixels becomes a token by one product.

    patch      rgb [3 * P * P], divided by 255, -> x = norm(norm(W norm(patch) + b) + table[column, 0] + table[row, 1])
    projector  W rms(x) -> the embedding of a token

The three norms subtract the mean. Source: transformers 5, models/gemma4_unified (Gemma4UnifiedVisionEmbedder), whose published
files call it vision_embedder. Its image processor has no class on PIL images: sizes are its own, and images are resized as those
of other Gemma 4. N patches, E hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.model.fused import rms_norm
from batchspec.model.layers.base import TensorSpec
from batchspec.model.quant.base import Weights
from batchspec.model.vision.encoder import PatchEncoder, Patches
from batchspec.model.vision.gemma4 import INTEGERS, OF_ALL, channels_first, processor_of
from batchspec.model.vision.spec import VisionFiles, VisionSpec

EPS = 1e-5
_EMBEDDER, _PROJECTION = "vision_embedder.", "embed_vision.embedding_projection.weight"
_SHAPE: dict[str, Any] = {
    "patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120, "rms_norm_eps": 1e-6,
    "output_proj_dims": 3840,
}
"""vision_config without a key: transformers' defaults."""
_TYPES = ("Gemma4UnifiedImageProcessor", "Gemma4UnifiedImageProcessorFast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4EmbedderSpec(VisionSpec):
    """The shape of the products. It has no layers."""

    prefixes: ClassVar[Mapping[str, str]] = {
        f"{model}{part}": part for part in (_EMBEDDER, "embed_vision.") for model in ("model.", "")
    }
    eps: float
    num_positions: int
    """Rows of the table of positions."""

    def tensors(self) -> Iterator[TensorSpec]:
        size = self.size
        for norm, count in {"patch_ln1": self.inner, "patch_ln2": size, "pos_norm": size}.items():
            yield TensorSpec(f"{_EMBEDDER}{norm}.weight", (count,), "norm")
            yield TensorSpec(f"{_EMBEDDER}{norm}.bias", (count,), "bias")
        yield TensorSpec(f"{_EMBEDDER}patch_dense.weight", (size, self.inner), "weight")
        yield TensorSpec(f"{_EMBEDDER}patch_dense.bias", (size,), "bias")
        yield TensorSpec(f"{_EMBEDDER}pos_embedding", (self.num_positions, 2, size), "weight")
        yield TensorSpec(_PROJECTION, (self.hidden_size, size), "weight")

    def flop(self, patches: int) -> float:
        return 2.0 * patches * self.size * (self.inner + self.hidden_size)

    def build(self, weights: Weights) -> Gemma4Embedder:
        return Gemma4Embedder(self, weights)


def read_gemma4_unified(files: VisionFiles) -> VisionSpec:
    """What config.json and the image processor of processor_config.json describe. Raises CheckpointError for a missing or unknown
    key, and for what is not supported."""
    config = files.config.ranged(INTEGERS)
    if "vision_config" not in config.objects():
        raise config.refusal("no vision_config: the model reads no images; leave the images out")
    own = config.part("vision_config").ranged(INTEGERS).filled(_SHAPE)
    if own.text("model_type", "gemma4_unified_vision") != "gemma4_unified_vision":
        raise own.refusal(f"{own.shown('model_type')} is not supported; supported is gemma4_unified_vision")
    known = {*_SHAPE, *OF_ALL, "model_patch_size", "num_soft_tokens"}
    if unknown := [key for key in own if key not in known and own.given(key)]:
        raise own.refusal(f"{own.shown(unknown[0])} is unknown; remove the key if it changes nothing")
    size, side = own.integer("mm_embed_dim"), own.integer("patch_size") * own.integer("pooling_kernel_size")
    if own.integer("output_proj_dims") != size or own.integer("model_patch_size", side) != side:
        raise own.refusal(
            f"output_proj_dims must be mm_embed_dim={size}, and model_patch_size be {side}, as patch_size and "
            "pooling_kernel_size say; correct them"
        )
    text = config.part("text_config").filled({"use_bidirectional_attention": "vision"})
    processor = processor_of(files, config, own, text, _TYPES)
    if (most := processor.max_pixels // side**2) > (num_positions := own.integer("mm_posemb_size")):
        raise own.refusal(f"mm_posemb_size={num_positions} is below {most}, the tokens of a side; correct it")
    return Gemma4EmbedderSpec(
        processor=replace(processor, patch=side, merge=1, most_tokens=num_positions),
        axes=(), depth=0, size=size, heads=1, inner=3 * side**2,
        hidden_size=text.integer("hidden_size"), eps=own.number("rms_norm_eps"),
        num_positions=num_positions,
    )


class Gemma4Embedder(PatchEncoder):
    """See the module's docstring."""

    spec: Gemma4EmbedderSpec

    def __init__(self, spec: Gemma4EmbedderSpec, weights: Weights) -> None:
        super().__init__(spec, weights, f"{_EMBEDDER}patch_dense.weight")
        side, of_patch = spec.processor.patch, f"{_EMBEDDER}patch_ln1"
        self._patch = channels_first(self._patch, side)
        for name in ("weight", "bias"):
            self._weights[f"{of_patch}.{name}"] = channels_first(self._weights[f"{of_patch}.{name}"][None], side)[0]
        self._ones = torch.ones(spec.size, dtype=torch.promote_types(self._patch.dtype, torch.float32), device=self._device)

    def rows_of(self, patches: Patches) -> Tensor:
        (rows, cols), table = patches.coords, self._weights[f"{_EMBEDDER}pos_embedding"]
        x = self.product(self._normed("patch_ln1", patches.values), self._patch, self._weights[f"{_EMBEDDER}patch_dense.bias"])
        x = self._normed("patch_ln2", x) + (table[cols, 0] + table[rows, 1])
        normed = rms_norm(self._normed("pos_norm", x), self._ones, self.spec.eps)
        return self.product(normed, self._weights[_PROJECTION]).unsqueeze(1)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self._weights[f"{_EMBEDDER}{name}.{part}"] for part in ("weight", "bias"))
        return F.layer_norm(x, weight.shape, weight, bias, EPS)
