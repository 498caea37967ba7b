"""GLM-4.5, 4.5-Air, 4.6 and 4.7: experts chosen by sigmoid and a bias, with a shared one that has no gate; dense first layers.

Half of each head is rotated; q and k of the larger models are normed. The files have one layer more, the MTP layer, with copies
of the embedding and the output matrix, which neither transformers nor batchspec reads. The router's product is in fp32.
Source: transformers, models/glm4_moe; Zeng et al. 2025, GLM-4.5 (arXiv 2508.06471).
"""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.checkpoint.config_values import ConfigReader, Ranges
from batchspec.model.families.base import Family, partial_rope, read_attentions, read_mlp, read_num_experts, refuses_windows
from batchspec.model.layers.base import ExpertsSpec
from batchspec.model.layers.layer import LayerSpec, MlpSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.mlp.moe import MoeSpec, RouterSpec, SharedExpert
from batchspec.model.mtp import JoinSpec, MtpSpec

INTEGERS: Ranges = {
    "n_routed_experts": (1, 2**16), "num_local_experts": (1, 2**16), "num_experts_per_tok": (1, 2**16),
    "moe_intermediate_size": (1, 2**24), "n_shared_experts": (1, 4096), "first_k_dense_replace": (0, 4096), "n_group": (1, 4096),
    "topk_group": (1, 4096), "num_nextn_predict_layers": (0, 4096),
}


def read_experts(config: ConfigReader) -> MoeSpec:
    hidden_size, size, eps = config.integer("hidden_size"), config.integer("moe_intermediate_size"), config.number("rms_norm_eps")
    num_experts, top_k = read_num_experts(config, "n_routed_experts")
    shared_size = size * config.integer("n_shared_experts")
    shared = GatedMlpSpec(hidden_size=hidden_size, inner_size=shared_size, eps=eps, name="mlp.shared_experts", norm=None)
    return MoeSpec(
        router=RouterSpec(
            name="mlp.gate", top_k=top_k, scoring="sigmoid", norm_topk=config.flag("norm_topk_prob", True),
            selection_bias="mlp.gate.e_score_correction_bias", scale=config.number("routed_scaling_factor"),
            groups=read_groups(config, num_experts, top_k),
        ),
        experts=ExpertsSpec(name="mlp.experts", num_experts=num_experts, hidden_size=hidden_size, expert_size=size),
        shared=SharedExpert(mlp=shared, gate=None),
        eps=eps,
    )


def read_groups(config: ConfigReader, num_experts: int, top_k: int) -> tuple[int, int]:
    count, best = config.integer("n_group"), config.integer("topk_group")
    size = num_experts // count
    if best > count or num_experts % count or (count > 1 and size < 2) or top_k > best * size:
        raise config.refusal(
            f"n_group {count} and topk_group {best} do not fit {num_experts} experts of which a token has {top_k}: groups have "
            "equal sizes of two or more, and the best ones enough experts; correct them"
        )
    return count, best if count > 1 else 1


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    attentions = read_attentions(config, qkv_bias=config.flag("attention_bias"), qk_norm=config.flag("use_qk_norm"))
    experts, mlp, dense = read_experts(config), read_mlp(config), config.integer("first_k_dense_replace")
    return tuple(LayerSpec(attention, (experts if i >= dense else mlp,)) for i, attention in enumerate(attentions))


def num_mtp_layers(config: ConfigReader) -> int:
    return config.integer("num_nextn_predict_layers", 1)


def read_mtp(config: ConfigReader, layers: Sequence[LayerSpec]) -> MtpSpec | None:
    """A layer of experts after the last one; None if config.json gives another number than one."""
    return mtp_layer(config, layers, read_experts(config)) if num_mtp_layers(config) == 1 else None


def mtp_layer(config: ConfigReader, layers: Sequence[LayerSpec], mlp: MlpSpec) -> MtpSpec:
    """The layer after the last one, with this MLP and attention as that has."""
    prefix = f"model.layers.{len(layers)}."
    join = JoinSpec(
        hidden_size=config.integer("hidden_size"), eps=config.number("rms_norm_eps"), fc="eh_proj", embedding_norm="enorm",
        hidden_norm="hnorm", out_norm="shared_head.norm",
    )
    return MtpSpec(
        join=join, layer=LayerSpec(layers[-1].mixer, (mlp,)), prefix=prefix, layer_prefix=prefix,
        copies_of_model=("embed_tokens", "shared_head.head"),
    )


def refuses_other_routers(config: ConfigReader) -> list[str]:
    """Experts are chosen by sigmoid, whatever the key says."""
    found = [config.shown("scoring_func")] if config.text("scoring_func", "sigmoid") != "sigmoid" else []
    return found + refuses_windows(config)


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5 to 4.7",
    example="zai-org/GLM-4.5-Air-FP8",
    layers=_layers,
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0,
    },
    integers=INTEGERS,
    rope=partial_rope,
    mtp=read_mtp,
    num_mtp_layers=num_mtp_layers,
    computes=frozenset({*INTEGERS, "use_qk_norm", "partial_rotary_factor", "routed_scaling_factor", "scoring_func"}),
    refuses=refuses_other_routers,
)
