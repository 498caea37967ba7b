"""Mistral Small 4: latent attention whose queries grow with their position, and experts chosen by softmax, with a shared one.

Of each head the part without a latent is rotated, with yarn. Experts in groups are refused.
Source: transformers, models/mistral4.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, read_mlp, refuses_windows
from batchspec.model.families.glm4_moe import INTEGERS, read_experts
from batchspec.model.families.latent import SIZES, latent_rope, read_latent, refuses_other_latents
from batchspec.model.families.mistral import GROWTH, YARN
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rope, rope_part
from batchspec.model.layers.layer import LayerSpec

_YARN = YARN | {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}


def _with_rope(config: ConfigReader) -> ConfigReader:
    """The config; if nothing describes a rotary embedding, with that of transformers' default."""
    if config.given("rope_parameters") or config.differs("rope_scaling", None, {}):
        return config
    return config.replaced(rope_parameters=_YARN)


def _rope(config: ConfigReader) -> RopeSpec:
    config = _with_rope(config)
    rope, rope_dim = rope_part(config), config.integer("qk_rope_head_dim")
    head_dim, max_len = config.integer("qk_nope_head_dim") + rope_dim, config.integer("max_position_embeddings")
    partial = "partial_rotary_factor" in rope
    spec = read_rope(config, max_len, head_dim=head_dim) if partial else latent_rope(config)
    rotated = (spec.rotary_dim or head_dim) if partial else rope_dim
    if spec.type != "yarn" or rotated != rope_dim:
        raise config.refusal(
            f"rotary embedding of type {spec.type} that rotates {rotated} numbers of a head; Mistral Small 4 rotates "
            f"qk_rope_head_dim={rope_dim} numbers, by yarn; correct rope_parameters"
        )
    growth = rope.number(GROWTH) if rope.given(GROWTH) else 0.0
    return replace(spec, rotary_dim=None, interleaved=config.flag("rope_interleave", True), query_growth=growth)


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    latent, mlp, dense = read_latent(_with_rope(config), _rope(config)), read_mlp(config), config.integer("first_k_dense_replace")
    moe = read_experts(config)
    router = replace(moe.router, scoring="softmax", selection_bias=None, groups=(1, 1))
    experts = replace(moe, router=router)
    return tuple(LayerSpec(latent, (mlp if i < dense else experts,)) for i in range(config.integer("num_hidden_layers")))


def _refuses(config: ConfigReader) -> list[str]:
    found = [config.shown(key) for key in ("n_group", "topk_group") if config.differs(key, None, 1)]
    whole = config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
    return found + refuses_other_latents(config, whole) + refuses_windows(config)


MISTRAL4 = Family(
    name="mistral4",
    architecture="Mistral4ForCausalLM",
    models="Mistral Small 4",
    example="mistralai/Mistral-Small-4-119B-2603",
    layers=_layers,
    defaults={
        "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "max_position_embeddings": 1_048_576,
    },
    integers={**INTEGERS, **SIZES},
    rope=_rope,
    computes=frozenset({*INTEGERS, *SIZES, "rope_interleave", "routed_scaling_factor"}),
    refuses=_refuses,
)
