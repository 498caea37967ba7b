"""config.json -> ModelSpec: the shape of a model, both spellings read, everything that is not built refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchspec.cache.layout import KVLayout
from batchspec.errors import CheckpointError
from batchspec.model.config_values import ConfigReader, Json, read_json, short_json, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding; the fields behind `theta` belong to the types that name them."""

    type: str
    """default, linear, llama3 or yarn."""
    theta: float
    factor: float = 1.0
    """linear, llama3, yarn: how many times longer than the original context."""
    original_max_len: int = 0
    """llama3, yarn: context of the pretraining, in tokens."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn: rotations over the original context above which a frequency stays as it is."""
    beta_slow: float = 1.0
    """yarn: rotations below which it is divided by `factor`."""
    attention_factor: float = 1.0
    """yarn: cos and sin are multiplied by it."""
    truncate: bool = True
    """yarn: round the two ends of the ramp to whole dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder and what its folder says about ending and sampling."""

    family: str
    """llama, qwen2, qwen3 or mistral."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    """[num_layers] keys that a query of the layer sees at most, itself included; None: all."""
    tie: bool
    """The output matrix is the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    """Of generation_config.json first, then those that only config.json has."""
    max_len: int
    """Longest prompt + output, in tokens."""
    dtype: str
    """The checkpoint's: float32, bfloat16, float64 or float16."""
    generation: Json
    """Sampling defaults of generation_config.json, those that are set."""

    def kv_layout(self, dtype: torch.dtype, page_size: int) -> KVLayout:
        """How each of its layers keeps keys and values, computed in `dtype`."""
        return KVLayout(dtype=dtype, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, page_size=page_size)


# What a missing key means: the defaults of transformers 5 (models/*/configuration_*.py).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
_GENERATION_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# Keys of other models' computation that are refused unless null or false, and those that are unless 1.
_NOT_BUILT = (
    "quantization_config", "compression_config", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv",
    "attention_chunk_size", "dual_chunk_attention_config", "no_rope_layers", "no_rope_layer_interval", "kv_lora_rank",
    "q_lora_rank", "rope_local_base_freq", "layer_block_types", "block_configs", "vision_config", "text_config", "alibi",
    "parallel_attn", "use_parallel_residual", "use_qk_norm", "qk_layernorm", "use_mrope", "is_encoder_decoder",
)  # fmt: skip
_NOT_BUILT_SCALES = (
    "logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "scale_emb",
    "scale_depth", "partial_rotary_factor", "rotary_pct",
)  # fmt: skip


def load_spec(folder: Path) -> ModelSpec:
    """Read config.json and generation_config.json of a Hugging Face model folder.

    Raises CheckpointError, in one line, where the folder has no config.json, a key is missing or malformed, or a key
    changes the computation in a way that is not built; code that the folder names (auto_map) is never run.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{shown(folder)}: no config.json; model.path must be a Hugging Face model folder")
    generation = read_json(folder / "generation_config.json")
    return read_spec(read_json(path), shown(path), generation, shown(folder / "generation_config.json"))


def read_spec(values: Json, where: str, generation: Json | None = None, generation_where: str = "") -> ModelSpec:
    """The shape of a model from the content of its two files, `where` for messages. Raises CheckpointError as `load_spec`."""
    config = ConfigReader(values, where)
    family = _family(config)
    config = config.filled(_DEFAULTS[family])
    _refuse(config, family)
    num_heads, num_layers = config.integer("num_attention_heads"), config.integer("num_hidden_layers")
    num_kv_heads, head_dim = read_heads(config)
    max_len, vocab_size = config.integer("max_position_embeddings"), config.integer("vocab_size")
    attention_bias = config.flag("attention_bias") and family in ("llama", "qwen3")
    ends = ConfigReader(generation or {}, generation_where).integer_or_integers("eos_token_id")
    return ModelSpec(
        family=family,
        num_layers=num_layers,
        hidden_size=config.integer("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=vocab_size,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, max_len),
        windows=read_windows(config, family, num_layers),
        tie=config.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias") and family == "llama",
        qk_norm=family == "qwen3",
        eos_ids=tuple(dict.fromkeys(ends + config.integer_or_integers("eos_token_id"))),
        max_len=max_len,
        dtype=_dtype(config),
        generation={key: value for key in _GENERATION_KEYS if (value := (generation or {}).get(key)) is not None},
    )


def read_heads(config: ConfigReader) -> tuple[int, int]:
    """Key/value heads, and the numbers of a head: as many as query heads, and the hidden size by them, where none are named."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = config.integer("head_dim", max(1, config.integer("hidden_size") // num_heads))
    if num_heads % num_kv_heads:
        raise config.refusal(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 2:
        raise config.refusal(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    return num_kv_heads, head_dim


def _family(config: ConfigReader) -> str:
    family, built = config.text("model_type"), ", ".join(_ARCHITECTURES)
    if family not in _ARCHITECTURES:
        raise config.refusal(f"{config.shown('model_type')} is not supported; supported are {built}")
    architectures = config.texts("architectures") or (_ARCHITECTURES[family],)
    if architectures != (_ARCHITECTURES[family],):
        raise config.refusal(f"{config.shown('architectures')} is not supported; {family} needs {_ARCHITECTURES[family]}")
    return family


def _refuse(config: ConfigReader, family: str) -> None:
    found = [config.shown(key) for key in _NOT_BUILT if config.differs(key, None, False)]
    found += [config.shown(key) for key in _NOT_BUILT_SCALES if config.differs(key, None, 1.0)]
    if config.text("hidden_act", "silu") not in ("silu", "swish"):
        found.append(config.shown("hidden_act"))
    if family == "llama" and config.given("sliding_window"):
        found.append(f"{config.shown('sliding_window')} in a llama")
    if found:
        raise config.refusal(f"not supported: {', '.join(found)}; use a dense, unquantized checkpoint without them")


def read_windows(config: ConfigReader, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Keys that a query of each layer sees at most, itself included; None: all."""
    switched_off = family in ("qwen2", "qwen3") and not config.flag("use_sliding_window")
    window = config.integer("sliding_window") if config.given("sliding_window") and not switched_off else None
    types = config.texts("layer_types")
    if types is None:
        first = config.integer("max_window_layers", 28) if family in ("qwen2", "qwen3") else 0
        types = tuple("full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers))
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != num_layers or ("sliding_attention" in types and window is None):
        problem = f"{len(types)} for {num_layers} layers, sliding_window {window}"
        problem = f"{short_json(unknown)} not supported" if unknown else problem
        raise config.refusal(f"layer_types: {problem}; full_attention and sliding_attention (with a sliding_window) are")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_rope(config: ConfigReader, max_len: int | None) -> RopeSpec:
    """The rotary embedding; `max_len` is the original context where the config names none, None: it has to.

    `rope_scaling` where it holds anything, and then nothing of `rope_parameters`, as transformers 5 has it
    (modeling_rope_utils.py, convert_rope_params_to_dict); rope_theta from there, else from the config.
    """
    rope = config.part("rope_scaling") if config.differs("rope_scaling", None, {}) else config.part("rope_parameters")
    kind = rope.text("rope_type", rope.text("type", "default"))
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    wrong = [f"{key} per layer type" for key in rope.objects()]
    if kind not in ("default", "linear", "llama3", "yarn"):
        wrong.append(f"rope_type {kind[:60]!r} (supported: default, linear, llama3, yarn)")
    wrong += [rope.shown(key) for key in ("partial_rotary_factor",) if rope.differs(key, None, 1.0)]
    wrong += [rope.shown(key) for key in ("mrope_section",) if rope.given(key)]
    if wrong:
        raise config.refusal(f"rotary embedding not supported: {', '.join(wrong)}")
    if kind == "default":
        return RopeSpec(type=kind, theta=theta)
    if kind == "linear":
        return RopeSpec(type=kind, theta=theta, factor=rope.number("factor"))
    key = "original_max_position_embeddings"
    original = config.integer(key) if config.given(key) else rope.integer(key, max_len)
    if kind == "yarn":
        return _yarn(rope, theta, original, max_len)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise config.refusal(f"high_freq_factor {high:g} must exceed low_freq_factor {low:g}; correct them")
    factor = rope.number("factor")
    return RopeSpec(type=kind, theta=theta, factor=factor, original_max_len=original, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: ConfigReader, theta: float, original: int, max_len: int | None) -> RopeSpec:
    factor = rope.number("factor", None if max_len is None else max_len / original)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast < slow:
        raise rope.refusal(f"beta_fast {fast:g} is below beta_slow {slow:g}; swap them")
    return RopeSpec(
        type="yarn",
        theta=theta,
        factor=factor,
        original_max_len=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", "truncate" not in rope),  # null is no to transformers
    )


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """YaRN section 3.4 (arXiv 2309.00071): 0.1 ln(factor) + 1; DeepSeek's mscale keys replace the 0.1 by a ratio."""
    if rope.given("attention_factor"):
        return rope.number("attention_factor")
    if factor <= 1:
        return 1.0
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


def _dtype(config: ConfigReader) -> str:
    name = (config.text("dtype") or config.text("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float64", "float16"):
        raise config.refusal(f"dtype {name[:60]!r} is not supported; use a float32 or bfloat16 checkpoint")
    return name
