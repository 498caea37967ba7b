"""Mistral 7B and its like: a sliding window in all layers, unless it is null. Ministral 3 and Devstral 2: no window, usually, and
q grows with its position (llama_4_scaling_beta), from the first position after the length of the pretraining on.

Source: transformers, models/mistral and models/ministral3.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, dense_layers, plain_rope, read_attentions, read_mlp, refuses_layer_types
from batchspec.model.layers.attention.rope_config import RopeSpec, rope_part
from batchspec.model.layers.layer import LayerSpec

YARN = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}
GROWTH = "llama_4_scaling_beta"


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    return dense_layers(read_attentions(config), read_mlp(config))


def _growing_rope(config: ConfigReader) -> RopeSpec:
    """The rotary embedding of Ministral 3; if nothing describes it, that of transformers' default."""
    if not config.given("rope_parameters") and not config.differs("rope_scaling", None, {}):
        config = config.replaced(rope_parameters=YARN)
    rope, spec = rope_part(config), plain_rope(config)
    if not rope.given(GROWTH):
        return spec
    original = spec.original_max_len or rope.integer("original_max_position_embeddings")  # a type without scaling has read none
    return replace(spec, query_growth=rope.number(GROWTH), original_max_len=original)


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    models="Mistral, Mistral Small 3 and Devstral",
    example="mistralai/Mistral-Small-24B-Instruct-2501",
    layers=_layers,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
MINISTRAL3 = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    models="Ministral 3 and Devstral 2",
    example="mistralai/Ministral-3-8B-Instruct-2512",
    layers=_layers,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144},
    rope=_growing_rope,
    refuses=refuses_layer_types,
)
