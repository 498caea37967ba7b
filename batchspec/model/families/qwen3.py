"""Qwen3, dense, and the language model of Qwen3-VL: every head of q and k is normed. Source: transformers, models/qwen3 and
models/qwen3_vl."""

from __future__ import annotations

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import (
    Family,
    dense_layers,
    read_attentions,
    read_mlp,
    read_sectioned_rope,
    refuses_unnormed_heads,
)
from batchspec.model.layers.layer import LayerSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    attentions = read_attentions(config, bias=config.flag("attention_bias"), qk_norm=True, window_switch=True)
    return dense_layers(attentions, read_mlp(config))


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen3",
    example="Qwen/Qwen3-8B",
    layers=_layers,
    defaults={"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096},
    rope=read_sectioned_rope,
    computes=frozenset({"use_qk_norm"}),
    refuses=refuses_unnormed_heads,
    window_switch=True,
)
