"""Rotary position embedding: the frequencies of each type and the cos and sin of a batch's positions.

Rotates dimension j with j + R/2, or 2j with 2j + 1 if pairs are interleaved, by position * frequency[j], for the first R of D
dimensions; the others are not changed. Types: default (Su et al. 2021, arXiv 2104.09864), linear (position
interpolation, arXiv 2306.15595), llama3 (Llama 3.1's config.json), yarn (arXiv 2309.00071) and proportional (Gemma 4: all of a
head, with frequency 0 for the last pairs); all in fp32, as transformers 5 computes them (modeling_rope_utils.py), so that
checkpoints give the same logits. Layers without a rotation (type none) have frequencies of 0, so that they go through the same
kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.batch.image_inputs import AxisPositions
from batchspec.model.layers.attention.rope_config import RopeSpec


def rope_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """fp32 [R/2] radians per token, R the number of rotated values of a head: `rope.rotary_dim`, or all of them."""
    dim = rope.rotary_dim or head_dim
    if rope.type == "proportional":
        rotated = int(rope.rotated_share * head_dim // 2)
        freqs = 1.0 / rope.theta ** (torch.arange(0, 2 * rotated, 2, dtype=torch.float32) / head_dim)
        return F.pad(freqs / rope.factor, (0, head_dim // 2 - rotated))
    freqs = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.type == "none":
        return freqs.zero_()
    if rope.type == "longrope":
        return freqs / torch.tensor(rope.divisors)
    if rope.type == "linear":
        return freqs / rope.factor
    if rope.type == "llama3":
        return _llama3(freqs, rope)
    if rope.type == "yarn":
        return _yarn(freqs, rope, dim)
    return freqs


def _llama3(freqs: Tensor, rope: RopeSpec) -> Tensor:
    """Short wavelengths are kept, long ones divided by `factor`; between them a linear ramp in rotations over the original
    context."""
    rotations = rope.original_max_len * freqs / (2 * math.pi)
    keep = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * freqs / rope.factor + keep * freqs


def _yarn(freqs: Tensor, rope: RopeSpec, dim: int) -> Tensor:
    """A ramp over the `dim` dimensions between those that rotate `beta_fast` and `beta_slow` times in the original context."""

    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    divide = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return freqs / rope.factor * divide + freqs * (1 - divide)


def rope_angles(positions: Tensor, freqs: Tensor, attention_factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R] of int64 positions [T], or [T, R/2] if they differ by frequency; the first half of sin is negated, as
    `rotate` requires."""
    angles = (positions if positions.ndim == 2 else positions[:, None]).to(torch.float32) * freqs
    cos, sin = angles.cos().mul_(attention_factor), angles.sin().mul_(attention_factor)
    return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotation of a batch's heads, computed once for all layers."""

    positions: Tensor
    """int64 [T], with axes [3, T]"""
    freqs: Tensor
    """float32 [R/2] radians per token, R the number of rotated values of a head"""
    attention_factor: float
    """scale of cos and sin"""
    interleaved: bool
    """whether dimension 2j is rotated with 2j + 1; otherwise j with j + R/2"""
    angles: tuple[Tensor, Tensor] | None
    """cos and sin as from `rope_angles`; None on a GPU, whose kernel computes them"""
    axes: Tensor | None = None
    """int64 [R/2] the axis of positions that each frequency reads; None: they have one"""
    query_factors: Tensor | None = None
    """[T, 1, 1] factors of q by its position, in the model's dtype; None: q has none"""


def rope_of(positions: Tensor | AxisPositions, freqs: Tensor, rope: RopeSpec, dtype: torch.dtype) -> Rope:
    """The rotation of int64 positions [T] for heads of `dtype`; freqs of `rope_frequencies`. Launches nothing on a GPU, unless q
    grows with its position, or positions have several axes: then it uploads which frequency reads which."""
    factor = rope.attention_factor
    if isinstance(positions, AxisPositions):
        assert not rope.query_growth, rope
        values, axes = positions.values, positions.of_frequencies(len(freqs))
        return Rope(
            positions=values, freqs=freqs, attention_factor=factor, interleaved=rope.interleaved, axes=axes,
            angles=None if values.is_cuda else rope_angles(values[axes].T, freqs, factor, dtype),
        )
    angles = None if positions.is_cuda else rope_angles(positions, freqs, factor, dtype)
    return Rope(
        positions=positions, freqs=freqs, attention_factor=factor, interleaved=rope.interleaved, angles=angles,
        query_factors=query_factors(positions, rope, dtype),
    )


def query_factors(positions: Tensor, rope: RopeSpec, dtype: torch.dtype) -> Tensor | None:
    """[T, 1, 1] 1 + query_growth * ln(1 + floor(position / original_max_len)), computed in fp32; None: all are 1."""
    if not rope.query_growth:
        return None
    lengths = positions.div(rope.original_max_len, rounding_mode="floor").float()
    return lengths.add_(1.0).log_().mul_(rope.query_growth).add_(1.0).to(dtype)[:, None, None]
