"""LFM2 and 2.5 with experts (8B-A1B, 24B-A2B): the layers of LFM2, all but the first num_dense_layers with experts.

Experts are chosen by sigmoid and a bias, and 1e-6 is added to the sum by which their weights are divided. The router's product is
in fp32; transformers computes it in the model's dtype. Source: transformers, models/lfm2_moe.
"""

from __future__ import annotations

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import EXPERT_COUNTS, Family, read_num_experts, refuses_windows
from batchspec.model.families.lfm2 import DEFAULTS, FINAL_NORM, INTEGERS, MLP_NORM, RENAMES, read_dense, read_mixers
from batchspec.model.layers.base import ExpertsSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.moe import MoeSpec, RouterSpec


def _experts(config: ConfigReader) -> MoeSpec:
    num_experts, top_k = read_num_experts(config)
    name = "feed_forward"
    return MoeSpec(
        router=RouterSpec(
            name=f"{name}.gate", top_k=top_k, scoring="sigmoid", norm_topk=config.flag("norm_topk_prob", True), sum_eps=1e-6,
            selection_bias=f"{name}.expert_bias" if config.flag("use_expert_bias", True) else None,
            scale=config.number("routed_scaling_factor"),
        ),
        experts=ExpertsSpec(
            name=f"{name}.experts",
            num_experts=num_experts,
            hidden_size=config.integer("hidden_size"),
            expert_size=config.integer("moe_intermediate_size"),
            parts=("w1", "w3", "w2"),
        ),
        eps=config.number("rms_norm_eps"),
        norm=MLP_NORM,
    )


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    dense, experts, count = read_dense(config), _experts(config), config.integer("num_dense_layers")
    if (kinds := config.texts("layer_types")) is None:
        raise config.refusal("layer_types is missing, which says what each layer is; add it")
    mixers = read_mixers(config, kinds)
    return tuple(LayerSpec(mixer, (experts if i >= count else dense,)) for i, mixer in enumerate(mixers))


LFM2_MOE = Family(
    name="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    models="LFM2 and 2.5 MoE",
    example="LiquidAI/LFM2-8B-A1B",
    layers=_layers,
    defaults={
        **DEFAULTS, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts": 32,
        "num_experts_per_tok": 4, "routed_scaling_factor": 1.0,
    },
    integers={**INTEGERS, **EXPERT_COUNTS, "moe_intermediate_size": (1, 2**24), "num_dense_layers": (0, 4096)},
    final_norm=FINAL_NORM,
    renames=RENAMES,
    computes=frozenset({*EXPERT_COUNTS, "moe_intermediate_size", "routed_scaling_factor"}),
    refuses=refuses_windows,
)
