"""Llama, and models that are saved as one (SmolLM2). Source: transformers, models/llama."""

from __future__ import annotations

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, dense_layers, read_attentions, read_mlp, refuses_windows
from batchspec.model.layers.layer import LayerSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    attentions = read_attentions(config, bias=config.flag("attention_bias"))
    return dense_layers(attentions, read_mlp(config, bias=config.flag("mlp_bias")))


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    models="Llama 2 and 3, SmolLM2",
    example="meta-llama/Llama-3.1-8B-Instruct",
    layers=_layers,
    refuses=refuses_windows,
)
