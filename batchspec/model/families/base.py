"""What a model family declares, and what most families read in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from batchspec.checkpoint.config_values import ConfigReader, Json, Ranges
from batchspec.console.text import as_json
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.attention.rope_config import NO_ROPE, RopeSpec, read_rope, read_theta, rope_kind
from batchspec.model.layers.base import PLAIN_NORM, NormForm
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.layer_inputs import LayerInputsSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.mtp import MtpSpec

# Keys of computations that only other models have. Those of NOT_BUILT are refused unless they are null, false or empty; those of
# NOT_BUILT_SCALES, unless null or 1; those of NOT_BUILT_IF_FALSE, unless null or true.
NOT_BUILT = (
    "compression_config", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv",
    "attention_chunk_size", "dual_chunk_attention_config", "no_rope_layers", "no_rope_layer_interval", "kv_lora_rank",
    "q_lora_rank", "rope_local_base_freq", "layer_block_types", "block_configs", "vision_config", "text_config", "alibi",
    "parallel_attn", "use_parallel_residual", "use_qk_norm", "qk_layernorm", "use_mrope", "is_encoder_decoder",
    "per_layer_config", "rope_interleave", "rope_interleaved", "attn_temperature_tuning", "n_shared_experts",
    "num_shared_experts", "shared_expert_intermediate_size", "logits_soft_cap", "use_mup", "use_bidirectional_attention",
)
NOT_BUILT_SCALES = (
    "logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "scale_emb",
    "scale_depth", "partial_rotary_factor", "rotary_pct", "routed_scaling_factor", "n_group", "rope_ratio",
)
NOT_BUILT_IF_FALSE = ("is_causal",)
BUILT_NAMES = {"hidden_act": ("silu", "swish"), "hidden_activation": ("silu", "swish"), "scoring_func": ("softmax",)}
"""Key -> the values that every family supports; the first is that of a missing key. A family with others has it in `computes`."""
EXPERT_COUNTS: Ranges = {"num_experts": (1, 2**16), "num_local_experts": (1, 2**16), "num_experts_per_tok": (1, 2**16)}
"""The integer ranges of a family with experts, for `read_num_experts`."""


def plain_rope(config: ConfigReader) -> RopeSpec:
    """One rotation for all layers, of whole heads."""
    return read_rope(config, config.integer("max_position_embeddings"))


def partial_rope(config: ConfigReader) -> RopeSpec:
    """One rotation for all layers, of partial_rotary_factor of each head."""
    return read_rope(config, config.integer("max_position_embeddings"), head_dim=read_heads(config)[1])


def no_rope(config: ConfigReader) -> RopeSpec:
    """For models whose attention has no RoPE (NoPE). The rope_theta that their files have counts as read; what would make a
    rotation of another type does not, so that the note about unread keys names it."""
    theta = read_theta(config, ConfigReader({}, config.where))
    if config.unchecked("rope_parameters", "rope_type") in (None, "default"):
        rope = config.part("rope_parameters")
        rope_kind(rope)
        theta = read_theta(config, rope)
    return replace(NO_ROPE, theta=theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model_type: the meaning of its keys, the blocks that they describe, and what is not supported."""

    name: str
    """model_type of config.json."""
    architecture: str
    """The only supported entry of `architectures`."""
    models: str
    """The published models of this family, for README and `batchspec families`."""
    example: str
    """Hub id of one of them to begin with."""
    layers: Callable[[ConfigReader], tuple[LayerSpec, ...]]
    """The blocks of every layer. Raises CheckpointError for malformed values."""
    defaults: Json = field(default_factory=dict)
    """Values of missing keys: the defaults of transformers 5 (models/*/configuration_*.py)."""
    integers: Ranges = field(default_factory=dict)
    """Integer ranges of its own keys."""
    rope: Callable[[ConfigReader], RopeSpec] = plain_rope
    config_ends: bool = True
    """Whether eos_token_id of config.json counts in addition to that of generation_config.json; False: only if the latter has
    none."""
    local_rope: Callable[[ConfigReader], RopeSpec | None] = lambda config: None
    """The rotary embedding of layers with a window, if it differs."""
    norms: NormForm = PLAIN_NORM
    """form of the final norm"""
    final_norm: str = "model.norm.weight"
    """Name of its weight."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Usual keys -> the names under which files of this family have them; a file with both is read by the latter."""
    embedding_scale: Callable[[ConfigReader], float | None] = lambda config: None
    logits_scaling: Callable[[ConfigReader], float | None] = lambda config: None
    logit_cap: Callable[[ConfigReader], float | None] = lambda config: None
    layer_inputs: Callable[[ConfigReader], LayerInputsSpec | None] = lambda config: None
    """What computes the inputs that layers have besides the stream."""
    mtp: Callable[[ConfigReader, Sequence[LayerSpec]], MtpSpec | None] = lambda config, layers: None
    """The layer that predicts one token further, of a checkpoint that has one; `layers` are the model's."""
    num_mtp_layers: Callable[[ConfigReader], int] = lambda config: 0
    """Number of layers that files may have after the last one, which predict further tokens; they are read only as `mtp`."""
    computes: frozenset[str] = frozenset()
    """Keys among NOT_BUILT, NOT_BUILT_SCALES and BUILT_NAMES whose computation this family's blocks implement."""
    refuses: Callable[[ConfigReader], list[str]] = lambda config: []
    """What this family refuses in addition to NOT_BUILT, as `key=value`."""
    window_switch: bool = False
    """Whether windows apply only with use_sliding_window, from layer max_window_layers on."""

    def with_ropes(
        self, config: ConfigReader, layers: Sequence[LayerSpec], mtp: MtpSpec | None
    ) -> tuple[RopeSpec, tuple[LayerSpec, ...], MtpSpec | None]:
        """The rotation of the model, and its layers, each with its rotation: the model's unless `layers` gave it one."""
        rope, local = self.rope(config), self.local_rope(config)
        found = tuple(_rotated(layer, rope, local or rope) for layer in layers)
        return rope, found, None if mtp is None else replace(mtp, layer=_rotated(mtp.layer, rope, rope))

    def check(self, config: ConfigReader) -> None:
        """Raises CheckpointError that names every key whose computation is not supported."""
        found = [config.shown(key) for key in NOT_BUILT if key not in self.computes and config.differs(key, None, False, {})]
        found += [config.shown(key) for key in NOT_BUILT_SCALES if key not in self.computes and config.differs(key, None, 1.0)]
        found += [config.shown(key) for key in NOT_BUILT_IF_FALSE if config.differs(key, None, True)]
        named = {key: names for key, names in BUILT_NAMES.items() if key not in self.computes}
        found += [config.shown(key) for key, names in named.items() if config.text(key, names[0]) not in names]
        found += self.refuses(config)
        if found:
            raise config.refusal(f"not supported: {', '.join(found)}; use a checkpoint without them")


def _rotated(layer: LayerSpec, rope: RopeSpec, local: RopeSpec) -> LayerSpec:
    """local: of a layer with a window"""
    own = layer.mixer
    if not isinstance(own, AttentionSpec) or own.rope is not None:
        return layer
    return replace(layer, mixer=replace(own, rope=rope if own.window is None else local))


def read_attentions(
    config: ConfigReader, *, bias: bool = False, qkv_bias: bool = False, qk_norm: bool = False, window_switch: bool = False
) -> list[AttentionSpec]:
    """The attention of every layer, all of one shape except for the window; `bias`: of all four projections."""
    num_kv_heads, head_dim = read_heads(config)
    windows = read_windows(config, config.integer("num_hidden_layers"), switch=window_switch)
    return [
        AttentionSpec(
            hidden_size=config.integer("hidden_size"),
            num_heads=config.integer("num_attention_heads"),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            eps=config.number("rms_norm_eps"),
            window=window,
            qkv_bias=bias or qkv_bias,
            o_bias=bias,
            qk_norm=qk_norm,
        )
        for window in windows
    ]


def read_mlp(config: ConfigReader, *, bias: bool = False) -> GatedMlpSpec:
    return GatedMlpSpec(
        hidden_size=config.integer("hidden_size"),
        inner_size=config.integer("intermediate_size"),
        eps=config.number("rms_norm_eps"),
        bias=bias,
    )


def read_post_normed(config: ConfigReader, attentions: Sequence[AttentionSpec], norms: NormForm) -> tuple[LayerSpec, ...]:
    """Layers of dense MLPs in which the output of each block is normed, not its input: OLMo 2 and 3, EXAONE 4."""
    mlp = replace(read_mlp(config), norm=None, post_norm="post_feedforward_layernorm", norms=norms)
    normed = [replace(own, norm=None, post_norm="post_attention_layernorm", norms=norms) for own in attentions]
    return dense_layers(normed, mlp)


def read_sectioned_rope(config: ConfigReader) -> RopeSpec:
    """Of a model that also reads images; its sections for images (`mrope_section`) change nothing in text."""
    return read_rope(config, config.integer("max_position_embeddings"), sections=True)


def dense_layers(attentions: Sequence[AttentionSpec], mlp: GatedMlpSpec) -> tuple[LayerSpec, ...]:
    """The same gated MLP in every layer."""
    return tuple(LayerSpec(attention, (mlp,)) for attention in attentions)


def read_num_experts(config: ConfigReader, key: str = "num_experts") -> tuple[int, int]:
    """Number of experts in a layer, and per token. Files have `key` or num_local_experts, which transformers 5 knows for all
    families and saves for some."""
    key = "num_local_experts" if config.given("num_local_experts") else key
    num_experts, top_k = config.integer(key), config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise config.refusal(f"num_experts_per_tok {top_k} exceeds the {num_experts} experts; correct it")
    return num_experts, top_k


LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""The layer types of layers with a window and without one."""


def rope_of_kind(config: ConfigReader, kind: str) -> ConfigReader:
    """The part of config.json about the rotary embedding of layers of one kind, where a family gives LOCAL and GLOBAL layers one
    each: of GLOBAL ones `rope_scaling` comes first. Only `rope_type` names a type, as transformers reads it."""
    rope = config.part("rope_parameters").part(kind).filled({"rope_type": "default"})
    return config.part("rope_scaling").over(rope) if kind == GLOBAL else rope


def refuses_other_ropes(config: ConfigReader) -> list[str]:
    """`Family.refuses` for such a family: names in rope_parameters that transformers ignores."""
    ropes = config.part("rope_parameters")
    return [ropes.shown(key) for key in ropes if key not in (LOCAL, GLOBAL)]


def windows_in_turn(config: ConfigReader, every: int) -> ConfigReader:
    """The config with layer_types, if it has none: each `every`-th layer attends to all keys, the others have a window."""
    if config.given("layer_types"):
        return config
    kinds = [LOCAL if (i + 1) % every else GLOBAL for i in range(config.integer("num_hidden_layers"))]
    return config.replaced(layer_types=kinds)


def refuses_windows(config: ConfigReader) -> list[str]:
    """`Family.refuses` for a family whose layers all read all keys."""
    return [f"{config.shown('sliding_window')} in a {config.text('model_type')}"] if config.given("sliding_window") else []


def refuses_step_limits(config: ConfigReader) -> list[str]:
    """`Family.refuses` for Mamba2 layers: dt is not clamped."""
    unlimited = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])  # as JSON of Python, and as transformers 5 writes it
    return [config.shown("time_step_limit")] if config.differs("time_step_limit", None, *unlimited) else []


def refuses_unnormed_heads(config: ConfigReader) -> list[str]:
    """`Family.refuses` for a family that always norms q and k: some published files set use_qk_norm=true (Qwen3-Coder)."""
    return [config.shown("use_qk_norm")] if config.differs("use_qk_norm", None, True) else []


def refuses_layer_types(config: ConfigReader) -> list[str]:
    """`Family.refuses` for a family whose layers all have the same window: transformers ignores their layer_types."""
    return [config.shown("layer_types")] if config.given("layer_types") else []


def read_heads(config: ConfigReader) -> tuple[int, int]:
    """num_kv_heads and head_dim; if missing, as many as query heads, and the hidden size divided by these."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = config.integer("head_dim", max(1, config.integer("hidden_size") // num_heads))
    check_heads(config, num_heads, num_kv_heads, head_dim)
    return num_kv_heads, head_dim


def check_heads(config: ConfigReader, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises CheckpointError for heads that no attention has."""
    if num_heads % num_kv_heads:
        raise config.refusal(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 2:
        raise config.refusal(f"head_dim {head_dim} is odd; rotary embedding needs pairs")


def read_windows(config: ConfigReader, num_layers: int, *, switch: bool) -> tuple[int | None, ...]:
    """Number of keys that a query of each layer attends to at most, itself included; None: all. `switch`: see
    `Family.window_switch`."""
    switched_off = switch and not config.flag("use_sliding_window")
    window = config.integer("sliding_window") if config.given("sliding_window") and not switched_off else None
    types = config.texts("layer_types")
    if types is None:
        first = config.integer("max_window_layers", 28) if switch else 0
        types = tuple("full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers))
    check_kinds(config, "layer_types", types, num_layers, ("full_attention", "sliding_attention"))
    if "sliding_attention" in types and window is None:
        raise config.refusal(
            "layer_types has sliding_attention, and there is no sliding_window, or use_sliding_window is false; correct them"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def check_kinds(
    config: ConfigReader, key: str, kinds: Sequence[str], num_layers: int, supported: Sequence[str], *, needed: str | None = None
) -> None:
    """Raise CheckpointError unless `kinds`, the value of `key`, has a supported one for each layer, and has the needed one."""
    unknown = sorted(set(kinds) - set(supported))
    if unknown or len(kinds) != num_layers:
        problem = f"{as_json(unknown)} not supported" if unknown else f"{len(kinds)} for {num_layers} layers"
        raise config.refusal(f"{key}: {problem}; {' and '.join(supported)} are supported")
    if needed is not None and needed not in kinds:
        raise config.refusal(f"no layer of the {num_layers} has {needed}, which is not supported; correct {key}")
