"""Qwen3-Next (80B-A3B): most layers keep a recurrent state, the others attend with gated outputs; experts with a shared one.

Layers of `layer_types`, or every full_attention_interval-th attends. RMS norms multiply by 1 + weight, in fp32. The experts are
those of Qwen3-MoE and one that all tokens go through. Qwen3.5 reads the same keys (`qwen3_5.py`).
Source: transformers, models/qwen3_next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader, Json, Ranges
from batchspec.model.families.base import (
    EXPERT_COUNTS,
    Family,
    check_kinds,
    read_attentions,
    read_heads,
    read_mlp,
    read_num_experts,
    refuses_unnormed_heads,
    refuses_windows,
)
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rope
from batchspec.model.layers.base import ExpertsSpec, NormForm
from batchspec.model.layers.gated_delta.block import GatedDeltaSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.mlp.moe import MoeSpec, RouterSpec, SharedExpert
from batchspec.model.mtp import JoinSpec, MtpSpec

NORMS = NormForm(offset=1.0, wide=True)
DEFAULTS: Json = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}
INTEGERS: Ranges = {
    "full_attention_interval": (1, 4096), "linear_conv_kernel_dim": (1, 64), "linear_key_head_dim": (1, 2**16),
    "linear_value_head_dim": (1, 2**16), "linear_num_key_heads": (1, 2**16), "linear_num_value_heads": (1, 2**16),
    "mtp_num_hidden_layers": (0, 4096),
}
"""Of the keys that Qwen3-Next and Qwen3.5 have in common."""
COMPUTES = frozenset({"partial_rotary_factor", "use_qk_norm"})
EXPERT_INTEGERS: Ranges = {**EXPERT_COUNTS, "moe_intermediate_size": (1, 2**24), "shared_expert_intermediate_size": (1, 2**24)}
_RECURRENT, _ATTENDS = "linear_attention", "full_attention"


def read_mixers(config: ConfigReader, *, interleaved: bool) -> list[AttentionSpec | GatedDeltaSpec]:
    """The mixer of every layer. interleaved: see `GatedDeltaSpec`. Raises CheckpointError for malformed values."""
    kinds = _layer_types(config, config.integer("num_hidden_layers"))
    attention, *_ = read_attentions(
        config.replaced(layer_types=None, sliding_window=None), bias=config.flag("attention_bias"), qk_norm=True
    )
    attention = replace(attention, gated=True, norms=NORMS)
    recurrent = _gated_delta(config, interleaved=interleaved)
    return [attention if kind == _ATTENDS else recurrent for kind in kinds]


def _layer_types(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    interval = config.integer("full_attention_interval", 4)
    kinds = config.texts("layer_types")
    if kinds is None:
        kinds = tuple(_RECURRENT if (i + 1) % interval else _ATTENDS for i in range(num_layers))
    check_kinds(config, "layer_types", kinds, num_layers, (_RECURRENT, _ATTENDS), needed=_ATTENDS)
    return kinds


def _gated_delta(config: ConfigReader, *, interleaved: bool) -> GatedDeltaSpec:
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise config.refusal(f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}")
    return GatedDeltaSpec(
        hidden_size=config.integer("hidden_size"),
        eps=config.number("rms_norm_eps"),
        norms=NORMS,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        conv_width=config.integer("linear_conv_kernel_dim"),
        interleaved=interleaved,
    )


def read_moe(config: ConfigReader) -> MoeSpec:
    """Experts, and one that all tokens go through."""
    num_experts, top_k = read_num_experts(config)
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    size = config.integer("shared_expert_intermediate_size")
    shared = GatedMlpSpec(hidden_size=hidden_size, inner_size=size, eps=eps, name="mlp.shared_expert", norm=None)
    return MoeSpec(
        router=RouterSpec(name="mlp.gate", top_k=top_k, norm_topk=config.flag("norm_topk_prob", True)),
        experts=ExpertsSpec(
            name="mlp.experts",
            num_experts=num_experts,
            hidden_size=hidden_size,
            expert_size=config.integer("moe_intermediate_size"),
        ),
        shared=SharedExpert(mlp=shared, gate="mlp.shared_expert_gate"),
        eps=eps,
        norms=NORMS,
    )


def read_mtp(config: ConfigReader, layers: Sequence[LayerSpec]) -> MtpSpec | None:
    """The MTP layer: one that attends, with the MLP of the last layer. Files have one; None if config.json says so or says
    another number.

    mtp_num_hidden_layers is missing in Qwen3-Next, whose files have one.
    """
    if config.integer("mtp_num_hidden_layers", 1) != 1 or config.flag("mtp_use_dedicated_embeddings"):
        return None
    attends = next(layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec))
    join = JoinSpec(hidden_size=config.integer("hidden_size"), eps=config.number("rms_norm_eps"), norms=NORMS)
    return MtpSpec(join=join, layer=LayerSpec(attends, layers[-1].mlps))


def text_rope(config: ConfigReader) -> RopeSpec:
    """One rotation, of a part of each head. Sections for the two dimensions of an image (`mrope_section`) change nothing in
    text, where all positions are equal."""
    return read_rope(config, config.integer("max_position_embeddings"), head_dim=read_heads(config)[1], sections=True)


def refuses(config: ConfigReader) -> list[str]:
    """`Family.refuses`: attn_output_gate is what vLLM reads, and transformers always computes."""
    found = [config.shown("attn_output_gate")] if config.differs("attn_output_gate", None, True) else []
    return found + refuses_unnormed_heads(config) + refuses_windows(config)


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    mixers = read_mixers(config, interleaved=True)
    step, dense = config.integer("decoder_sparse_step"), config.integers("mlp_only_layers") or ()
    experts, mlp = read_moe(config), replace(read_mlp(config), norms=NORMS)
    return tuple(
        LayerSpec(mixer, (experts if i not in dense and (i + 1) % step == 0 else mlp,)) for i, mixer in enumerate(mixers)
    )


QWEN3_NEXT = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    models="Qwen3-Next",
    example="Qwen/Qwen3-Next-80B-A3B-Instruct",
    layers=_layers,
    defaults={
        **DEFAULTS, "num_key_value_heads": 2, "intermediate_size": 5632, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512,
    },
    integers={**INTEGERS, **EXPERT_INTEGERS, "decoder_sparse_step": (1, 4096), "mlp_only_layers": (0, 4096)},
    rope=text_rope,
    mtp=read_mtp,
    norms=NORMS,
    computes=COMPUTES | EXPERT_INTEGERS.keys(),
    refuses=refuses,
)
