"""config.json -> ModelSpec: the shape of a model, both spellings read, everything that is not built refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchspec.errors import CheckpointError

Json = Mapping[str, Any]


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


# What a missing key means: the defaults of transformers 5 (models/*/configuration_*.py).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where the file is not there. CheckpointError where it is not one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not an object; download the file again")
    return value


def load_spec(folder: Path) -> ModelSpec:
    """Read config.json and generation_config.json of a Hugging Face model folder.

    Raises CheckpointError, in one line, where the folder has no config.json, a key is missing or malformed, or a key
    changes the computation in a way that is not built; code that the folder names (auto_map) is never run.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json; model.path must be a Hugging Face model folder")
    config = read_json(path)
    family = _family(config, path)
    config = {**_DEFAULTS[family], **config}
    _refuse(config, family, path)
    num_heads, num_layers = read_integer(config, "num_attention_heads", path), read_integer(config, "num_hidden_layers", path)
    hidden_size, max_len = read_integer(config, "hidden_size", path), read_integer(config, "max_position_embeddings", path)
    given = {key: read_integer(config, key, path) for key in ("num_key_value_heads", "head_dim") if config.get(key) is not None}
    num_kv_heads, head_dim = given.get("num_key_value_heads", num_heads), given.get("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{path}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 2:
        raise CheckpointError(f"{path}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    generation = read_json(folder / "generation_config.json")
    attention_bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
    return ModelSpec(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=read_integer(config, "intermediate_size", path),
        vocab_size=read_integer(config, "vocab_size", path),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config, max_len, path),
        windows=read_windows(config, family, num_layers, path),
        tie=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        eos_ids=tuple(dict.fromkeys(_ids(generation.get("eos_token_id")) + _ids(config.get("eos_token_id")))),
        max_len=max_len,
        dtype=_dtype(config, path),
        generation={key: generation[key] for key in _GENERATION_KEYS if generation.get(key) is not None},
    )


def _family(config: Json, path: Path) -> str:
    family, built = config.get("model_type"), ", ".join(_ARCHITECTURES)
    if family not in _ARCHITECTURES:
        raise CheckpointError(f"{path}: model_type {family!r} is not supported; supported are {built}")
    architectures = config.get("architectures") or [_ARCHITECTURES[family]]
    if architectures != [_ARCHITECTURES[family]]:
        raise CheckpointError(f"{path}: architectures {architectures} is not supported; {family} needs {_ARCHITECTURES[family]}")
    return str(family)


def _refuse(config: Json, family: str, path: Path) -> None:
    keys = [key for key in _NOT_BUILT if config.get(key) not in (None, False)]
    keys += [key for key in _NOT_BUILT_SCALES if config.get(key) not in (None, 1.0)]
    found = [f"{key}={short_json(config[key])}" for key in keys]
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        found.append(f"hidden_act={act!r}")
    if family == "llama" and config.get("sliding_window") is not None:
        found.append(f"sliding_window={config['sliding_window']} in a llama")
    if found:
        raise CheckpointError(f"{path}: not supported: {', '.join(found)}; use a dense, unquantized checkpoint without them")


def read_windows(config: Json, family: str, num_layers: int, path: Path) -> tuple[int | None, ...]:
    """Keys that a query of each layer sees at most, itself included; None: all."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if types is None:
        first = int(config.get("max_window_layers", 28)) if family in ("qwen2", "qwen3") else 0
        types = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers)]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != num_layers or ("sliding_attention" in types and window is None):
        problem = f"{unknown} not supported" if unknown else f"{len(types)} for {num_layers} layers, sliding_window {window}"
        raise CheckpointError(f"{path}: layer_types: {problem}; full_attention and sliding_attention (with a sliding_window) are")
    return tuple(int(window) if kind == "sliding_attention" and window is not None else None for kind in types)


def read_rope(config: Json, max_len: int, path: Path) -> RopeSpec:
    """Both spellings of the rotary embedding; `max_len` is the original context where the config names none."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    wrong = [f"{key} per layer type" for key, value in rope.items() if isinstance(value, dict)]
    if kind not in ("default", "linear", "llama3", "yarn"):
        wrong.append(f"rope_type {kind!r} (supported: default, linear, llama3, yarn)")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        wrong.append(f"partial_rotary_factor {rope['partial_rotary_factor']}")
    if rope.get("mrope_section") is not None:
        wrong.append("mrope_section")
    if wrong:
        raise CheckpointError(f"{path}: rotary embedding not supported: {', '.join(wrong)}")
    if kind == "default":
        return RopeSpec(type=kind, theta=theta)
    original = int(config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or max_len)
    if rope.get("factor") is None and kind != "yarn":
        raise CheckpointError(f"{path}: rope_type {kind!r} without a factor; add rope_scaling.factor")
    factor = float(rope.get("factor") or 0.0) or max_len / original
    if kind == "linear":
        return RopeSpec(type=kind, theta=theta, factor=factor)
    if kind == "yarn":
        return RopeSpec(
            type=kind,
            theta=theta,
            factor=factor,
            original_max_len=original,
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            attention_factor=_yarn_attention_factor(rope, factor),
            truncate=bool(rope.get("truncate", True)),
        )
    missing = [key for key in ("low_freq_factor", "high_freq_factor") if rope.get(key) is None]
    if missing:
        raise CheckpointError(f"{path}: rope_type 'llama3' without {' and '.join(missing)}; add them to rope_scaling")
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    return RopeSpec(type=kind, theta=theta, factor=factor, original_max_len=original, low_freq_factor=low, high_freq_factor=high)


def _yarn_attention_factor(rope: Json, factor: float) -> float:
    """YaRN section 3.4 (arXiv 2309.00071): 0.1 ln(factor) + 1; DeepSeek's mscale keys replace the 0.1 by a ratio."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if factor <= 1:
        return 1.0
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all:
        return float((0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1))
    return 0.1 * math.log(factor) + 1


def _dtype(config: Json, path: Path) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float64", "float16"):
        raise CheckpointError(f"{path}: dtype {name!r} is not supported; use a float32 or bfloat16 checkpoint")
    return name


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def read_integer(config: Json, key: str, path: Path) -> int:
    """A positive integer that the config must have."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path}: {key} is {short_json(value)}; it must be a positive integer")
    return value


def short_json(value: Any) -> str:
    """For messages: at most 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
