"""Granite 3 and 4, dense: a Llama with factors for embeddings, scores, what each block adds to the stream, and logits.

The dense models of Granite 4 (Micro, 350M and 1B without an H in their names) are saved as `granitemoehybrid` without experts and
without Mamba layers: their MLP has other names, gate and up in one tensor. Source: transformers, models/granite and
models/granitemoehybrid.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader, Json
from batchspec.console.text import as_json
from batchspec.model.families.base import (
    Family,
    dense_layers,
    read_attentions,
    read_mlp,
    refuses_layer_types,
    refuses_windows,
)
from batchspec.model.layers.attention.rope_config import NO_ROPE
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec

_FACTORS: Json = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0}
_ATTENDS = ("attention", "full_attention")
"""Names of a layer that attends, as Granite's files have them and as transformers 5 saves them."""


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    return _scaled(config, read_mlp(config, bias=config.flag("mlp_bias")))


def _scaled(config: ConfigReader, mlp: GatedMlpSpec, *, rotated: bool = True) -> tuple[LayerSpec, ...]:
    factor, scale = _factor(config, "residual_multiplier"), config.number("attention_multiplier")
    attentions = read_attentions(config, bias=config.flag("attention_bias"))
    attentions = [replace(own, scale=scale, out_scale=factor, rope=None if rotated else NO_ROPE) for own in attentions]
    return dense_layers(attentions, replace(mlp, out_scale=factor))


def _factor(config: ConfigReader, key: str) -> float | None:
    """None for 1, so that nothing is multiplied."""
    value = config.number(key)
    return None if value == 1 else value


def _hybrid_layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    """Layers of Granite with the MLP of `granitemoehybrid`, which all tokens go through. Dense models have no experts besides it;
    a config.json that gives a number of experts is refused."""
    config.given("num_experts_per_tok")  # it counts as read: there are no experts
    kinds, num_layers = config.texts("layer_types"), config.integer("num_hidden_layers")
    others = sorted(set(kinds or ["mamba"]) - set(_ATTENDS))
    if others:
        raise config.refusal(
            f"layer_types: {as_json(others)}: Mamba layers are not supported; use a Granite without an H in its name"
        )
    if kinds is not None and len(kinds) != num_layers:
        raise config.refusal(f"layer_types: {len(kinds)} for {num_layers} layers; correct it")
    config = config.replaced(layer_types=None, intermediate_size=config.integer("shared_intermediate_size"))
    mlp = replace(read_mlp(config), name="shared_mlp", parts=("input_linear", "output_linear"))
    return _scaled(config, mlp, rotated=config.text("position_embedding_type") == "rope")


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    models="Granite 3",
    example="ibm-granite/granite-3.3-8b-instruct",
    layers=_layers,
    defaults=_FACTORS,
    embedding_scale=lambda config: _factor(config, "embedding_multiplier"),
    logits_scaling=lambda config: _factor(config, "logits_scaling"),
    computes=frozenset(_FACTORS),
    refuses=lambda config: refuses_windows(config) + refuses_layer_types(config),
)
GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    models="Granite 4 without Mamba layers",
    example="ibm-granite/granite-4.0-micro",
    layers=_hybrid_layers,
    defaults={**_FACTORS, "num_local_experts": 8, "shared_intermediate_size": 1024},
    integers={"shared_intermediate_size": (1, 2**24)},
    embedding_scale=lambda config: _factor(config, "embedding_multiplier"),
    logits_scaling=lambda config: _factor(config, "logits_scaling"),
    computes=frozenset({*_FACTORS, "num_experts_per_tok"}),
    refuses=refuses_windows,
)
