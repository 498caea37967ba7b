"""What families with latent attention read in the same way (GLM-4.7-Flash, DeepSeek-V3, Mistral Small 4).

The norms within latent attention have an epsilon of 1e-6, whatever config.json says.
Source: transformers, models/glm4_moe_lite and models/deepseek_v3.
"""

from __future__ import annotations

import math
from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader, Ranges
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rope, rope_part
from batchspec.model.layers.latent.attend import HeadSizes
from batchspec.model.layers.latent.block import LatentSpec

SIZES: Ranges = {
    "q_lora_rank": (1, 2**16), "kv_lora_rank": (1, 2**16), "qk_nope_head_dim": (1, 2**16), "qk_rope_head_dim": (2, 2**16),
    "v_head_dim": (1, 2**16),
}
_INNER_EPS = 1e-6


def latent_rope(config: ConfigReader) -> RopeSpec:
    rope = read_rope(config, config.integer("max_position_embeddings"))
    return replace(rope, interleaved=config.flag("rope_interleave", True))


def _scale(config: ConfigReader, rope: RopeSpec, query_dim: int) -> float:
    """1 / sqrt(N + P), and with a longer context mscale_all_dim's factor twice, as DeepSeek defines it."""
    grows = 0.0 if rope.type == "default" else rope_part(config).number("mscale_all_dim", 0.0)
    longer = 0.1 * grows * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
    return longer * longer / math.sqrt(query_dim)


def read_latent(config: ConfigReader, rope: RopeSpec | None = None) -> LatentSpec:
    """rope: None: that of `latent_rope`."""
    sizes = HeadSizes(
        key_dim=config.integer("qk_nope_head_dim"), rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"), latent_dim=config.integer("kv_lora_rank"),
    )
    if sizes.rope_dim % 2:
        raise config.refusal(f"qk_rope_head_dim {sizes.rope_dim} is odd; rotary embedding needs pairs")
    rope = latent_rope(config) if rope is None else rope
    return LatentSpec(
        hidden_size=config.integer("hidden_size"), eps=config.number("rms_norm_eps"), inner_eps=_INNER_EPS,
        num_heads=config.integer("num_attention_heads"), sizes=sizes, rope=rope,
        query_rank=config.integer("q_lora_rank") if config.given("q_lora_rank") else None,
        scale=_scale(config, rope, sizes.query_dim), bias=config.flag("attention_bias"),
    )


def refuses_other_latents(config: ConfigReader, head_dim: int | None = None) -> list[str]:
    """Other values of keys that transformers does not read, or computes with other ones. head_dim: the usual value of this key;
    None: P"""
    rope_dim = config.integer("qk_rope_head_dim")
    usual = {
        "num_key_value_heads": config.integer("num_attention_heads"), "head_dim": head_dim or rope_dim,
        "qk_head_dim": config.integer("qk_nope_head_dim") + rope_dim, "moe_layer_freq": 1, "topk_method": "noaux_tc",
    }
    return [config.shown(key) for key, value in usual.items() if config.differs(key, None, value)]
