"""MiniMax-M2 (M2, M2.1, M2.5): q and k normed over all heads, heads rotated in part, experts chosen by sigmoid and a bias.

The keys of MTP layers (use_mtp) are ignored: their weights are not published. Published files have wrong ids in eos_token_id of
config.json: those of generation_config.json are used if it has some. The router's product is in fp32; transformers computes it in
the model's dtype. Source: transformers, models/minimax_m2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import EXPERT_COUNTS, Family, read_attentions, read_heads, read_num_experts
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rope, rope_part
from batchspec.model.layers.base import ExpertsSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.moe import MoeSpec, RouterSpec

_BUILT: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",), "use_routing_bias": (True,), "use_qk_norm": (True,), "qk_norm_type": ("per_layer",),
    "shared_intermediate_size": (0,), "layernorm_full_attention_alpha": (1.0,),
    "layernorm_full_attention_beta": (1.0,), "layernorm_mlp_alpha": (1.0,), "layernorm_mlp_beta": (1.0,),
    "sliding_window": (), "attn_window_size": (), "num_expert_group": (0, 1), "topk_group": (0, 1),
}
"""key -> its values, besides null, that do not change what is computed here"""


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    num_experts, top_k = read_num_experts(config)
    name = "block_sparse_moe"
    experts = MoeSpec(
        router=RouterSpec(name=f"{name}.gate", top_k=top_k, scoring="sigmoid", selection_bias=f"{name}.e_score_correction_bias"),
        experts=ExpertsSpec(
            name=f"{name}.experts",
            num_experts=num_experts,
            hidden_size=config.integer("hidden_size"),
            expert_size=config.integer("intermediate_size"),
            parts=("w1", "w3", "w2"),
        ),
        eps=config.number("rms_norm_eps"),
    )
    return tuple(LayerSpec(replace(attention, qk_norm_rows=True), (experts,)) for attention in read_attentions(config))


def _rope(config: ConfigReader) -> RopeSpec:
    """The rotary embedding. Published files have rotary_dim where others have partial_rotary_factor, which takes precedence.

    transformers takes a partial_rotary_factor that is null for one that is given, and rotates whole heads; other engines rotate
    rotary_dim. So a file with rotary_dim and that null is refused, unless the rotary embedding's own part decides.
    """
    head_dim, key = read_heads(config)[1], "partial_rotary_factor"
    if config.given("rotary_dim"):
        if key in config and not config.given(key) and key not in rope_part(config):
            raise config.refusal(
                f"{config.shown('rotary_dim')} and {config.shown(key)} contradict each other: transformers rotates whole heads, "
                "and vLLM rotary_dim numbers of each; remove the key that is wrong for the weights"
            )
        config = config.filled({key: config.integer("rotary_dim") / head_dim})
    return read_rope(config, config.integer("max_position_embeddings"), head_dim=head_dim)


def _refuses(config: ConfigReader) -> list[str]:
    found = [config.shown(key) for key, values in _BUILT.items() if config.differs(key, None, *values)]
    kinds = config.integers("attn_type_list") or ()
    return [*found, *([config.shown("attn_type_list")] if any(kind != 1 for kind in kinds) else [])]


MINIMAX_M2 = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    models="MiniMax-M2",
    example="MiniMaxAI/MiniMax-M2",
    layers=_layers,
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "rope_theta": 5e6,
    },
    integers={**EXPERT_COUNTS, "rotary_dim": (2, 2**16), "attn_type_list": (0, 2**16)},
    rope=_rope,
    computes=frozenset({*EXPERT_COUNTS, "use_qk_norm", "scoring_func", "partial_rotary_factor"}),
    refuses=_refuses,
    config_ends=False,
)
