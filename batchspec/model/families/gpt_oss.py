"""gpt-oss (20b, 120b): attention sinks, windows in every other layer, biases everywhere, experts with a clamped SwiGLU.

The experts of a layer are stacked, gate and up rows interleaved: in bf16 as transformers saves them, or in MXFP4 as published.
Source: transformers, models/gpt_oss, which computes the router's product in the model's dtype; here it is in fp32.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import EXPERT_COUNTS, Family, plain_rope, read_attentions, read_num_experts
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.base import Clamp, ExpertsSpec, NormForm
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.moe import MoeSpec, RouterSpec

NORMS = NormForm(wide=True)
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    if not config.given("layer_types"):
        kinds = ("sliding_attention", "full_attention")
        config = config.replaced(layer_types=[kinds[i % 2] for i in range(config.integer("num_hidden_layers"))])
    num_experts, top_k = read_num_experts(config)
    experts = MoeSpec(
        router=RouterSpec(name="mlp.router", top_k=top_k, bias=True),
        experts=ExpertsSpec(
            name="mlp.experts",
            num_experts=num_experts,
            hidden_size=config.integer("hidden_size"),
            expert_size=config.integer("intermediate_size"),
            parts=("gate_up_proj", "down_proj"),
            bias=True,
            gating=Clamp(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)),
        ),
        eps=config.number("rms_norm_eps"),
        norms=NORMS,
    )
    attentions = read_attentions(config, bias=config.flag("attention_bias", True))
    return tuple(LayerSpec(replace(attention, sinks=True, norms=NORMS), (experts,)) for attention in attentions)


def _rope(config: ConfigReader) -> RopeSpec:
    """The rotary embedding. If rope_parameters are missing or null, it is that of the published models."""
    return plain_rope(config if config.given("rope_parameters") else config.replaced(rope_parameters=_YARN))


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    models="gpt-oss",
    example="openai/gpt-oss-20b",
    layers=_layers,
    defaults={
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
    },
    integers=EXPERT_COUNTS,
    rope=_rope,
    norms=NORMS,
    computes=frozenset(EXPERT_COUNTS),
)
