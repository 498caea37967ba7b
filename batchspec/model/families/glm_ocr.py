"""The language model of GLM-OCR: the layers of GLM-4-0414 without biases, whole heads rotated, and an MTP layer of the same kind.

The files have the MTP layer after the last one, with copies of the embedding and the output matrix, which are not read.
Source: transformers, models/glm_ocr; the MTP layer: vLLM, model_executor/models/glm_ocr_mtp.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, read_heads, refuses_windows
from batchspec.model.families.glm4 import read_layers
from batchspec.model.families.glm4_moe import mtp_layer
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rope, read_sections, rope_part
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.mtp import MtpSpec

SECTIONS = (8, 12, 12)
"""mrope_section of a file without it."""


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    return read_layers(config, qkv_bias=False)


def _rope(config: ConfigReader) -> RopeSpec:
    """transformers cuts the frequencies by mrope_section also in text, and fails with another sum."""
    head_dim = read_heads(config)[1]
    rope = read_rope(config, config.integer("max_position_embeddings"), head_dim=head_dim, sections=True)
    read_sections(rope_part(config), SECTIONS, (rope.rotary_dim or head_dim) // 2)
    return replace(rope, interleaved=True)


def _num_mtp_layers(config: ConfigReader) -> int:
    return config.integer("num_nextn_predict_layers", 0)


def _mtp(config: ConfigReader, layers: Sequence[LayerSpec]) -> MtpSpec | None:
    return mtp_layer(config, layers, layers[-1].mlp) if _num_mtp_layers(config) == 1 else None


def _refuses(config: ConfigReader) -> list[str]:
    found = [config.shown("attention_bias")] if config.flag("attention_bias") else []
    return found + refuses_windows(config)


GLM_OCR = Family(
    name="glm_ocr_text",
    architecture="GlmOcrForCausalLM",
    models="GLM-OCR",
    example="zai-org/GLM-OCR",
    layers=_layers,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    integers={"num_nextn_predict_layers": (0, 4096)},
    rope=_rope,
    mtp=_mtp,
    num_mtp_layers=_num_mtp_layers,
    computes=frozenset({"partial_rotary_factor"}),
    refuses=_refuses,
)
