"""Mistral 7B and its like: a sliding window in all layers, unless it is null. Source: transformers, models/mistral."""

from __future__ import annotations

from batchspec.model.blocks.layer import LayerSpec
from batchspec.model.config_values import ConfigReader
from batchspec.model.families.base import Family, dense_layers, read_attentions, read_mlp


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    return dense_layers(read_attentions(config), read_mlp(config))


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    layers=_layers,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
