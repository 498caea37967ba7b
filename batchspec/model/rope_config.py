"""Rotary position embedding as config.json describes it: `rope_parameters`, `rope_scaling` or bare keys -> RopeSpec."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from batchspec.model.config_values import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding; the fields after `rotary_dim` belong to the types that name them."""

    type: str
    """default, linear, llama3 or yarn."""
    theta: float
    rotary_dim: int | None = None
    """So many numbers of a head, the first ones, are rotated; None: all."""
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


def read_rope(config: ConfigReader, max_len: int | None, *, partial: bool = False) -> RopeSpec:
    """The rotary embedding; `max_len` is the original context where the config names none, None: it has to.

    partial  heads may be rotated in part (partial_rotary_factor, rotary_dim); else that is refused
    `rope_scaling` where it holds anything, and then nothing of `rope_parameters`, as transformers 5 has it
    (modeling_rope_utils.py, convert_rope_params_to_dict); rope_theta from there, else from the config.
    """
    rope = config.part("rope_scaling") if config.differs("rope_scaling", None, {}) else config.part("rope_parameters")
    kind = rope.text("rope_type", rope.text("type", "default"))
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    wrong = [f"{key} per layer type" for key in rope.objects()]
    if kind not in ("default", "linear", "llama3", "yarn"):
        wrong.append(f"rope_type {kind[:60]!r} (supported: default, linear, llama3, yarn)")
    wrong += [rope.shown(key) for key in ("partial_rotary_factor",) if not partial and rope.differs(key, None, 1.0)]
    wrong += [rope.shown(key) for key in ("mrope_section",) if rope.given(key)]
    if wrong:
        raise config.refusal(f"rotary embedding not supported: {', '.join(wrong)}")
    spec = _of_type(kind, config, rope, theta, max_len)
    return replace(spec, rotary_dim=_rotary_dim(config, rope)) if partial else spec


def _of_type(kind: str, config: ConfigReader, rope: ConfigReader, theta: float, max_len: int | None) -> RopeSpec:
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


def _rotary_dim(config: ConfigReader, rope: ConfigReader) -> int | None:
    """The factor of the embedding's object before the config's own, and that before rotary_dim, as transformers 5 has it."""
    head_dim = config.integer("head_dim", max(1, config.integer("hidden_size") // config.integer("num_attention_heads")))
    key = "partial_rotary_factor"
    found = next((reader for reader in (rope, config) if reader.given(key)), None)
    rotary_dim = config.integer("rotary_dim", head_dim) if found is None else int(head_dim * found.number(key))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise config.refusal(f"{rotary_dim} of {head_dim} numbers of a head are rotated; it must be an even part of them")
    return None if rotary_dim == head_dim else rotary_dim


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
