"""Qwen3.5, 3.6 and 3.8, the language model: the layers of Qwen3-Next with dense MLPs (27B), or with experts in every layer
(35B-A3B). Source: transformers, models/qwen3_5 and models/qwen3_5_moe."""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, read_mlp
from batchspec.model.families.qwen3_next import (
    COMPUTES,
    DEFAULTS,
    EXPERT_INTEGERS,
    INTEGERS,
    NORMS,
    read_mixers,
    read_moe,
    read_mtp,
    refuses,
    text_rope,
)
from batchspec.model.layers.layer import LayerSpec


def _dense_layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    mlp = replace(read_mlp(config), norms=NORMS)
    return tuple(LayerSpec(mixer, (mlp,)) for mixer in read_mixers(config, interleaved=False))


def _moe_layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    experts = read_moe(config)
    return tuple(LayerSpec(mixer, (experts,)) for mixer in read_mixers(config, interleaved=False))


def _moe_refuses(config: ConfigReader) -> list[str]:
    """Keys of Qwen3-Next that transformers does not read in these models."""
    found = [config.shown("norm_topk_prob")] if config.differs("norm_topk_prob", None, True) else []
    found += [config.shown("decoder_sparse_step")] if config.differs("decoder_sparse_step", None, 1) else []
    found += [config.shown("mlp_only_layers")] if config.differs("mlp_only_layers", None, []) else []
    return found + refuses(config)


QWEN3_5 = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    models="Qwen3.5 to 3.8",
    example="Qwen/Qwen3.5-27B",
    layers=_dense_layers,
    defaults={**DEFAULTS, "num_key_value_heads": 4},
    integers=INTEGERS,
    rope=text_rope,
    mtp=read_mtp,
    norms=NORMS,
    computes=COMPUTES,
    refuses=refuses,
)
QWEN3_5_MOE = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    models="Qwen3.5 to 3.8 MoE",
    example="Qwen/Qwen3.5-35B-A3B",
    layers=_moe_layers,
    defaults={
        **DEFAULTS, "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8, "num_experts": 256,
    },
    integers={**INTEGERS, **EXPERT_INTEGERS},
    rope=text_rope,
    mtp=read_mtp,
    norms=NORMS,
    computes=COMPUTES | EXPERT_INTEGERS.keys(),
    refuses=_moe_refuses,
)
