"""Seed-OSS: q, k and v have biases, unless attention_bias says otherwise. Source: transformers, models/seed_oss."""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, dense_layers, read_attentions, read_mlp, refuses_layer_types, refuses_windows
from batchspec.model.layers.layer import LayerSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    attentions = read_attentions(config, qkv_bias=config.flag("attention_bias", True))
    attentions = [replace(own, o_bias=config.flag("attention_out_bias")) for own in attentions]
    return dense_layers(attentions, read_mlp(config, bias=config.flag("mlp_bias")))


SEED_OSS = Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    models="Seed-OSS",
    example="ByteDance-Seed/Seed-OSS-36B-Instruct",
    layers=_layers,
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    refuses=lambda config: refuses_windows(config) + refuses_layer_types(config),
)
