"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): Qwen3's attention, experts in place of most MLPs, no shared expert.

Experts in every decoder_sparse_step-th layer but those of mlp_only_layers. A window, which transformers would give to all layers
of these models, is refused. Source: transformers, models/qwen3_moe.
"""

from __future__ import annotations

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import (
    EXPERT_COUNTS,
    Family,
    read_attentions,
    read_mlp,
    read_num_experts,
    refuses_unnormed_heads,
)
from batchspec.model.layers.base import ExpertsSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.moe import MoeSpec, RouterSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    attentions = read_attentions(config, bias=config.flag("attention_bias"), qk_norm=True, window_switch=True)
    num_experts, top_k = read_num_experts(config)
    experts = MoeSpec(
        router=RouterSpec(name="mlp.gate", top_k=top_k, norm_topk=config.flag("norm_topk_prob")),
        experts=ExpertsSpec(
            name="mlp.experts",
            num_experts=num_experts,
            hidden_size=config.integer("hidden_size"),
            expert_size=config.integer("moe_intermediate_size"),
        ),
        eps=config.number("rms_norm_eps"),
    )
    step, dense = config.integer("decoder_sparse_step"), config.integers("mlp_only_layers") or ()
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(len(attentions))]
    return tuple(
        LayerSpec(attention, (experts if own else read_mlp(config),)) for attention, own in zip(attentions, sparse, strict=True)
    )


def _refuses(config: ConfigReader) -> list[str]:
    found = [config.shown("use_sliding_window")] if config.flag("use_sliding_window") else []
    return found + refuses_unnormed_heads(config)


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3-MoE and Qwen3-Coder",
    example="Qwen/Qwen3-30B-A3B-FP8",
    layers=_layers,
    defaults={
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    integers={
        **EXPERT_COUNTS, "moe_intermediate_size": (1, 2**24), "decoder_sparse_step": (1, 4096), "mlp_only_layers": (0, 4096),
    },
    computes=frozenset({*EXPERT_COUNTS, "moe_intermediate_size", "use_qk_norm"}),
    refuses=_refuses,
)
