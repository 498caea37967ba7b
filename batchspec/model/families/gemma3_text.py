"""Gemma 3, text only: most layers have a window and a rotary embedding of their own; norms before and after each block.

RMS norms multiply by 1 + weight, in fp32; the MLP's gate is a GELU; embeddings are scaled by sqrt(H), scores by
1 / sqrt(query_pre_attn_scalar). Windows in all but each sliding_window_pattern-th layer, unless layer_types says otherwise.
`rope_scaling` and rope_theta are those of layers without a window, rope_local_base_freq is that of layers with one.
Source: transformers, models/gemma3.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import (
    GLOBAL,
    LOCAL,
    Family,
    dense_layers,
    read_attentions,
    read_mlp,
    refuses_other_ropes,
    rope_of_kind,
    windows_in_turn,
)
from batchspec.model.layers.attention.rope_config import RopeSpec, read_part, read_theta, rope_kind
from batchspec.model.layers.base import NormForm
from batchspec.model.layers.layer import LayerSpec

_NORMS = NormForm(offset=1.0, wide=True)
_GELU = "gelu_pytorch_tanh"


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    config = windows_in_turn(config, config.integer("sliding_window_pattern"))
    attentions = [
        replace(
            attention,
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            post_norm="post_attention_layernorm",
            norms=_NORMS,
        )
        for attention in read_attentions(config, bias=config.flag("attention_bias"), qk_norm=True)
    ]
    mlp = replace(
        read_mlp(config),
        activation="gelu_tanh",
        norm="pre_feedforward_layernorm",
        post_norm="post_feedforward_layernorm",
        norms=_NORMS,
    )
    return dense_layers(attentions, mlp)


def _global_rope(config: ConfigReader) -> RopeSpec:
    rope = rope_of_kind(config, GLOBAL)
    return _rope(config, rope, read_theta(config, rope, usual=1_000_000.0))


def _local_rope(config: ConfigReader) -> RopeSpec:
    rope = rope_of_kind(config, LOCAL)
    return _rope(config, rope, read_theta(config, rope, key="rope_local_base_freq"))


def _rope(config: ConfigReader, rope: ConfigReader, theta: float) -> RopeSpec:
    if rope_kind(rope) not in ("default", "linear"):
        raise config.refusal(f"rotary embedding not supported: {rope.shown('rope_type')} (supported: default, linear)")
    return read_part(config, rope, config.integer("max_position_embeddings"), theta)


def _refuses(config: ConfigReader) -> list[str]:
    found = [config.shown("hidden_activation")] if config.text("hidden_activation", _GELU) != _GELU else []
    return found + refuses_other_ropes(config)


GEMMA3_TEXT = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    models="Gemma 3",
    example="google/gemma-3-27b-it",
    layers=_layers,
    defaults={
        "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
        "num_attention_heads": 8, "vocab_size": 262_208, "max_position_embeddings": 131_072,  # missing in the 4B
    },
    integers={"sliding_window_pattern": (1, 4096)},
    rope=_global_rope,
    local_rope=_local_rope,
    norms=_NORMS,
    embedding_scale=lambda config: config.integer("hidden_size") ** 0.5,
    computes=frozenset({"query_pre_attn_scalar", "rope_local_base_freq", "hidden_act", "hidden_activation"}),
    refuses=_refuses,
)
