"""Nemotron-H: Nemotron Nano 2, Nemotron 3: each layer is one block, a Mamba2 layer, attention, an MLP or experts.

hybrid_override_pattern has a letter for each layer (M, *, -, E), newer files a list, layers_block_type. Attention has no
RoPE. MLPs and experts have no gate, and relu(up)^2; experts are chosen by sigmoid and a bias, and those of Super work in a
smaller latent size (moe_latent_size).
Files begin names with `backbone.`. dt of Mamba2 layers is not clamped, see `kernels/mamba2/layout.py`. The router's product is in
fp32.
Source: transformers, models/nemotron_h; NVIDIA 2025, Nemotron Nano 2 (arXiv 2508.14444); the MTP layer: vLLM,
model_executor/models/nemotron_h_mtp.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader, Json, Ranges
from batchspec.console.text import as_json
from batchspec.model.families.base import (
    Family,
    check_kinds,
    no_rope,
    read_attentions,
    read_num_experts,
    refuses_step_limits,
    refuses_windows,
)
from batchspec.model.families.glm4_moe import read_groups
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.attention.rope_config import NO_ROPE
from batchspec.model.layers.base import ExpertsSpec, NormForm
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mamba2.block import Mamba2Spec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.mlp.moe import MoeSpec, Narrow, RouterSpec, SharedExpert
from batchspec.model.mtp import JoinSpec, MtpSpec

NORMS = NormForm(wide=True)
MAMBA, ATTENDS, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
"""Names of layers in layers_block_type."""
_LETTERS = {"M": MAMBA, "*": ATTENDS, "-": MLP, "E": EXPERTS}
_OLDER_NAMES = {"mamba": MAMBA, "attention": ATTENDS}
_NAME, _NORM = "mixer", "norm"
_INTEGERS: Ranges = {
    "mamba_num_heads": (1, 2**16), "mamba_head_dim": (1, 2**16), "n_groups": (1, 2**16), "ssm_state_size": (1, 2**16),
    "conv_kernel": (1, 16), "n_routed_experts": (1, 2**16), "num_local_experts": (1, 2**16), "num_experts_per_tok": (1, 2**16),
    "moe_intermediate_size": (1, 2**24), "moe_shared_expert_intermediate_size": (1, 2**24), "n_shared_experts": (0, 4096),
    "n_group": (1, 4096), "topk_group": (1, 4096), "num_nextn_predict_layers": (0, 4096), "moe_latent_size": (1, 2**20),
}
_DEFAULTS: Json = {
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504, "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "max_position_embeddings": 4096,
}


def read_kinds(config: ConfigReader) -> tuple[str, ...]:
    """What each layer is. Raises CheckpointError for malformed values."""
    kinds, pattern = config.texts("layers_block_type"), config.text("hybrid_override_pattern")
    kinds = config.texts("layer_types") if kinds is None else kinds
    if kinds is None:
        unknown = sorted({*pattern} - {*_LETTERS})
        if unknown or not pattern:
            problem = f"{as_json(unknown)} not supported" if unknown else "missing"
            raise config.refusal(f"hybrid_override_pattern: {problem}; a letter of {''.join(_LETTERS)} for each layer is needed")
        kinds = tuple(_LETTERS[letter] for letter in pattern)
    kinds = tuple(_OLDER_NAMES.get(kind, kind) for kind in kinds)
    num_layers = config.integer("num_hidden_layers", len(kinds))
    check_kinds(config, "the pattern of layers", kinds, num_layers, (*_LETTERS.values(),), needed=ATTENDS)
    return kinds


def _mamba(config: ConfigReader) -> Mamba2Spec:
    heads, groups = config.integer("mamba_num_heads"), config.integer("n_groups")
    if heads % groups:
        raise config.refusal(f"mamba_num_heads {heads} is not a multiple of n_groups {groups}; correct them")
    return Mamba2Spec(
        hidden_size=config.integer("hidden_size"), eps=config.number("rms_norm_eps"), norms=NORMS, num_heads=heads,
        head_dim=config.integer("mamba_head_dim"), num_groups=groups, state_size=config.integer("ssm_state_size"),
        conv_width=config.integer("conv_kernel"), bias=config.flag("use_bias"), conv_bias=config.flag("use_conv_bias", True),
        name=_NAME, norm=_NORM,
    )


def _mlp(config: ConfigReader, size: str, name: str, norm: str | None) -> GatedMlpSpec:
    return GatedMlpSpec(
        hidden_size=config.integer("hidden_size"), inner_size=config.integer(size), eps=config.number("rms_norm_eps"),
        bias=config.flag("mlp_bias"), activation="relu2", parts=("up_proj", "down_proj"), name=name, norm=norm, norms=NORMS,
    )


def _experts(config: ConfigReader, layer: str = "") -> MoeSpec:
    """layer: what names begin with"""
    name, norm = layer + _NAME, layer + _NORM
    num_experts, top_k = read_num_experts(config, "n_routed_experts")
    size = hidden_size = config.integer("hidden_size")
    narrow = None
    if config.given("moe_latent_size"):
        size = config.integer("moe_latent_size")
        narrow = Narrow(hidden_size=hidden_size, into=f"{name}.fc1_latent_proj", out=f"{name}.fc2_latent_proj")
    return MoeSpec(
        router=RouterSpec(
            name=f"{name}.gate", top_k=top_k, scoring="sigmoid", norm_topk=config.flag("norm_topk_prob", True),
            selection_bias=f"{name}.gate.e_score_correction_bias", scale=config.number("routed_scaling_factor"),
            groups=read_groups(config, num_experts, top_k),
        ),
        experts=ExpertsSpec(
            name=f"{name}.experts", num_experts=num_experts, hidden_size=size,
            expert_size=config.integer("moe_intermediate_size"), parts=("up_proj", "down_proj"), gating="relu2",
        ),
        shared=SharedExpert(
            mlp=_mlp(config, "moe_shared_expert_intermediate_size", f"{name}.shared_experts", None), gate=None
        ),
        eps=config.number("rms_norm_eps"), norm=norm, norms=NORMS, narrow=narrow,
    )


def _attends(config: ConfigReader, layer: str = "") -> AttentionSpec:
    """layer: what names begin with"""
    whole = config.replaced(layer_types=None, sliding_window=None, num_hidden_layers=1)
    (attention,) = read_attentions(whole, bias=config.flag("attention_bias"))
    return replace(attention, name=layer + _NAME, norm=layer + _NORM, norms=NORMS, rope=NO_ROPE)


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    kinds = read_kinds(config)
    made = {
        MAMBA: LayerSpec(_mamba(config), ()), ATTENDS: LayerSpec(_attends(config), ()),
        MLP: LayerSpec(None, (_mlp(config, "intermediate_size", _NAME, _NORM),)), EXPERTS: LayerSpec(None, (_experts(config),)),
    }
    return tuple(made[kind] for kind in kinds)


def _mtp(config: ConfigReader, layers: Sequence[LayerSpec]) -> MtpSpec | None:
    """The MTP layer, in files two: one that attends, with what joins its inputs, and one of experts, with the last norm.

    None if config.json gives another number or pattern of them.
    """
    kinds, pattern = config.texts("mtp_layers_block_type"), config.text("mtp_hybrid_override_pattern", "*E")
    kinds = tuple(_LETTERS.get(letter, letter) for letter in pattern) if kinds is None else kinds
    kinds = tuple(_OLDER_NAMES.get(kind, kind) for kind in kinds)
    if config.integer("num_nextn_predict_layers", 0) != 1 or kinds != (ATTENDS, EXPERTS):
        return None
    first, last = "layers.0.", "layers.1."
    join = JoinSpec(
        hidden_size=config.integer("hidden_size"), eps=config.number("rms_norm_eps"), norms=NORMS, fc=f"{first}eh_proj",
        embedding_norm=f"{first}enorm", hidden_norm=f"{first}hnorm", out_norm=f"{last}final_layernorm",
    )
    return MtpSpec(join=join, layer=LayerSpec(_attends(config, first), (_experts(config, last),)), layer_prefix="mtp.")


def _refuses(config: ConfigReader) -> list[str]:
    """norm_eps, attention_head_dim and others: other names of keys that are read, which transformers ignores.
    n_shared_experts: the size of the shared experts is that of one, whatever this says, but 0 experts are not built.
    time_step_limit: engines compute without one."""
    found = [config.shown("mlp_bias")] if config.flag("mlp_bias") and config.given("moe_latent_size") else []
    found += [config.shown("mamba_proj_bias")] if config.flag("mamba_proj_bias") and not config.flag("use_bias") else []
    found += [config.shown(key) for key in ("attention_bias", "residual_in_fp32") if config.flag(key)]
    acts = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
    found += [config.shown(key) for key, act in acts.items() if config.text(key, act) != act]
    others = {"mamba_num_groups": "n_groups", "mamba_n_groups": "n_groups", "mamba_state_dim": "ssm_state_size"}
    others |= {"mamba_d_conv": "conv_kernel"}
    found += [config.shown(key) for key, own in others.items() if config.differs(key, None, config.integer(own))]
    same = {"mamba_conv_bias": config.flag("use_conv_bias", True), "norm_eps": config.number("rms_norm_eps")}
    same |= {"attention_head_dim": config.integer("head_dim")}
    found += [config.shown(key) for key, own in same.items() if config.differs(key, None, own)]
    found += [config.shown("n_shared_experts")] if config.integer("n_shared_experts") == 0 else []
    return found + refuses_step_limits(config) + refuses_windows(config)


NEMOTRON_H = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    models="Nemotron Nano 2, Nemotron 3",
    example="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    layers=_layers,
    defaults=_DEFAULTS,
    integers=_INTEGERS,
    rope=no_rope,
    mtp=_mtp,
    norms=NORMS,
    final_norm="model.norm_f.weight",
    renames={"rms_norm_eps": "layer_norm_epsilon"},
    computes=frozenset({*_INTEGERS, "routed_scaling_factor", "n_group", "partial_rotary_factor"}),
    refuses=_refuses,
)
