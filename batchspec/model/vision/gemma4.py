"""The vision encoder of Gemma 4: a ViT whose patches are pooled by squares, and a projection of the normed result.

    patch      rgb [3 * P * P], divided by 255, doubled and less 1, -> x = W p + table[0, column] + table[1, row]
    layer      x += norm(o(attend(rotate(norm q, norm k), norm v)));  x += norm(down(gelu(gate(y)) * up(y)));  y = norm(x)
    pooling    the mean of merge^2 patches, times sqrt(E), in some models less std_bias and times std_scale
    projector  W rms(x) -> the embedding of a token

With use_clipped_linears the inputs and outputs of each product of a layer are clamped to ranges that the file has. Scores are not
scaled. Source: transformers 5, models/gemma4 (Gemma4VisionModel, Gemma4MultimodalEmbedder). N patches, E hidden, D of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.checkpoint.config_values import ConfigReader, Ranges
from batchspec.images.gemma4_processor import Gemma4Processor, read_gemma4_processor
from batchspec.kernels.norm_rope.rotate_heads import norm_heads, rotate_heads
from batchspec.model.families.gemma4 import images_are_whole
from batchspec.model.fused import rms_norm
from batchspec.model.layers.base import TensorSpec
from batchspec.model.quant.base import Weights
from batchspec.model.vision.blocks import AttentionWithin, axial_angles
from batchspec.model.vision.encoder import PatchEncoder, Patches
from batchspec.model.vision.qwen3_vl import UNREAD
from batchspec.model.vision.spec import VisionFiles, VisionSpec, check_token, checked_theta

TOWER, EMBED = "vision_tower.", "embed_vision."
_PROJECTION, _TABLE = f"{EMBED}embedding_projection", f"{TOWER}patch_embedder.position_embedding_table"
_ACT = "gelu_pytorch_tanh"
_SHAPE: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12, "head_dim": 64,
    "hidden_activation": _ACT, "rms_norm_eps": 1e-6, "pooling_kernel_size": 3, "patch_size": 16,
    "position_embedding_size": 10_240,
}
"""vision_config without a key: transformers' defaults."""
INTEGERS: Ranges = {
    "num_hidden_layers": (1, 1024), "num_attention_heads": (1, 2**12), "num_key_value_heads": (1, 2**12), "head_dim": (4, 2**12),
    "pooling_kernel_size": (1, 16), "patch_size": (1, 256), "position_embedding_size": (1, 2**24), "mm_posemb_size": (1, 2**24),
    "mm_embed_dim": (1, 2**20), "output_proj_dims": (1, 2**20), "model_patch_size": (1, 2**12),
    "image_token_id": (0, 2**31 - 1), "boi_token_id": (0, 2**31 - 1), "eoi_token_id": (0, 2**31 - 1),
}
_READ = ("standardize", "use_clipped_linears", "num_key_value_heads", "rope_parameters", "attention_bias")
"""Keys without a default above."""
OF_ALL = (
    *UNREAD, "_name_or_path", "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict",
)
"""Keys that transformers wrote for every part of a published model, and that change nothing."""
_UNREAD = (*OF_ALL, "attention_dropout", "max_position_embeddings", "default_output_length", "global_head_dim")
"""The last two are not read by transformers either: heads have head_dim numbers, images the tokens of max_soft_tokens."""
_TYPES = ("Gemma4ImageProcessor", "Gemma4ImageProcessorFast", "Gemma4ImageProcessorPil")
_LIMITS = ("input_min", "input_max", "output_min", "output_max")
_TOKENS = {"image_token_id": 258_880, "boi_token_id": 255_999, "eoi_token_id": 258_882}
"""config.json without a key: transformers' defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionSpec(VisionSpec):
    """The shape of the ViT and of the projection."""

    inner_tensors: ClassVar[int] = 3
    prefixes: ClassVar[Mapping[str, str]] = {f"{model}{part}": part for part in (TOWER, EMBED) for model in ("model.", "")}
    head_dim: int
    eps: float
    num_positions: int
    """Rows of each of the two tables of positions."""
    clipped: bool
    """Whether the inputs and outputs of products are clamped."""
    standardized: bool
    """Whether the pooled patches are shifted and scaled."""

    def products(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Of a layer: their names and shapes."""
        inner = self.heads * self.head_dim
        for name in "qkv":
            yield f"self_attn.{name}_proj", (inner, self.size)
        yield "self_attn.o_proj", (self.size, inner)
        for name in ("gate", "up"):
            yield f"mlp.{name}_proj", (self.inner, self.size)
        yield "mlp.down_proj", (self.size, self.inner)

    def tensors(self) -> Iterator[TensorSpec]:
        size, side = self.size, self.processor.patch
        yield TensorSpec(f"{TOWER}patch_embedder.input_proj.weight", (size, 3 * side**2), "weight")
        yield TensorSpec(_TABLE, (2, self.num_positions, size), "weight")
        for layer in range(self.depth):
            at = f"{TOWER}encoder.layers.{layer}."
            for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
                yield TensorSpec(f"{at}{norm}_layernorm.weight", (size,), "norm", wide=True)
            for norm in "qk":
                yield TensorSpec(f"{at}self_attn.{norm}_norm.weight", (self.head_dim,), "norm", wide=True)
            for name, shape in self.products():
                yield TensorSpec(f"{at}{name}.linear.weight", shape, "weight")
                for limit in _LIMITS if self.clipped else ():
                    yield TensorSpec(f"{at}{name}.{limit}", (), "scale", typical=-1e4 if limit.endswith("min") else 1e4)
        for name in ("std_bias", "std_scale") if self.standardized else ():
            yield TensorSpec(f"{TOWER}{name}", (size,), "norm", wide=True, typical=float(name == "std_scale"))
        yield TensorSpec(f"{_PROJECTION}.weight", (self.hidden_size, size), "weight")

    def flop(self, patches: int) -> float:
        size, inner = self.size, self.heads * self.head_dim
        weights = size * 3 * self.processor.patch**2 + self.depth * (4 * size * inner + 3 * size * self.inner)
        projector = size * self.hidden_size / self.processor.merge**2
        return 2.0 * patches * (weights + projector + 2 * self.depth * inner * patches)

    def build(self, weights: Weights) -> Gemma4VisionEncoder:
        return Gemma4VisionEncoder(self, weights)


def read_gemma4(files: VisionFiles) -> VisionSpec:
    """The vision encoder that config.json and the image processor of processor_config.json describe. Raises CheckpointError for a
    missing or unknown key, and for what is not supported."""
    config = files.config.ranged(INTEGERS)
    if "vision_config" not in config.objects():
        raise config.refusal("no vision_config: the model has no vision encoder; leave the images out")
    own = config.part("vision_config").ranged(INTEGERS).filled(_SHAPE)
    heads = own.integer("num_attention_heads")
    if own.text("model_type", "gemma4_vision") != "gemma4_vision":
        raise own.refusal(f"{own.shown('model_type')} is not supported; supported is gemma4_vision")
    if own.integer("num_key_value_heads", heads) != heads:
        raise own.refusal(f"{own.shown('num_key_value_heads')} must be num_attention_heads={heads}; no other is supported")
    if own.flag("attention_bias") or own.text("hidden_activation") != _ACT:
        raise own.refusal(f"attention_bias=true, or a hidden_activation other than {_ACT}, is not supported")
    known, named = {*_SHAPE, *_READ, *_UNREAD, "hidden_act"}, own.filled({"hidden_act": _ACT})
    theta = checked_theta(named, known, (_ACT,), heads="num_attention_heads", usual=100.0)
    if (head_dim := own.integer("head_dim")) % 4:
        raise own.refusal(f"head_dim={head_dim} is no multiple of 4; correct it")
    processor = processor_of(files, config, own, config.part("text_config"), _TYPES)
    side = processor.max_pixels // processor.multiple**2 * processor.merge
    if side > (num_positions := own.integer("position_embedding_size")):
        raise own.refusal(f"position_embedding_size={num_positions} is below {side}, the patches of a side; correct it")
    return Gemma4VisionSpec(
        processor=replace(processor, most_tokens=num_positions // processor.merge), axes=(),
        depth=own.integer("num_hidden_layers"), size=own.integer("hidden_size"), heads=heads,
        inner=own.integer("intermediate_size"), hidden_size=config.part("text_config").integer("hidden_size"), theta=theta,
        head_dim=head_dim, eps=own.number("rms_norm_eps"), num_positions=num_positions,
        clipped=own.flag("use_clipped_linears"), standardized=own.flag("standardize"),
    )


def processor_of(
    files: VisionFiles, config: ConfigReader, own: ConfigReader, text: ConfigReader, types: tuple[str, ...]
) -> Gemma4Processor:
    """Of patches of patch_size. own: vision_config; text: text_config; types: names of the processor's class. Raises
    CheckpointError, also for a token of images outside the vocabulary."""
    tokens, text = config.filled(_TOKENS), text.filled({"vocab_size": 262_144})
    ids = {key: tokens.integer(key) for key in _TOKENS}
    if (pad := text.integer("pad_token_id", 0)) < 0:
        raise text.refusal(f"pad_token_id={pad} must be a token: layers read its inputs in the places of images; correct it")
    check_token(text, **ids, pad_token_id=pad)
    return read_gemma4_processor(
        files.preprocessor, files.preprocessor_where, types=types, patch=own.integer("patch_size"),
        merge=own.integer("pooling_kernel_size"), placeholder=ids["image_token_id"], image_begin=ids["boi_token_id"],
        image_end=ids["eoi_token_id"], whole=images_are_whole(text),
    )


class Gemma4VisionEncoder(PatchEncoder):
    """The ViT, the pooling and the projection."""

    spec: Gemma4VisionSpec

    def __init__(self, spec: Gemma4VisionSpec, weights: Weights) -> None:
        super().__init__(spec, weights, f"{TOWER}patch_embedder.input_proj.weight")
        self._patch = channels_first(self._patch, spec.processor.patch)
        self._values = 2 * (self._values - 0.5)
        # A half of a head is rotated by the column, the other by the row, each in two halves of its own. `rotate_heads` takes
        # the two numbers of a pair from the two halves of a head.
        quarters = torch.arange(spec.head_dim, device=self._device).view(2, 2, -1).transpose(0, 1).flatten()
        for layer in range(spec.depth):
            at = f"{TOWER}encoder.layers.{layer}.self_attn."
            for name in "qk":
                norm, product = f"{at}{name}_norm.weight", f"{at}{name}_proj.linear.weight"
                self._weights[norm] = self._weights[norm].index_select(0, quarters)
                heads = self._weights[product].unflatten(0, (spec.heads, -1))
                self._weights[product] = heads.index_select(1, quarters).flatten(0, 1)
        wide = torch.promote_types(self._patch.dtype, torch.float32)
        self._ones = torch.ones(max(spec.head_dim, spec.size), dtype=wide, device=self._device)

    def rows_of(self, patches: Patches) -> Tensor:
        spec, (of_cols, of_rows) = self.spec, self._weights[_TABLE]
        rows, cols = patches.coords
        x = self.product(patches.values, self._patch)
        x = x + (of_cols.index_select(0, cols) + of_rows.index_select(0, rows))
        angles = axial_angles(patches.coords.flip(0), spec.head_dim, spec.theta)
        attend = AttentionWithin(patches.cu_seqlens, x.dtype, self._device, scale=1.0)
        for layer in range(spec.depth):
            x = self._layer(f"{TOWER}encoder.layers.{layer}.", x, angles, attend)
        wide = torch.promote_types(x.dtype, torch.float32)
        pooled = x.unflatten(0, (-1, spec.processor.merge**2)).to(wide).mean(1).to(x.dtype).to(wide) * spec.size**0.5
        if spec.standardized:
            pooled = (pooled - self._weights[f"{TOWER}std_bias"]) * self._weights[f"{TOWER}std_scale"]
        normed = self._unit(pooled.to(x.dtype))
        return self.product(normed, self._weights[f"{_PROJECTION}.weight"]).unsqueeze(1)

    def _layer(self, name: str, x: Tensor, angles: tuple[Tensor, Tensor], attend: AttentionWithin) -> Tensor:
        heads, eps = self.spec.heads, self.spec.eps
        y = self._rms(f"{name}input_layernorm", x, eps)
        q, k, v = (self._product(f"{name}self_attn.{part}_proj", y).unflatten(1, (heads, -1)) for part in "qkv")
        for part, own in (("q", q), ("k", k)):
            rotate_heads(own, *angles, weight=self._weights[f"{name}self_attn.{part}_norm.weight"], eps=eps)
        norm_heads(v, self._ones[: v.shape[-1]], eps)
        attended = self._product(f"{name}self_attn.o_proj", attend(q, k, v))
        x = x + self._rms(f"{name}post_attention_layernorm", attended, eps)
        y = self._rms(f"{name}pre_feedforward_layernorm", x, eps)
        gate, up = (self._product(f"{name}mlp.{part}_proj", y) for part in ("gate", "up"))
        inner = self._product(f"{name}mlp.down_proj", F.gelu(gate, approximate="tanh").mul_(up))
        return x + self._rms(f"{name}post_feedforward_layernorm", inner, eps)

    def _unit(self, x: Tensor) -> Tensor:
        """Normed without a weight."""
        return rms_norm(x, self._ones[: x.shape[-1]], self.spec.eps)

    def _product(self, name: str, x: Tensor) -> Tensor:
        weight = self._weights[f"{name}.linear.weight"]
        if not self.spec.clipped:
            return self.product(x, weight)
        low, high, out_low, out_high = (self._weights[f"{name}.{limit}"] for limit in _LIMITS)
        y: Tensor = self.product(x.clamp(low, high), weight).clamp_(out_low, out_high)
        return y


def channels_first(weight: Tensor, side: int) -> Tensor:
    """[E, 3 * side * side] of the numbers of a patch: as files have them, colours last -> as they are cut here, colours first."""
    found: Tensor = weight.unflatten(1, (side, side, 3))
    return found.permute(0, 3, 1, 2).flatten(1)
