"""GLM-4.7-Flash: latent attention in every layer, and the experts of GLM-4.5; the first layer is dense.

The MTP layer is that of DeepSeek-V3. Source: transformers, models/glm4_moe_lite; the MTP layer: vLLM,
model_executor/models/glm4_moe_lite_mtp.py.
"""

from __future__ import annotations

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, check_kinds, read_mlp
from batchspec.model.families.glm4_moe import INTEGERS, num_mtp_layers, read_experts, read_mtp, refuses_other_routers
from batchspec.model.families.latent import SIZES, latent_rope, read_latent, refuses_other_latents
from batchspec.model.layers.layer import LayerSpec

_DENSE, _SPARSE = "dense", "sparse"


def _mlp_types(config: ConfigReader) -> tuple[str, ...]:
    """Whether each layer has experts."""
    num_layers = config.integer("num_hidden_layers")
    found = config.texts("mlp_layer_types")
    if found is None:
        found = (_DENSE, *[_SPARSE] * (num_layers - 1))
    check_kinds(config, "mlp_layer_types", found, num_layers, (_DENSE, _SPARSE))
    return found


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    latent, experts, mlp = read_latent(config), read_experts(config), read_mlp(config)
    return tuple(LayerSpec(latent, (mlp if kind == _DENSE else experts,)) for kind in _mlp_types(config))


def _refuses(config: ConfigReader) -> list[str]:
    types = _mlp_types(config)
    num_dense = next((i for i, kind in enumerate(types) if kind == _SPARSE), len(types))
    found = [config.shown("first_k_dense_replace")] if config.differs("first_k_dense_replace", None, num_dense) else []
    return found + refuses_other_latents(config) + refuses_other_routers(config)


GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    models="GLM-4.7-Flash",
    example="zai-org/GLM-4.7-Flash",
    layers=_layers,
    defaults={
        "rms_norm_eps": 1e-5, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
    },
    integers={**INTEGERS, **SIZES},
    rope=latent_rope,
    mtp=read_mtp,
    num_mtp_layers=num_mtp_layers,
    computes=frozenset({*INTEGERS, *SIZES, "rope_interleave", "routed_scaling_factor", "scoring_func"}),
    refuses=_refuses,
)
