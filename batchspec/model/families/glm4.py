"""GLM-4-0414, dense: half of each head is rotated, in interleaved pairs; norms before and after each block; fused gate and up.

Source: transformers, models/glm4.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, dense_layers, partial_rope, read_attentions, read_mlp, refuses_windows
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.layer import LayerSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    return read_layers(config, qkv_bias=config.flag("attention_bias", True))


def read_layers(config: ConfigReader, *, qkv_bias: bool) -> tuple[LayerSpec, ...]:
    attentions = [
        replace(attention, post_norm="post_self_attn_layernorm") for attention in read_attentions(config, qkv_bias=qkv_bias)
    ]
    mlp = replace(read_mlp(config), parts=("gate_up_proj", "down_proj"), post_norm="post_mlp_layernorm")
    return dense_layers(attentions, mlp)


def _rope(config: ConfigReader) -> RopeSpec:
    return replace(partial_rope(config), interleaved=True)


GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    models="GLM-4-0414",
    example="zai-org/GLM-4-32B-0414",
    layers=_layers,
    defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5},
    rope=_rope,
    computes=frozenset({"partial_rotary_factor"}),
    refuses=refuses_windows,
)
