"""Rotary position embedding as config.json describes it: `rope_parameters`, `rope_scaling` or bare keys -> RopeSpec."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from batchspec.model.config_values import ConfigReader

USUAL_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding; the fields after `theta` belong to the types that name them."""

    type: str
    """default, linear, llama3, yarn or longrope."""
    theta: float
    factor: float = 1.0
    """linear, llama3, yarn: how many times longer than the original context."""
    original_max_len: int = 0
    """llama3, yarn, longrope: context of the pretraining, in tokens."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn: rotations over the original context above which a frequency stays as it is."""
    beta_slow: float = 1.0
    """yarn: rotations below which it is divided by `factor`."""
    attention_factor: float = 1.0
    """yarn, longrope: cos and sin are multiplied by it."""
    truncate: bool = True
    """yarn: round the two ends of the ramp to whole dimensions."""
    rotary_dim: int | None = None
    """The first so many numbers of each head are rotated, the others stay as they are; None: all are rotated. Even."""
    interleaved: bool = False
    """Dimension 2j is rotated with 2j + 1; else j with j + half of those that are rotated."""
    divisors: tuple[float, ...] = ()
    """longrope: each frequency is divided by its own."""

    def longest(self, max_len: int) -> int:
        """The longest row that it is right for, of a model that names `max_len`."""
        return min(max_len, self.original_max_len) if self.type == "longrope" else max_len

    @property
    def of_heads(self) -> RopeSpec:
        """What a new draft head takes over: one that any reader of heads knows."""
        if self.type == "longrope":
            return RopeSpec(type="default", theta=self.theta)
        return replace(self, rotary_dim=None, interleaved=False)


def read_rope(config: ConfigReader, max_len: int | None, *, head_dim: int | None = None) -> RopeSpec:
    """The rotary embedding.

    max_len   the original context where the config names none; None: it has to
    head_dim  of a family that may rotate a part of each head (partial_rotary_factor); None: that is refused

    rope_theta from the `rope_part`, else from the config.
    """
    rope = rope_part(config)
    spec = read_part(config, rope, max_len, config.number("rope_theta", USUAL_THETA), partial=head_dim is not None)
    return spec if head_dim is None else replace(spec, rotary_dim=read_rotary_dim(config, rope, head_dim))


def rope_part(config: ConfigReader) -> ConfigReader:
    """`rope_scaling` where it holds anything, and then nothing of `rope_parameters`, as transformers 5 has it
    (modeling_rope_utils.py, convert_rope_params_to_dict)."""
    return config.part("rope_scaling") if config.differs("rope_scaling", None, {}) else config.part("rope_parameters")


def rope_kind(rope: ConfigReader) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def read_rotary_dim(config: ConfigReader, rope: ConfigReader, head_dim: int) -> int | None:
    """int(head_dim * partial_rotary_factor), the factor from the rope's part of the config, else from the config."""
    part = rope if rope.given("partial_rotary_factor") else config
    rotary_dim = int(head_dim * part.number("partial_rotary_factor", 1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise config.refusal(
            f"{part.shown('partial_rotary_factor')} rotates {rotary_dim} of the {head_dim} numbers of a head; rotary embedding "
            "needs pairs"
        )
    return None if rotary_dim == head_dim else rotary_dim


def read_part(
    config: ConfigReader, rope: ConfigReader, max_len: int | None, usual_theta: float, *, partial: bool = False
) -> RopeSpec:
    """One object that describes a rotary embedding. partial: its partial_rotary_factor is the caller's to read."""
    kind = rope_kind(rope)
    theta = rope.number("rope_theta", usual_theta)
    wrong = [f"{key} per layer type" for key in rope.objects()]
    if kind not in ("default", "linear", "llama3", "yarn"):
        wrong.append(f"rope_type {kind[:60]!r} (supported: default, linear, llama3, yarn)")
    wrong += [rope.shown(key) for key in ("partial_rotary_factor",) if not partial and rope.differs(key, None, 1.0)]
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
