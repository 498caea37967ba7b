"""Gemma 4 without its encoders: layers with a window and layers that read all keys differ in K/V heads and in values per head.

Norms before and after each block multiply by a plain weight, in fp32; q, k and, without a weight, v are normed; scores are not
scaled. After each layer the stream is multiplied by a number of the layer. With attention_k_eq_v the layers that read all keys
have no v_proj: V is what k_proj computes. Their heads have global_head_dim values, and a part of their pairs is rotated.
per_layer_config, which transformers writes, says the same by the index of the layer. The last num_kv_shared_layers keep no K and
V, and hidden_size_per_layer_input numbers a layer come from the tokens themselves (E2B, E4B).
Source: transformers, models/gemma4 and models/gemma4_unified, whose text models are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader, Json
from batchspec.model.families.base import Family, check_heads, read_attentions, read_mlp
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.attention.rope_config import RopeSpec, read_part, rope_kind
from batchspec.model.layers.base import ExpertsSpec, NormForm
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.layer_inputs import LayerInputSpec, LayerInputsSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.mlp.moe import MoeSpec, RouterSpec
from batchspec.model.layers.mlp.parallel_moe import ParallelMoeSpec

_NORMS = NormForm(wide=True)
_GELU = "gelu_pytorch_tanh"
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_PATTERN = 6
_FACTOR = "layer_scalar"
_OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
_DIFFERS = ("head_dim", "num_key_value_heads")
"""Keys of per_layer_config."""
_ROPES: Json = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""Those of a file that names none."""


def images_are_whole(config: ConfigReader) -> bool:
    """Whether tokens of an image attend to each other, in layers with a window: those that read all keys are causal in images too
    (create_masks_for_vision_model of transformers)."""
    return not config.differs("use_bidirectional_attention", "vision")


def _kinds(config: ConfigReader) -> list[str]:
    """Of each layer. The last one reads all keys, whatever layer_types says."""
    num_layers = config.integer("num_hidden_layers")
    kinds = list(config.texts("layer_types") or [_LOCAL if (i + 1) % _PATTERN else _GLOBAL for i in range(num_layers)])
    return [*kinds[:-1], _GLOBAL] if len(kinds) == num_layers else kinds


def _attentions(config: ConfigReader) -> list[AttentionSpec]:
    kinds = _kinds(config)
    attentions = read_attentions(config.replaced(layer_types=kinds), bias=config.flag("attention_bias"), qk_norm=True)
    shared_v, sources = config.flag("attention_k_eq_v"), _sources(config, kinds)
    heads = [_heads(config, index, kind) for index, kind in enumerate(kinds)]
    return [
        replace(
            attention,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=1.0,
            v_norm=True,
            shared_v=shared_v and kind == _GLOBAL and source is None,
            kv_of=source,
            post_norm="post_attention_layernorm",
            norms=_NORMS,
            whole_images=kind == _LOCAL and images_are_whole(config),
        )
        for attention, kind, (num_kv_heads, head_dim), source in zip(attentions, kinds, heads, sources, strict=True)
    ]


def _sources(config: ConfigReader, kinds: Sequence[str]) -> list[int | None]:
    """Of each layer, the layer whose K and V it reads, None for its own: the last num_kv_shared_layers read those of the last
    layer of their kind before them."""
    count = config.integer("num_kv_shared_layers", 0)
    first = len(kinds) - count
    if not 0 < first <= len(kinds) or {*kinds[:first]} != {*kinds}:
        raise config.refusal(
            f"num_kv_shared_layers {count} of {len(kinds)} layers: those before them must have each kind of layer; correct it"
        )
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return [None] * first + [last[kind] for kind in kinds[first:]]


def _heads(config: ConfigReader, index: int, kind: str) -> tuple[int, int]:
    """num_kv_heads and head_dim of a layer."""
    num_kv_heads, head_dim = config.integer("num_key_value_heads"), config.integer("head_dim")
    if "per_layer_config" in config:  # even a null then means that layers do not differ
        own = config.part("per_layer_config").part(str(index))
        num_kv_heads = own.integer("num_key_value_heads", num_kv_heads)
        head_dim = own.integer("head_dim", head_dim)
    elif kind == _GLOBAL:
        head_dim = config.integer("global_head_dim")
        if config.flag("attention_k_eq_v"):
            num_kv_heads = config.integer("num_global_key_value_heads", num_kv_heads)
    check_heads(config, config.integer("num_attention_heads"), num_kv_heads, head_dim)
    return num_kv_heads, head_dim


def _mlp(config: ConfigReader, attention: AttentionSpec) -> GatedMlpSpec:
    own = read_mlp(config)
    wide = attention.kv_of is not None and config.flag("use_double_wide_mlp")
    return replace(
        own,
        inner_size=own.inner_size * (2 if wide else 1),
        activation="gelu_tanh",
        norm="pre_feedforward_layernorm",
        post_norm="post_feedforward_layernorm",
        out_factor=_FACTOR,
        norms=_NORMS,
    )


def _with_experts(config: ConfigReader, mlp: GatedMlpSpec) -> ParallelMoeSpec:
    num_experts, top_k = config.integer("num_experts"), config.integer("top_k_experts")
    if top_k > num_experts:
        raise config.refusal(f"top_k_experts {top_k} exceeds the {num_experts} experts; correct it")
    moe = MoeSpec(
        router=RouterSpec(
            name="router.proj", top_k=top_k, factors="router.per_expert_scale", input_scale="router.scale",
        ),
        experts=ExpertsSpec(
            name="experts",
            num_experts=num_experts,
            hidden_size=config.integer("hidden_size"),
            expert_size=config.integer("moe_intermediate_size"),
            gating="gelu_tanh",
        ),
        eps=config.number("rms_norm_eps"),
        norm="pre_feedforward_layernorm_2",
        norms=_NORMS,
    )
    return ParallelMoeSpec(
        mlp=replace(mlp, post_norm="post_feedforward_layernorm_1", out_factor=None),
        moe=moe,
        experts_norm="post_feedforward_layernorm_2",
        post_norm="post_feedforward_layernorm",
        out_factor=_FACTOR,
    )


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    return tuple(_layer(config, attention) for attention in _attentions(config))


def _layer(config: ConfigReader, attention: AttentionSpec) -> LayerSpec:
    dense = _mlp(config, attention)
    mlp = _with_experts(config, dense) if config.flag("enable_moe_block") else dense
    size = config.integer("hidden_size_per_layer_input")
    if not size:
        return LayerSpec(attention, (mlp,))
    last = LayerInputSpec(
        hidden_size=config.integer("hidden_size"),
        eps=config.number("rms_norm_eps"),
        size=size,
        post_norm="post_per_layer_input_norm",
        out_factor=_FACTOR,
        norms=_NORMS,
    )
    return LayerSpec(attention, (replace(mlp, out_factor=None), last))


def _layer_inputs(config: ConfigReader) -> LayerInputsSpec | None:
    size, vocab = config.integer("hidden_size_per_layer_input"), config.integer("vocab_size_per_layer_input")
    if not size:
        return None
    if vocab < config.integer("vocab_size"):
        raise config.refusal(
            f"vocab_size_per_layer_input {vocab} is below vocab_size {config.integer('vocab_size')}: some tokens would have no "
            "inputs of layers; correct it"
        )
    return LayerInputsSpec(
        hidden_size=config.integer("hidden_size"),
        size=size,
        num_layers=config.integer("num_hidden_layers"),
        vocab_size=vocab,
        image_token=config.integer("pad_token_id", 0),
        eps=config.number("rms_norm_eps"),
        norms=_NORMS,
    )


def _rope(config: ConfigReader, kind: str) -> RopeSpec:
    ropes = config.part("rope_parameters") if config.given("rope_parameters") else config.replaced(own=_ROPES).part("own")
    if kind not in ropes:
        raise config.refusal(f"rope_parameters has no {kind}, which layers of that kind need; correct it")
    rope = ropes.part(kind)
    if rope_kind(rope) == "proportional":
        share = rope.number("partial_rotary_factor", 1.0)
        factor = rope.number("factor", 1.0)
        return RopeSpec(type="proportional", theta=rope.number("rope_theta"), factor=factor, rotated_share=share)
    if rope_kind(rope) not in ("default", "linear"):
        raise config.refusal(
            f"rotary embedding not supported: {rope.shown('rope_type')} (supported: default, linear, proportional)"
        )
    return read_part(config, rope, config.integer("max_position_embeddings"), rope.number("rope_theta"))


def _local_rope(config: ConfigReader) -> RopeSpec | None:
    return _rope(config, _LOCAL) if _LOCAL in _kinds(config) else None


def _refuses(config: ConfigReader) -> list[str]:
    found = [config.shown("use_bidirectional_attention")] * config.differs("use_bidirectional_attention", None, False, "vision")
    found += [config.shown("hidden_activation")] if config.text("hidden_activation", _GELU) != _GELU else []
    found += [config.shown("rope_scaling")] if config.differs("rope_scaling", None, {}) else []
    if not config.flag("enable_moe_block"):
        found += [config.shown(key) for key in _OF_EXPERTS if config.given(key)]
    layers = config.part("per_layer_config")
    if any(key not in _DIFFERS for index in layers for key in layers.part(index)):
        found.append(config.shown("per_layer_config"))
    ropes = config.part("rope_parameters")
    return found + [ropes.shown(key) for key in ropes if key not in (_LOCAL, _GLOBAL)]


GEMMA4_TEXT = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    models="Gemma 4",
    example="google/gemma-4-31B-it",
    layers=_layers,
    defaults={
        "head_dim": 256, "num_key_value_heads": 4, "num_attention_heads": 8, "sliding_window": 512, "global_head_dim": 512,
        "tie_word_embeddings": True, "vocab_size": 262_144, "max_position_embeddings": 131_072,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    },
    integers={
        "global_head_dim": (1, 2**16), "num_global_key_value_heads": (1, 2**16), "hidden_size_per_layer_input": (0, 2**20),
        "num_experts": (1, 2**16), "top_k_experts": (1, 2**16), "moe_intermediate_size": (1, 2**24),
        "num_kv_shared_layers": (0, 4096), "vocab_size_per_layer_input": (0, 2**26),
    },
    rope=lambda config: _rope(config, _GLOBAL),
    local_rope=_local_rope,
    norms=_NORMS,
    embedding_scale=lambda config: config.integer("hidden_size") ** 0.5,
    layer_inputs=_layer_inputs,
    logit_cap=lambda config: config.number("final_logit_softcapping") if config.given("final_logit_softcapping") else None,
    computes=frozenset({
        "hidden_act", "hidden_activation", "final_logit_softcapping", "per_layer_config", "num_experts", "moe_intermediate_size",
        "use_bidirectional_attention",
    }),
    refuses=_refuses,
)
GEMMA4_UNIFIED_TEXT = replace(
    GEMMA4_TEXT,
    name="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    models="Gemma 4 12B",
    example="google/gemma-4-12B-it",
    defaults={
        **GEMMA4_TEXT.defaults, "sliding_window": 1024, "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
)
"""The 12B, whose images and sounds are read without an encoder.

In transformers 5.24 its `forward` lets images see ahead in layers that read all keys too, unlike `create_masks_for_generate` of
the same class and the code of the model's authors (transformers, issue 46711)."""
