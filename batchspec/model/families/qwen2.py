"""Qwen2 and Qwen2.5, and the language model of Qwen2.5-VL: q, k and v always have biases. Source: transformers, models/qwen2 and
models/qwen2_5_vl."""

from __future__ import annotations

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, dense_layers, read_attentions, read_mlp, read_sectioned_rope
from batchspec.model.layers.layer import LayerSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    return dense_layers(read_attentions(config, qkv_bias=True, window_switch=True), read_mlp(config))


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen2 and 2.5",
    example="Qwen/Qwen2.5-7B-Instruct",
    layers=_layers,
    rope=read_sectioned_rope,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    window_switch=True,
)
