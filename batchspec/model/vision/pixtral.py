"""The vision encoder of Mistral Small 3.1 and 3.2 and of Ministral 3, called Pixtral, and the projector after it; LightOnOCR has
both too.

    patch      rgb [3 * P * P], normalised, -> x = rms(W p)
    layer      x += o(attend(rotate(q, k, v of rms(x))));  x += down(act(gate(y)) * up(y)),  y = rms(x)
    projector  linear_2(act(linear_1(merge(cat of rms(x) of merge^2 patches)))) -> the embedding of a token

Source: transformers 5, models/pixtral (PixtralVisionModel) and models/mistral3 (Mistral3MultiModalProjector). N patches,
E hidden, H of the text model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from batchspec.checkpoint.config_values import ConfigReader, Json, has_file, no_tokenizer, read_json, shown
from batchspec.errors import CheckpointError
from batchspec.images.pixtral_processor import read_pixtral_processor
from batchspec.kernels.norm_rope.rotate_heads import rotate_heads
from batchspec.model.layers.base import TensorSpec
from batchspec.model.quant.base import Weights
from batchspec.model.vision.blocks import AttentionWithin, axial_angles
from batchspec.model.vision.encoder import ACTIVATIONS, PatchEncoder, Patches, activate
from batchspec.model.vision.qwen3_vl import UNREAD
from batchspec.model.vision.spec import VisionFiles, VisionSpec, check_token, checked_theta

EPS = 1e-5
TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."
_MERGE = f"{PROJECTOR}patch_merger.merging_layer.weight"
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "num_channels": 3,
    "patch_size": 16, "hidden_act": "gelu",
}
"""vision_config without a key: transformers' defaults."""
_WITHOUT = {**SHAPE, "patch_size": 14}
"""Without vision_config: those of Mistral Small 3.1."""
INTEGERS = {
    "num_hidden_layers": (1, 1024), "num_attention_heads": (1, 2**12), "num_channels": (3, 3), "patch_size": (1, 256),
    "spatial_merge_size": (1, 16), "image_token_index": (0, 2**31 - 1), "image_token_id": (0, 2**31 - 1), "head_dim": (4, 2**12),
}
_UNREAD = (*UNREAD, "image_size", "attention_dropout", "vocab_size")
_LANGUAGE_MODELS = ("mistral", "ministral3")
"""Families of the language model that are tested with images."""
_TEXTS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
"""Keys of processor_config.json that name tokens, with their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralSpec(VisionSpec):
    """The shape of the ViT and of the projector."""

    inner_tensors: ClassVar[int] = 3
    prefixes: ClassVar[Mapping[str, str]] = {
        f"{model}{part}": part for part in (TOWER, PROJECTOR) for model in ("model.", "")
    }
    act: Literal["silu", "none", "tanh"]
    projector_act: Literal["silu", "none", "tanh"]
    projector_eps: float
    projector_bias: bool

    def tensors(self) -> Iterator[TensorSpec]:
        size, side = self.size, self.processor.patch
        yield TensorSpec(f"{TOWER}patch_conv.weight", (size, 3, side, side), "weight")
        yield TensorSpec(f"{TOWER}ln_pre.weight", (size,), "norm")
        for layer in range(self.depth):
            at = f"{TOWER}transformer.layers.{layer}."
            for norm in ("attention_norm", "ffn_norm"):
                yield TensorSpec(f"{at}{norm}.weight", (size,), "norm")
            for name in "qkvo":
                yield TensorSpec(f"{at}attention.{name}_proj.weight", (size, size), "weight")
            for name, shape in {"gate": (self.inner, size), "up": (self.inner, size), "down": (size, self.inner)}.items():
                yield TensorSpec(f"{at}feed_forward.{name}_proj.weight", shape, "weight")
        yield TensorSpec(f"{PROJECTOR}norm.weight", (size,), "norm")
        yield TensorSpec(_MERGE, (size, size * self.processor.merge**2), "weight")
        for name, k in (("linear_1", size), ("linear_2", self.hidden_size)):
            yield TensorSpec(f"{PROJECTOR}{name}.weight", (self.hidden_size, k), "weight")
            if self.projector_bias:
                yield TensorSpec(f"{PROJECTOR}{name}.bias", (self.hidden_size,), "bias")

    def flop(self, patches: int) -> float:
        size, hidden = self.size, self.hidden_size
        weights = size * 3 * self.processor.patch**2 + self.depth * (4 * size**2 + 3 * size * self.inner)
        projector = size**2 + (size * hidden + hidden**2) / self.processor.merge**2
        return 2.0 * patches * (weights + projector + 2 * self.depth * size * patches)

    def build(self, weights: Weights) -> PixtralEncoder:
        return PixtralEncoder(self, weights)


def read_pixtral(files: VisionFiles) -> VisionSpec:
    """The vision encoder that config.json, preprocessor_config.json and processor_config.json describe, and the ids of its tokens
    in tokenizer.json. Raises CheckpointError for a missing or unknown key, and for what is not supported."""
    config = files.config.ranged(INTEGERS)
    found = "vision_config" in config.objects()
    own = config.part("vision_config").ranged(INTEGERS).filled(SHAPE if found else _WITHOUT)
    fields, patch = read_tower(config, own), own.integer("patch_size")
    projector_act = config.text("projector_hidden_act", "gelu")
    if projector_act not in ACTIVATIONS:
        raise config.refusal(f"projector_hidden_act={projector_act} is not supported; supported are {', '.join(ACTIVATIONS)}")
    text, merge = config.part("text_config"), config.integer("spatial_merge_size", 2)
    usual_eps = 1e-5 if check_language_model(text, "mistral", _LANGUAGE_MODELS) == "ministral3" else 1e-6
    processor = read_pixtral_processor(
        files.preprocessor, files.preprocessor_where, patch=patch, merge=merge, **_token_ids(files, patch, merge)
    )
    expected = config.integer("image_token_index", config.integer("image_token_id", 10))
    if processor.placeholder != expected:
        raise config.refusal(f"image_token_index={expected} is not the image_token of the tokenizer, {processor.placeholder}")
    check_token(text, image_token=processor.placeholder, image_break_token=processor.row_end, image_end_token=processor.image_end)
    return PixtralSpec(
        **fields, processor=processor, hidden_size=text.integer("hidden_size"), projector_act=ACTIVATIONS[projector_act],
        projector_eps=text.number("rms_norm_eps", usual_eps), projector_bias=config.flag("multimodal_projector_bias"),
    )


def read_tower(config: ConfigReader, own: ConfigReader) -> dict[str, Any]:
    """The fields of a spec that describe the ViT. config: config.json; own: its vision_config. Raises CheckpointError."""
    if own.text("model_type", "pixtral") != "pixtral":
        raise own.refusal(f"{own.shown('model_type')} is not supported; supported is pixtral")
    known = {*SHAPE, *_UNREAD, "head_dim", "rope_parameters", "rope_theta"}
    theta = checked_theta(own, known, ACTIVATIONS, heads="num_attention_heads")
    size, heads = own.integer("hidden_size"), own.integer("num_attention_heads")
    if (head_dim := own.integer("head_dim", size // heads)) != size // heads:
        raise own.refusal(f"head_dim={head_dim} is not hidden_size={size} / num_attention_heads={heads}; correct one of them")
    if config.differs("vision_feature_layer", None, -1):
        raise config.refusal(f"{config.shown('vision_feature_layer')} is not supported; supported is -1, the last layer")
    return {
        "axes": (), "depth": own.integer("num_hidden_layers"), "size": size, "heads": heads, "theta": theta,
        "inner": own.integer("intermediate_size"), "act": ACTIVATIONS[own.text("hidden_act")],
    }


def check_language_model(text: ConfigReader, usual: str, supported: Collection[str]) -> str:
    """model_type of text_config. Raises CheckpointError for one that is not tested with images."""
    if (kind := text.text("model_type", usual)) not in supported:
        advice = "leave the images out (input.columns.images=null, model.vision=false)"
        raise text.refusal(f"text_config.model_type={kind} with images is not supported; {advice}")
    return kind


def _token_ids(files: VisionFiles, patch: int, merge: int) -> dict[str, Any]:
    """The ids of the tokens that an image is made of. Raises CheckpointError; also for a processor of other sizes."""
    where = shown(files.folder / "tokenizer.json")
    if not has_file(files.folder / "tokenizer.json"):
        raise no_tokenizer(files.folder)
    processor = processor_config(files, {"patch_size": patch, "spatial_merge_size": merge})
    stored = read_json(files.folder / "tokenizer.json").get("added_tokens", [])
    ids = {token.get("content"): token.get("id") for token in stored if isinstance(token, dict)}
    texts = {key: processor.get(key, usual) for key, usual in _TEXTS.items()}
    if missing := [text for text in texts.values() if type(ids.get(text)) is not int]:
        raise CheckpointError(f"{where}: no added token {missing[0]}, of which images are made; add the model's own")
    names = zip(("placeholder", "row_end", "image_end"), texts.values(), strict=True)
    return {name: ids[text] for name, text in names}


def processor_config(files: VisionFiles, sizes: Json, usual: Json | None = None) -> Json:
    """processor_config.json. sizes: what config.json says of some of its keys; usual: values of missing ones, if not these.
    Raises CheckpointError for other sizes."""
    path = files.folder / "processor_config.json"
    found = read_json(path)
    for key, value in sizes.items():
        if (given := found.get(key, (usual or sizes)[key])) != value:
            raise CheckpointError(f"{shown(path)}: {key}={given}: config.json says {value}; correct one of them")
    return found


class PixtralEncoder(PatchEncoder):
    """The ViT and the projector."""

    spec: PixtralSpec

    def __init__(self, spec: PixtralSpec, weights: Weights) -> None:
        super().__init__(spec, weights, f"{TOWER}patch_conv.weight")
        stored = self._weights[_MERGE].unflatten(1, (spec.size, -1))  # numbers of a patch first, then patches
        self._weights[_MERGE] = stored.transpose(1, 2).flatten(1)

    def rows_of(self, patches: Patches) -> Tensor:
        spec = self.spec
        x = self._rms(f"{TOWER}ln_pre", self.product(patches.values, self._patch), EPS)
        angles = axial_angles(patches.coords, spec.size // spec.heads, spec.theta, own_frequencies=True)
        attend = AttentionWithin(patches.cu_seqlens, x.dtype, self._device)
        for layer in range(spec.depth):
            x = self._layer(f"{TOWER}transformer.layers.{layer}.", x, angles, attend)
        merged = self.of_tokens(self._rms(f"{PROJECTOR}norm", x, spec.projector_eps), patches)
        y = self._linear(f"{PROJECTOR}linear_1", self.product(merged, self._weights[_MERGE]))
        return self._linear(f"{PROJECTOR}linear_2", activate(spec.projector_act, y)).unsqueeze(1)

    def _layer(self, name: str, x: Tensor, angles: tuple[Tensor, Tensor], attend: AttentionWithin) -> Tensor:
        heads, y = self.spec.heads, self._rms(f"{name}attention_norm", x, EPS)
        qkv = torch.cat([self._linear(f"{name}attention.{part}_proj", y) for part in "qkv"], 1).unflatten(1, (3 * heads, -1))
        rotate_heads(qkv[:, : 2 * heads], *angles)
        x = x + self._linear(f"{name}attention.o_proj", attend(*qkv.split(heads, 1)))
        y = self._rms(f"{name}ffn_norm", x, EPS)
        gate, up = (self._linear(f"{name}feed_forward.{part}_proj", y) for part in ("gate", "up"))
        return x + self._linear(f"{name}feed_forward.down_proj", activate(self.spec.act, gate).mul_(up))
