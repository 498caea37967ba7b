"""Mixtral (8x7B, 8x22B): Mistral's attention, experts in place of every MLP; a window in all layers if the config gives one.

Source: transformers, models/mixtral.
"""

from __future__ import annotations

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import EXPERT_COUNTS, Family, read_attentions, read_num_experts, refuses_layer_types
from batchspec.model.layers.base import ExpertsSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.moe import MoeSpec, RouterSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    num_experts, top_k = read_num_experts(config)
    experts = MoeSpec(
        router=RouterSpec(name="block_sparse_moe.gate", top_k=top_k),
        experts=ExpertsSpec(
            name="block_sparse_moe.experts",
            num_experts=num_experts,
            hidden_size=config.integer("hidden_size"),
            expert_size=config.integer("intermediate_size"),
            parts=("w1", "w3", "w2"),
        ),
        eps=config.number("rms_norm_eps"),
    )
    return tuple(LayerSpec(attention, (experts,)) for attention in read_attentions(config))


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    models="Mixtral",
    example="mistralai/Mixtral-8x7B-Instruct-v0.1",
    layers=_layers,
    defaults={
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    },
    integers=EXPERT_COUNTS,
    computes=frozenset(EXPERT_COUNTS),
    refuses=refuses_layer_types,
)
