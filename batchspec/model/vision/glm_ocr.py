"""The vision encoder of GLM-OCR, called CogViT: a ViT with normed heads, then a convolution that joins patches, and a gated MLP.

    patch    rgb [frames * 3 * P * P], normalised, -> x = W p + b
    layer    x += proj(attend(rotate(rms of heads of q, k), v of qkv(rms(x))));  x += down(act(gate(y)) * up(y)),  y = rms(x)
    token    z = downsample(rms(x) of merge^2 patches) + b
    merger   down(act(gate(y)) * up(y)),  y = gelu(layer_norm(proj(z)))

Source: transformers 5, models/glm_ocr (GlmOcrVisionModel). N patches, E hidden, H of the text model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from batchspec.images.glm_processor import read_glm_processor
from batchspec.kernels.norm_rope.rotate_heads import rotate_heads
from batchspec.model.families.glm_ocr import SECTIONS
from batchspec.model.layers.base import TensorSpec
from batchspec.model.quant.base import Weights
from batchspec.model.vision.blocks import AttentionWithin, axial_angles
from batchspec.model.vision.encoder import ACTIVATIONS, PatchEncoder, Patches, activate
from batchspec.model.vision.qwen2_5_vl import contiguous
from batchspec.model.vision.qwen3_vl import INTEGERS, UNREAD, checked_placeholder
from batchspec.model.vision.spec import VisionFiles, VisionSpec, checked_theta

LAYER_NORM_EPS = 1e-5
_SHAPE = {
    "depth": 24, "hidden_size": 1024, "hidden_act": "silu", "intermediate_size": 4096, "num_heads": 16, "in_channels": 3,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 1536, "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
"""vision_config without a key: transformers' defaults."""
_UNREAD = (*UNREAD, "image_size", "attention_dropout", "hidden_dropout_prob")


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmOcrSpec(VisionSpec):
    """The shape of the ViT."""

    inner_tensors: ClassVar[int] = 3
    act: Literal["silu", "none", "tanh"]
    eps: float
    bias: bool
    """Of the products of the layers."""

    def tensors(self) -> Iterator[TensorSpec]:
        processor, size, out = self.processor, self.size, self.hidden_size
        patch = (processor.frames, processor.patch, processor.patch)
        yield from _linear("patch_embed.proj", (size, 3, *patch), bias=True)
        for layer in range(self.depth):
            at, head = f"blocks.{layer}.", size // self.heads
            for norm, width in (("norm1", size), ("norm2", size), ("attn.q_norm", head), ("attn.k_norm", head)):
                yield TensorSpec(f"{at}{norm}.weight", (width,), "norm")
            products = {"attn.qkv": (3 * size, size), "attn.proj": (size, size), "mlp.gate_proj": (self.inner, size)}
            products |= {"mlp.up_proj": (self.inner, size), "mlp.down_proj": (size, self.inner)}
            for name, shape in products.items():
                yield from _linear(f"{at}{name}", shape, bias=self.bias)
        yield TensorSpec("post_layernorm.weight", (size,), "norm")
        yield from _linear("downsample", (out, size, processor.merge, processor.merge), bias=True)
        yield from _linear("merger.proj", (out, out), bias=False)
        yield TensorSpec("merger.post_projection_norm.weight", (out,), "norm")
        yield TensorSpec("merger.post_projection_norm.bias", (out,), "bias")
        for name, shape in {"gate": (3 * out, out), "up": (3 * out, out), "down": (out, 3 * out)}.items():
            yield from _linear(f"merger.{name}_proj", shape, bias=False)

    def flop(self, patches: int) -> float:
        size, out = self.size, self.hidden_size
        weights = size * 3 * self.processor.frames * self.processor.patch**2 + self.depth * (4 * size**2 + 3 * size * self.inner)
        merger = out * size + 10 * out**2 / self.processor.merge**2
        return 2.0 * patches * (weights + merger + 2 * self.depth * size * patches)

    def build(self, weights: Weights) -> GlmOcrEncoder:
        return GlmOcrEncoder(self, weights)


def _linear(name: str, shape: tuple[int, ...], *, bias: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", shape, "weight")
    if bias:
        yield TensorSpec(f"{name}.bias", shape[:1], "bias")


def read_glm_ocr(files: VisionFiles) -> VisionSpec:
    """The vision encoder that config.json and preprocessor_config.json describe. Raises CheckpointError for a missing or unknown
    key, and for what is not supported."""
    config = files.config.ranged(INTEGERS).filled({"image_token_id": 59_280})
    own = config.part("vision_config").ranged(INTEGERS).filled(_SHAPE)
    theta = checked_theta(own, {*_SHAPE, *_UNREAD, "rope_parameters"}, ACTIVATIONS)
    if own.integer("in_channels") != 3:
        raise own.refusal("in_channels must be 3; correct it")
    text = config.part("text_config")
    processor = read_glm_processor(
        files.preprocessor, files.preprocessor_where, patch=own.integer("patch_size"), merge=own.integer("spatial_merge_size"),
        frames=own.integer("temporal_patch_size"), placeholder=checked_placeholder(config, own, text),
    )
    return GlmOcrSpec(
        processor=processor, axes=contiguous(text, SECTIONS), depth=own.integer("depth"), size=own.integer("hidden_size"),
        heads=own.integer("num_heads"), inner=own.integer("intermediate_size"), act=ACTIVATIONS[own.text("hidden_act")],
        hidden_size=own.integer("out_hidden_size"), theta=theta, eps=own.number("rms_norm_eps"), bias=own.flag("attention_bias"),
    )


class GlmOcrEncoder(PatchEncoder):
    """The ViT."""

    spec: GlmOcrSpec

    def __init__(self, spec: GlmOcrSpec, weights: Weights) -> None:
        super().__init__(spec, weights, "patch_embed.proj.weight")
        stored = self._weights["downsample.weight"]  # numbers of a patch before rows and columns: patch by patch, as x has them
        self._weights["downsample.weight"] = stored.permute(0, 2, 3, 1).flatten(1)

    def rows_of(self, patches: Patches) -> Tensor:
        spec = self.spec
        x = self.product(patches.values, self._patch, self._weights["patch_embed.proj.bias"])
        angles = axial_angles(patches.coords, spec.size // spec.heads, spec.theta)
        attend = AttentionWithin(patches.cu_seqlens, x.dtype, self._device)
        for layer in range(spec.depth):
            x = self._layer(f"blocks.{layer}.", x, angles, attend)
        tokens = self._linear("downsample", self.of_tokens(self._rms("post_layernorm", x, spec.eps), patches))
        norm = "merger.post_projection_norm"
        y = self._linear("merger.proj", tokens)
        y = F.layer_norm(y, y.shape[1:], self._weights[f"{norm}.weight"], self._weights[f"{norm}.bias"], LAYER_NORM_EPS)
        return self._gated("merger.", F.gelu(y)).unsqueeze(1)

    def _layer(self, name: str, x: Tensor, angles: tuple[Tensor, Tensor], attend: AttentionWithin) -> Tensor:
        heads, eps = self.spec.heads, self.spec.eps
        qkv = self._linear(f"{name}attn.qkv", self._rms(f"{name}norm1", x, eps)).unflatten(1, (3 * heads, -1))
        for part, own in zip("qk", qkv.split(heads, 1), strict=False):
            own.copy_(self._rms(f"{name}attn.{part}_norm", own.flatten(0, 1), eps).view_as(own))
        rotate_heads(qkv[:, : 2 * heads], *angles)
        x = x + self._linear(f"{name}attn.proj", attend(*qkv.split(heads, 1)))
        return x + self._gated(f"{name}mlp.", self._rms(f"{name}norm2", x, eps))

    def _gated(self, name: str, y: Tensor) -> Tensor:
        inner = activate(self.spec.act, self._linear(f"{name}gate_proj", y)).mul_(self._linear(f"{name}up_proj", y))
        return self._linear(f"{name}down_proj", inner)
