"""Phi-3, Phi-3.5 and Phi-4: fused q, k and v; fused gate and up; some models rotate a part of each head, some have longrope.

longrope has one set of frequencies for rows of up to original_max_position_embeddings tokens and another for longer ones. All
keys of a row that passes that length would have to be rotated again, but keys in pages are rotated once. So only the first set is
supported, and a row of such a model has at most that many tokens: 4,096 in published models.
Source: transformers, models/phi3; Ding et al. 2024, LongRoPE (arXiv 2402.13753).
"""

from __future__ import annotations

import math
from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.console.text import quoted
from batchspec.model.families.base import (
    Family,
    dense_layers,
    partial_rope,
    read_attentions,
    read_heads,
    read_mlp,
    refuses_layer_types,
)
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rotary_dim, read_theta, rope_kind, rope_part
from batchspec.model.layers.layer import LayerSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    attentions = [replace(attention, fused_qkv=True) for attention in read_attentions(config)]
    return dense_layers(attentions, replace(read_mlp(config), parts=("gate_up_proj", "down_proj")))


def _rope(config: ConfigReader) -> RopeSpec:
    rope = rope_part(config)
    kind = rope_kind(rope)
    if kind in ("longrope", "su", "yarn"):  # names of one thing in this family
        return _longrope(config, rope)
    if kind != "default":
        raise config.refusal(f"rotary embedding not supported: rope_type {quoted(kind)} in a phi3 (supported: default, longrope)")
    return partial_rope(config)


def _longrope(config: ConfigReader, rope: ConfigReader) -> RopeSpec:
    head_dim = read_heads(config)[1]
    rotary_dim = read_rotary_dim(config, rope, head_dim)
    original = config.integer("original_max_position_embeddings")
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    if original < 2 and factor > 1:
        raise config.refusal(f"{config.shown('original_max_position_embeddings')} is too short for longrope; correct it")
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeSpec(
        type="longrope",
        theta=read_theta(config, rope),
        factor=factor,
        original_max_len=original,
        attention_factor=rope.number("attention_factor", usual),
        rotary_dim=rotary_dim,
        divisors=rope.numbers("short_factor", (rotary_dim or head_dim) // 2),
    )


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3 and 4",
    example="microsoft/phi-4",
    layers=_layers,
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    rope=_rope,
    computes=frozenset({"partial_rotary_factor"}),
    refuses=refuses_layer_types,
)
