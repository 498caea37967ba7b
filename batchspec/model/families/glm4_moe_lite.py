"""GLM-4.7-Flash: latent attention in every layer, and the experts of GLM-4.5; the first layer is dense.

The norms within latent attention have an epsilon of 1e-6, whatever config.json says. The files have one layer more, the MTP
layer, which is not read. Source: transformers, models/glm4_moe_lite.
"""

from __future__ import annotations

import math
from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader, Ranges
from batchspec.model.families.base import Family, check_kinds, read_mlp
from batchspec.model.families.glm4_moe import INTEGERS, num_mtp_layers, read_experts, refuses_other_routers
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rope, rope_part
from batchspec.model.layers.latent.attend import HeadSizes
from batchspec.model.layers.latent.block import LatentSpec
from batchspec.model.layers.layer import LayerSpec

_SIZES: Ranges = {
    "q_lora_rank": (1, 2**16), "kv_lora_rank": (1, 2**16), "qk_nope_head_dim": (1, 2**16), "qk_rope_head_dim": (2, 2**16),
    "v_head_dim": (1, 2**16),
}
_INNER_EPS = 1e-6
_DENSE, _SPARSE = "dense", "sparse"


def _rope(config: ConfigReader) -> RopeSpec:
    rope = read_rope(config, config.integer("max_position_embeddings"))
    return replace(rope, interleaved=config.flag("rope_interleave", True))


def _scale(config: ConfigReader, rope: RopeSpec, query_dim: int) -> float:
    """1 / sqrt(N + P), and with a longer context mscale_all_dim's factor twice, as DeepSeek defines it."""
    grows = 0.0 if rope.type == "default" else rope_part(config).number("mscale_all_dim", 0.0)
    longer = 0.1 * grows * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
    return longer * longer / math.sqrt(query_dim)


def _latent(config: ConfigReader) -> LatentSpec:
    sizes = HeadSizes(
        key_dim=config.integer("qk_nope_head_dim"), rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"), latent_dim=config.integer("kv_lora_rank"),
    )
    if sizes.rope_dim % 2:
        raise config.refusal(f"qk_rope_head_dim {sizes.rope_dim} is odd; rotary embedding needs pairs")
    rope = _rope(config)
    return LatentSpec(
        hidden_size=config.integer("hidden_size"), eps=config.number("rms_norm_eps"), inner_eps=_INNER_EPS,
        num_heads=config.integer("num_attention_heads"), sizes=sizes, rope=rope,
        query_rank=config.integer("q_lora_rank") if config.given("q_lora_rank") else None,
        scale=_scale(config, rope, sizes.key_dim + sizes.rope_dim), bias=config.flag("attention_bias"),
    )


def _mlp_types(config: ConfigReader) -> tuple[str, ...]:
    """Whether each layer has experts."""
    num_layers = config.integer("num_hidden_layers")
    found = config.texts("mlp_layer_types")
    if found is None:
        found = (_DENSE, *[_SPARSE] * (num_layers - 1))
    check_kinds(config, "mlp_layer_types", found, num_layers, (_DENSE, _SPARSE))
    return found


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    latent, experts, mlp = _latent(config), read_experts(config), read_mlp(config)
    return tuple(LayerSpec(latent, (mlp if kind == _DENSE else experts,)) for kind in _mlp_types(config))


def _refuses(config: ConfigReader) -> list[str]:
    """Also other values of keys that transformers does not read, or computes with other ones."""
    types, num_heads = _mlp_types(config), config.integer("num_attention_heads")
    num_dense = next((i for i, kind in enumerate(types) if kind == _SPARSE), len(types))
    rope_dim = config.integer("qk_rope_head_dim")
    usual = {
        "num_key_value_heads": num_heads, "head_dim": rope_dim, "qk_head_dim": config.integer("qk_nope_head_dim") + rope_dim,
        "first_k_dense_replace": num_dense, "moe_layer_freq": 1, "topk_method": "noaux_tc",
    }
    found = [config.shown(key) for key, value in usual.items() if config.differs(key, None, value)]
    return found + refuses_other_routers(config)


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
    integers={**INTEGERS, **_SIZES},
    rope=_rope,
    num_mtp_layers=num_mtp_layers,
    computes=frozenset({*INTEGERS, *_SIZES, "rope_interleave", "routed_scaling_factor", "scoring_func"}),
    refuses=_refuses,
)
