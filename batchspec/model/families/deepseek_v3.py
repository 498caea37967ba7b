"""DeepSeek-V3, V3.1 and R1: latent attention, experts of the best groups, and dense first layers.

The MTP layer, a layer of experts after the last one, joins embedding and hidden state in this order, unlike formula 21 of the
paper. Source: transformers, models/deepseek_v3; DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437); the MTP layer: vLLM,
deepseek_mtp.py, and SGLang, deepseek_nextn.py, which like transformers feeds the next draft step what follows the last norm.
"""

from __future__ import annotations

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, read_mlp
from batchspec.model.families.glm4_moe import INTEGERS, num_mtp_layers, read_experts, read_mtp, refuses_other_routers
from batchspec.model.families.latent import SIZES, latent_rope, read_latent, refuses_other_latents
from batchspec.model.layers.layer import LayerSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    latent, experts, mlp, dense = (
        read_latent(config), read_experts(config), read_mlp(config), config.integer("first_k_dense_replace"),
    )
    return tuple(LayerSpec(latent, (mlp if i < dense else experts,)) for i in range(config.integer("num_hidden_layers")))


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    models="DeepSeek-V3, V3.1 and R1",
    example="deepseek-ai/DeepSeek-V3.1",
    layers=_layers,
    defaults={
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8,
        "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "max_position_embeddings": 4096,
    },
    integers={**INTEGERS, **SIZES},
    rope=latent_rope,
    mtp=read_mtp,
    num_mtp_layers=num_mtp_layers,
    computes=frozenset({*INTEGERS, *SIZES, "rope_interleave", "routed_scaling_factor", "scoring_func"}),
    refuses=lambda config: refuses_other_latents(config) + refuses_other_routers(config),
)
