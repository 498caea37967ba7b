"""Granite 3 and 4: a Llama with factors for embeddings, scores, what each block adds to the stream, and logits.

Models of Granite 4 are saved as `granitemoehybrid`: their MLP has other names, gate and up in one tensor, and is a shared expert
where there are experts (H-Tiny, H-Small). Those with an H in their names have Mamba2 layers besides attention, which then
has no RoPE. The router's product is in fp32.
Source: transformers, models/granite and models/granitemoehybrid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader, Json, Ranges
from batchspec.model.families.base import (
    EXPERT_COUNTS,
    Family,
    check_kinds,
    dense_layers,
    no_rope,
    plain_rope,
    read_attentions,
    read_mlp,
    read_num_experts,
    refuses_layer_types,
    refuses_step_limits,
    refuses_windows,
)
from batchspec.model.layers.attention.rope_config import NO_ROPE
from batchspec.model.layers.base import ExpertsSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mamba2.block import Mamba2Spec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.mlp.moe import MoeSpec, RouterSpec, SharedExpert

_FACTORS: Json = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0}
_ATTENDS, _MAMBA = ("attention", "full_attention"), ("mamba", "linear_attention")
"""Names of layers, as Granite's files have them and as transformers 5 saves them."""
MAMBA_INTEGERS: Ranges = {
    "mamba_n_heads": (1, 2**16), "mamba_n_groups": (1, 2**16), "mamba_d_state": (1, 2**16), "mamba_d_head": (1, 2**16),
    "mamba_d_conv": (1, 16), "mamba_expand": (1, 64),
}


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    return _scaled(config, read_mlp(config, bias=config.flag("mlp_bias")))


def _scaled(config: ConfigReader, mlp: GatedMlpSpec, *, rotated: bool = True) -> tuple[LayerSpec, ...]:
    factor, scale = _factor(config, "residual_multiplier"), config.number("attention_multiplier")
    attentions = read_attentions(config, bias=config.flag("attention_bias"))
    attentions = [replace(own, scale=scale, out_scale=factor, rope=None if rotated else NO_ROPE) for own in attentions]
    return dense_layers(attentions, replace(mlp, out_scale=factor))


def read_mamba(config: ConfigReader, *, inner: int | None = None, out_scale: float | None = None) -> Mamba2Spec:
    """The Mamba2 layer of Granite, of Bamba, which has no factor of its output, and of Falcon-H1.

    inner  number of values of all heads; None: mamba_expand * hidden_size
    """
    hidden_size, heads, groups = (config.integer(key) for key in ("hidden_size", "mamba_n_heads", "mamba_n_groups"))
    what = "mamba_expand * hidden_size" if inner is None else "mamba_d_ssm"
    inner = config.integer("mamba_expand") * hidden_size if inner is None else inner
    auto = config.replaced(mamba_d_head=None)
    given = config.given("mamba_d_head") and config.differs("mamba_d_head", "auto")
    head_dim = (config if given else auto).integer("mamba_d_head", max(1, inner // heads))
    if heads % groups or heads * head_dim != inner:
        raise config.refusal(
            f"mamba_n_heads {heads}, mamba_d_head {head_dim}, mamba_n_groups {groups}: heads must be a multiple of groups, and "
            f"have {what} = {inner} values together; correct them"
        )
    return Mamba2Spec(
        hidden_size=hidden_size, eps=config.number("rms_norm_eps"), num_heads=heads, head_dim=head_dim, num_groups=groups,
        state_size=config.integer("mamba_d_state"), conv_width=config.integer("mamba_d_conv"),
        bias=config.flag("mamba_proj_bias"), conv_bias=config.flag("mamba_conv_bias", True), name="mamba", norm="input_layernorm",
        out_scale=out_scale,
    )


def _factor(config: ConfigReader, key: str) -> float | None:
    """None for 1, so that nothing is multiplied."""
    value = config.number(key)
    return None if value == 1 else value


def _rotates(config: ConfigReader) -> bool:
    """Of `granitemoehybrid`."""
    return config.text("position_embedding_type") == "rope"


def _hybrid_layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    """Layers of Granite, or Mamba2 layers in their place, with the MLP of `granitemoehybrid`, which all tokens go through, and
    experts besides it unless their number is 0."""
    config.given("num_experts_per_tok")  # it counts as read, also if there are no experts
    num_layers = config.integer("num_hidden_layers")
    kinds = config.texts("layer_types") or (_MAMBA[0],) * num_layers
    kinds = tuple(_ATTENDS[0] if kind == _ATTENDS[1] else _MAMBA[0] if kind == _MAMBA[1] else kind for kind in kinds)
    check_kinds(config, "layer_types", kinds, num_layers, (_MAMBA[0], _ATTENDS[0]), needed=_ATTENDS[0])
    shared = config.replaced(layer_types=None, intermediate_size=config.integer("shared_intermediate_size"))
    mlp = replace(read_mlp(shared), name="shared_mlp", parts=("input_linear", "output_linear"))
    layers = _scaled(shared, mlp, rotated=_rotates(config))
    if config.integer("num_local_experts"):
        layers = tuple(replace(layer, mlps=(_experts(config, mlp),)) for layer in layers)
    if _MAMBA[0] not in kinds:
        return layers
    return _with_mamba(layers, kinds, read_mamba(config, out_scale=_factor(config, "residual_multiplier")))


def _with_mamba(layers: Sequence[LayerSpec], kinds: Sequence[str], mamba: Mamba2Spec) -> tuple[LayerSpec, ...]:
    return tuple(
        replace(layer, mixer=mamba) if kind == _MAMBA[0] else layer for layer, kind in zip(layers, kinds, strict=True)
    )


def _experts(config: ConfigReader, shared: GatedMlpSpec) -> MoeSpec:
    """Their outputs are multiplied by residual_multiplier as that of the shared expert is: by the weights of the experts."""
    num_experts, top_k = read_num_experts(config, "num_local_experts")
    if not top_k:
        raise config.refusal(f"{config.shown('num_experts_per_tok')} of {num_experts} experts; correct it")
    name, factor = "block_sparse_moe", _factor(config, "residual_multiplier")
    return MoeSpec(
        router=RouterSpec(name=f"{name}.router.layer", top_k=top_k, scale=1.0 if factor is None else factor),
        experts=ExpertsSpec(
            name=name, num_experts=num_experts, hidden_size=shared.hidden_size, expert_size=config.integer("intermediate_size"),
        ),
        shared=SharedExpert(mlp=replace(shared, norm=None, out_scale=factor), gate=None),
        eps=shared.eps,
    )


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    models="Granite 3",
    example="ibm-granite/granite-3.3-8b-instruct",
    layers=_layers,
    defaults=_FACTORS,
    embedding_scale=lambda config: _factor(config, "embedding_multiplier"),
    logits_scaling=lambda config: _factor(config, "logits_scaling"),
    computes=frozenset(_FACTORS),
    refuses=lambda config: refuses_windows(config) + refuses_layer_types(config),
)
GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    models="Granite 4 and 4 H",
    example="ibm-granite/granite-4.0-micro",
    layers=_hybrid_layers,
    defaults={
        **_FACTORS, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "mamba_n_heads": 128,
        "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    },
    integers={
        "shared_intermediate_size": (1, 2**24), **MAMBA_INTEGERS, **EXPERT_COUNTS, "num_local_experts": (0, 2**16),
        "num_experts_per_tok": (0, 2**16),
    },
    rope=lambda config: (plain_rope if _rotates(config) else no_rope)(config),
    embedding_scale=lambda config: _factor(config, "embedding_multiplier"),
    logits_scaling=lambda config: _factor(config, "logits_scaling"),
    computes=frozenset({*_FACTORS, "num_experts_per_tok", "num_local_experts"}),
    refuses=lambda config: refuses_step_limits(config) + refuses_windows(config),
)
