"""What the kernels of Mamba2 layers share: what a layer keeps of a row, its weights, and their checks.

T flat tokens of R rows, NH heads of D values, G groups of NH / G heads with one B and one C of N values, P positions of the
rings.

    dt = softplus(dt + dt_bias),   A = -exp(a_log)      of each head
    S = exp(dt A) S + dt x B';     y = S C + d x        S [D, N] of each head; head j has B and C of group j // (NH / G)

`xbc` has x of all heads, then B and C of all groups. dt is not clamped: vLLM and SGLang clamp it nowhere, transformers clamps it
at time_step_min in prompts, and not where it decodes token by token.

A layer keeps of each slot's row the state after the row's first `folded` tokens, and rings with the inputs of later positions:
position p is at p % P. As in gated delta layers (`gated_delta/layout.py`), a round replays what was accepted of the one before
it.
Source: Dao and Gu 2024 (arXiv 2405.21060); models/nemotron_h of transformers 5.24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.gated_delta.layout import wide
from batchspec.kernels.short_conv.short_conv import ConvRows


class Sizes(NamedTuple):
    """Of a layer."""

    heads: int
    """NH"""
    head_dim: int
    """D"""
    groups: int
    """G"""
    state_size: int
    """N"""

    @property
    def inner(self) -> int:
        """Number of values of x for one token, and as many of y."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of x, B and C."""
        return self.inner + 2 * self.groups * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SsmWeights:
    """Weights of the recurrence, each [NH], fp32 or of the model's dtype."""

    a_log: Tensor
    dt_bias: Tensor
    d: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SsmState:
    """What the recurrence keeps of the rows, one entry a slot. Each tensor is contiguous but for its first dimension."""

    state: Tensor
    """[slots, NH, D, N] fp32, bf16 or, with fp64 inputs, fp64: after the first `folded` tokens. Undefined if `folded` is 0"""
    inputs: Tensor
    """[slots, P, NH D + G N] of the model's dtype: x and B, after the convolution and SiLU"""
    steps: Tensor
    """[slots, P, NH] of the model's dtype: dt before its bias"""
    folded: Tensor
    """int32 [slots], the same for all layers: the kernels only read it"""

    @property
    def sizes(self) -> Sizes:
        _, heads, head_dim, state_size = self.state.shape
        return Sizes(heads, head_dim, (self.inputs.shape[2] - heads * head_dim) // state_size, state_size)


def check_scan(
    kernel: str, xbc: Tensor, dt: Tensor, weights: SsmWeights, state: SsmState, rows: ConvRows, out: Tensor
) -> None:
    """`check` everything that the recurrence reads, and its output [T, NH D] of the model's dtype. Raises ValueError."""
    own, num_tokens, dtype, (slots, ring, _) = state.sizes, len(xbc), xbc.dtype, state.inputs.shape
    if own.heads % own.groups:
        raise ValueError(f"{kernel}: {own.heads} heads are no multiple of {own.groups} groups")
    check(f"{kernel}: xbc", xbc, (num_tokens, own.channels), *FLOATS, rows=True)
    check(f"{kernel}: dt", dt, (num_tokens, own.heads), dtype, rows=True)
    for name, weight in (("a_log", weights.a_log), ("dt_bias", weights.dt_bias), ("d", weights.d)):
        check(f"{kernel}: {name}", weight, (own.heads,), dtype, wide(dtype))
    states = (torch.float64,) if dtype == torch.float64 else (torch.float32, torch.bfloat16)
    check(f"{kernel}: state[0]", state.state[0], (own.heads, own.head_dim, own.state_size), *states)
    check(f"{kernel}: inputs[0]", state.inputs[0], (ring, own.inner + own.groups * own.state_size), dtype)
    check(f"{kernel}: steps[0]", state.steps[0], (ring, own.heads), dtype)
    check(f"{kernel}: folded", state.folded, (slots,), torch.int32)
    rows.check(kernel, num_tokens)
    check(f"{kernel}: out", out, (num_tokens, own.inner), dtype)
