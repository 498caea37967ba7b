"""Rotary position embedding as config.json describes it: `rope_parameters`, `rope_scaling` or bare keys -> RopeSpec."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from batchspec.checkpoint.config_values import INTEGERS, ConfigReader
from batchspec.console.text import as_json, quoted

USUAL_THETA = 10_000.0
_YARN_BUILT = {"extrapolation_factor": 1.0, "apply_yarn_scaling": True}
"""Keys of yarn in vLLM -> the only value that is supported."""
MAX_LEN = INTEGERS["max_position_embeddings"][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding. The fields after `theta` apply to the types that their docstrings name."""

    type: str
    """default, linear, llama3, yarn, longrope or proportional; or none, which rotates nothing."""
    theta: float
    factor: float = 1.0
    """linear, llama3, yarn, proportional: factor by which the context is longer than the original one."""
    original_max_len: int = 0
    """llama3, yarn, longrope: context of the pretraining, in tokens."""
    original_is_given: bool = True
    """yarn: whether the config gives original_max_len. If not, it is max_position_embeddings, as in transformers."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn: number of rotations over the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """yarn: number of rotations below which it is divided by `factor`."""
    attention_factor: float = 1.0
    """yarn, longrope: factor of cos and sin."""
    truncate: bool = True
    """yarn: round the two ends of the ramp to whole dimensions."""
    rotary_dim: int | None = None
    """Number of first values of each head that are rotated, even; the others are not changed. None: all are rotated."""
    interleaved: bool = False
    """Whether dimension 2j is rotated with 2j + 1; otherwise j with j + half of the rotated ones."""
    divisors: tuple[float, ...] = ()
    """longrope: the divisor of each frequency."""
    query_growth: float = 0.0
    """q at position p is multiplied by 1 + query_growth * ln(1 + floor(p / original_max_len)); 0: it is not."""
    rotated_share: float = 1.0
    """proportional: share of the pairs of a head that are rotated; value j is paired with j + half of the head even so."""

    def longest(self, max_len: int) -> int:
        """Tokens of the longest row for which it is correct. max_len: the model's max_position_embeddings.

        With yarn that may be the length without it: model cards of Qwen and GLM say to add rope_scaling, and to change no other
        key. But if the config does not give the original length, max_len may as well be the length with it, and is not extended.
        """
        if self.type == "longrope":
            return min(max_len, self.original_max_len)
        if self.type == "yarn" and self.original_is_given:
            return max(max_len, min(int(self.factor * self.original_max_len), MAX_LEN))
        return max_len

    @property
    def limit_note(self) -> str:
        """Why rows may not be as long as other keys of the config suggest; empty if nothing here limits them."""
        if self.type == "longrope":
            return (
                f"longrope has other frequencies for rows of more than original_max_position_embeddings={self.original_max_len} "
                "tokens, and only those of shorter rows are supported"
            )
        if self.type == "yarn" and not self.original_is_given and self.factor > 1:
            return (
                "yarn without original_max_position_embeddings does not say whether max_position_embeddings="
                f"{self.original_max_len} is the length before or after its factor {self.factor:g}; add that key to config.json"
            )
        return ""

    @property
    def of_heads(self) -> RopeSpec:
        """The rotary embedding for a new draft head: one that every reader of heads supports."""
        if self.type in ("longrope", "proportional", "none"):
            return RopeSpec(type="default", theta=self.theta)
        return replace(self, rotary_dim=None, interleaved=False, query_growth=0.0)


NO_ROPE = RopeSpec(type="none", theta=USUAL_THETA)


def read_rope(config: ConfigReader, max_len: int | None, *, head_dim: int | None = None, sections: bool = False) -> RopeSpec:
    """Read the rotary embedding of a config.

    max_len   the original context if the config gives none; None: the config must give it
    head_dim  given for a family that may rotate a part of each head (partial_rotary_factor); None: that is refused
    sections  whether it may have sections for the positions of images (mrope_section), which text does not need
    """
    rope = rope_part(config)
    spec = read_part(config, rope, max_len, read_theta(config, rope), partial=head_dim is not None, sections=sections)
    return spec if head_dim is None else replace(spec, rotary_dim=read_rotary_dim(config, rope, head_dim))


def rope_part(config: ConfigReader) -> ConfigReader:
    """`rope_scaling` if it is not empty, and then nothing of `rope_parameters`, as in transformers 5 (modeling_rope_utils.py,
    convert_rope_params_to_dict).

    Raises CheckpointError if the hidden rope_parameters has another rope_theta than the one that is read. That happens to a file
    that transformers 5 saved and to which somebody added the rope_scaling of a model card: transformers would compute with its
    default rope_theta.
    """
    if not config.differs("rope_scaling", None, {}):
        return config.part("rope_parameters")
    scaling = config.part("rope_scaling")
    theta, hidden = read_theta(config, scaling), config.unchecked("rope_parameters", "rope_theta")
    if hidden not in (None, theta):
        raise config.refusal(
            f"rope_scaling hides rope_parameters.rope_theta={as_json(hidden)}, and rope_theta would be {theta:g}; move the "
            "keys of rope_scaling into rope_parameters"
        )
    return scaling


def rope_kind(rope: ConfigReader) -> str:
    """The value of rope_type, or else of type; if that is null, the text `null`, which no family supports."""
    return rope.filled({"type": "default"}).text("rope_type" if "rope_type" in rope else "type", "null")


def read_theta(config: ConfigReader, rope: ConfigReader, *, key: str = "rope_theta", usual: float = USUAL_THETA) -> float:
    """rope_theta of the rotary embedding's part of the config, or else `key` of the config; `usual` if both are missing. A null
    is refused: without it other values would be used."""
    return rope.number("rope_theta") if "rope_theta" in rope else config.filled({key: usual}).number(key)


def read_rotary_dim(config: ConfigReader, rope: ConfigReader, head_dim: int) -> int | None:
    """int(head_dim * partial_rotary_factor), the factor from the rotary embedding's part of the config, or else from the
    config. In the config a null means 1; in the part it is refused."""
    part, usual = (rope, None) if "partial_rotary_factor" in rope else (config, 1.0)
    rotary_dim = int(head_dim * part.number("partial_rotary_factor", usual))
    if rotary_dim < 2 or rotary_dim % 2:
        raise config.refusal(
            f"{part.shown('partial_rotary_factor')} rotates {rotary_dim} of the {head_dim} numbers of a head; rotary embedding "
            "needs pairs"
        )
    return None if rotary_dim == head_dim else rotary_dim


def read_sections(rope: ConfigReader, usual: tuple[int, ...], pairs: int) -> tuple[int, ...]:
    """mrope_section: how many frequencies of a rotation read the axis of time, of height and of width of an image. rope: the part
    of the config about it; pairs: number of all. Raises CheckpointError."""
    found = rope.ranged({"mrope_section": (0, 2**12)}).integers("mrope_section") or usual
    if len(found) != 3 or sum(found) != pairs:
        raise rope.refusal(f"mrope_section={list(found)} must be three numbers with the sum {pairs}; correct it")
    return found


def read_part(
    config: ConfigReader, rope: ConfigReader, max_len: int | None, theta: float, *, partial: bool = False, sections: bool = False
) -> RopeSpec:
    """Read one object that describes a rotary embedding. partial: the caller reads its partial_rotary_factor; sections: as in
    `read_rope`."""
    kind = rope_kind(rope)
    if kind == "mrope" and sections:  # as Qwen2.5-VL's files call it
        kind = "default"
    wrong = [f"{key} per layer type" for key in rope.objects()]
    if kind not in ("default", "linear", "llama3", "yarn"):
        wrong.append(f"rope_type {quoted(kind)} (supported: default, linear, llama3, yarn)")
    wrong += [rope.shown(key) for key in ("partial_rotary_factor",) if not partial and rope.differs(key, None, 1.0)]
    wrong += [rope.shown(key) for key in ("mrope_section",) if rope.given(key) and not sections]
    if kind == "yarn":
        wrong += [rope.shown(key) for key, usual in _YARN_BUILT.items() if rope.differs(key, None, usual)]
        if rope.given("attn_factor") and rope.given("attention_factor"):
            wrong.append(f"{rope.shown('attn_factor')} and {rope.shown('attention_factor')} together")
    if wrong:
        raise config.refusal(f"rotary embedding not supported: {', '.join(wrong)}")
    if kind == "default":
        return RopeSpec(type=kind, theta=theta)
    if kind == "linear":
        return RopeSpec(type=kind, theta=theta, factor=rope.number("factor"))
    key = "original_max_position_embeddings"
    original = config.integer(key) if key in config else rope.filled({key: max_len}).integer(key)
    if kind == "yarn":
        return replace(_yarn(rope, theta, original, max_len), original_is_given=key in config or key in rope)
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
        truncate=rope.flag("truncate", "truncate" not in rope),  # transformers reads null as false
    )


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """YaRN section 3.4 (arXiv 2309.00071): 0.1 ln(factor) + 1; DeepSeek's mscale keys replace 0.1 by a ratio.

    attn_factor multiplies that, as in vLLM and SGLang: DeepSeek-R1-0528-Qwen3-8B sets it so that the product is 1. transformers
    ignores attn_factor, with a warning.
    """
    if rope.given("attention_factor"):
        return rope.number("attention_factor")
    own = rope.number("attn_factor", 1.0)
    if factor <= 1:
        return own
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        return own * (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1)
    return own * (0.1 * math.log(factor) + 1)
