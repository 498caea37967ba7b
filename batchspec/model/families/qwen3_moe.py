"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): Qwen3's attention, experts in place of most MLPs, no shared expert.

Experts in every decoder_sparse_step-th layer but those of mlp_only_layers. A window, which transformers would give to all layers
of these models, is refused. Source: transformers, models/qwen3_moe.
"""

from __future__ import annotations

from batchspec.model.blocks.layer import LayerSpec
from batchspec.model.blocks.moe import MoeSpec
from batchspec.model.config_values import ConfigReader
from batchspec.model.families.base import Family, read_attentions, read_mlp


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    attentions = read_attentions(config, bias=config.flag("attention_bias"), qk_norm=True, window_switch=True)
    # transformers 5 saves num_local_experts; published files have num_experts.
    num_experts, top_k = config.integer("num_local_experts", config.integer("num_experts")), config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise config.refusal(f"num_experts_per_tok {top_k} exceeds the {num_experts} experts; correct it")
    experts = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        expert_size=config.integer("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        norm_topk=config.flag("norm_topk_prob"),
        eps=config.number("rms_norm_eps", 1e-6),
    )
    step, dense = config.integer("decoder_sparse_step"), config.integers("mlp_only_layers") or ()
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(len(attentions))]
    return tuple(
        LayerSpec(attention, experts if own else read_mlp(config)) for attention, own in zip(attentions, sparse, strict=True)
    )


def _refuses(config: ConfigReader) -> list[str]:
    return [config.shown("use_sliding_window")] if config.flag("use_sliding_window") else []


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layers=_layers,
    defaults={
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    integers={
        "num_experts": (1, 2**16), "num_local_experts": (1, 2**16), "num_experts_per_tok": (1, 2**16),
        "moe_intermediate_size": (1, 2**24), "decoder_sparse_step": (1, 4096), "mlp_only_layers": (0, 4096),
    },
    computes=frozenset({"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"}),
    refuses=_refuses,
)  # fmt: skip
