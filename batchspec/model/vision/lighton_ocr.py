"""The vision encoder of LightOnOCR: that of Pixtral and its projector, without biases, before Qwen3.

The tokens of an image are equal. Where patch_size of its processor is a patch, sides are multiples of a patch: an odd row or
column of patches is encoded with the others, and becomes no token. Source: transformers 5, models/lighton_ocr.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from batchspec.images.pixtral_processor import read_longest_edge_processor
from batchspec.model.vision.pixtral import (
    INTEGERS,
    PROJECTOR,
    SHAPE,
    TOWER,
    PixtralSpec,
    check_language_model,
    processor_config,
    read_tower,
)
from batchspec.model.vision.spec import VisionFiles, VisionSpec, check_token

_WITHOUT = {**SHAPE, "patch_size": 14, "hidden_act": "silu"}
"""vision_config of a file without one."""
_USUAL = {"patch_size": 14, "spatial_merge_size": 2}
"""processor_config.json without a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightOnOcrSpec(PixtralSpec):
    """The same under other names."""

    prefixes: ClassVar[Mapping[str, str]] = {
        "model.vision_encoder.": TOWER, "vision_encoder.": TOWER, "model.vision_projection.": PROJECTOR,
        "vision_projection.": PROJECTOR,
    }


def read_lighton_ocr(files: VisionFiles) -> VisionSpec:
    """The vision encoder that config.json, preprocessor_config.json and processor_config.json describe. Raises CheckpointError
    for a missing or unknown key, and for what is not supported."""
    config = files.config.ranged(INTEGERS)
    found = "vision_config" in config.objects()
    own = config.part("vision_config").ranged(INTEGERS).filled(SHAPE if found else _WITHOUT)
    fields, patch, text = read_tower(config, own), own.integer("patch_size"), config.part("text_config")
    if config.text("projector_hidden_act", "gelu") != "gelu" or config.flag("multimodal_projector_bias"):
        raise config.refusal("projector_hidden_act must be gelu and multimodal_projector_bias false; correct them")
    check_language_model(text, "qwen3", ("qwen3",))
    merge = config.integer("spatial_merge_size", 2)
    processor_config(files, {"patch_size": patch, "spatial_merge_size": merge}, _USUAL)
    placeholder = config.integer("image_token_id", config.integer("image_token_index", 151_655))
    check_token(text, image_token_id=placeholder)
    processor = read_longest_edge_processor(
        files.preprocessor, files.preprocessor_where, patch=patch, merge=merge, placeholder=placeholder,
        units={patch: patch, patch * merge: patch * merge},
    )
    return LightOnOcrSpec(
        **fields, processor=processor, hidden_size=text.integer("hidden_size"), projector_act="none",
        projector_eps=text.number("rms_norm_eps", 1e-6), projector_bias=False,
    )
