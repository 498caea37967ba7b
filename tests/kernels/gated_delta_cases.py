"""Rows, states and inputs for the tests of the gated delta rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState, wide

NAN = float("nan")


class Sizes(NamedTuple):
    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 24
    value_dim: int = 40
    taps: int = 4
    ring: int = 8

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def four(self) -> tuple[int, int, int, int]:
        return self.key_heads, self.value_heads, self.key_dim, self.value_dim


SMALL, ODD = Sizes(), Sizes(1, 3, 7, 19, 3, 11)


class Row(NamedTuple):
    """`num_tokens` tokens from position `begin` on, of the row in `slot`."""

    slot: int
    begin: int
    num_tokens: int
    live: bool = True


def batch_of(rows: Sequence[Row], device: torch.device, *, padding: int = 0) -> DeltaBatch:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    counts = [row.num_tokens for row in rows]
    ids = [index for index, count in enumerate(counts) for _ in range(count)]
    positions = [row.begin + at for row in rows for at in range(row.num_tokens)]
    return DeltaBatch(
        cu_seqlens=torch.tensor([0, *counts], **ints).cumsum(0).int(), row_ids=torch.tensor(ids + padding * [0], **ints),
        positions=torch.tensor(positions + padding * [0], dtype=torch.int64, device=device),
        slots=torch.tensor([row.slot for row in rows], **ints),
        live=None if all(row.live for row in rows) else torch.tensor([int(row.live) for row in rows], **ints),
        max_tokens=max(counts),
    )


def poisoned_state(
    slots: int, sizes: Sizes, device: torch.device, *, dtype: torch.dtype = torch.float32, state_dtype: torch.dtype | None = None
) -> DeltaState:
    """NaN everywhere, as views of wider tensors whose other half belongs to another layer."""

    def made(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full((slots, 2, *shape), NAN, dtype=dtype, device=device)[:, 1]

    key_heads, value_heads, key_dim, value_dim = sizes.four
    return DeltaState(
        state=made(value_heads, value_dim, key_dim, dtype=state_dtype or wide(dtype)),
        conv_inputs=made(sizes.ring, sizes.channels, dtype=dtype), keys=made(sizes.ring, key_heads, key_dim, dtype=dtype),
        values=made(sizes.ring, value_heads, value_dim, dtype=dtype), gates=made(sizes.ring, value_heads, 2, dtype=wide(dtype)),
        folded=torch.zeros(slots, dtype=torch.int32, device=device),
    )


def copy_of(state: DeltaState) -> DeltaState:
    return DeltaState(**{name: getattr(state, name).clone() for name in DeltaState.__slots__})


def random_inputs(num_tokens: int, sizes: Sizes, device: torch.device, *, dtype: torch.dtype = torch.float32) -> DeltaInputs:
    """Decays from nearly 0 to nearly 1."""
    key_heads, value_heads, key_dim, value_dim = sizes.four
    g = -torch.rand(num_tokens, value_heads, dtype=torch.float64).pow(3) * 4
    beta = torch.randn(num_tokens, value_heads, dtype=torch.float64).sigmoid()
    q, k = F.normalize(torch.randn(2, num_tokens, key_heads, key_dim, dtype=torch.float64), dim=-1)
    return DeltaInputs(
        q=(q * key_dim**-0.5).to(device, dtype),
        k=k.to(device, dtype),
        v=torch.randn(num_tokens, value_heads, value_dim).to(device, dtype),
        gates=torch.stack((g, beta), 2).to(device, wide(dtype)),
    )


def pick(inputs: DeltaInputs, tokens: Tensor | slice) -> DeltaInputs:
    return DeltaInputs(**{name: getattr(inputs, name)[tokens].contiguous() for name in DeltaInputs.__slots__})


def joined(parts: Sequence[DeltaInputs]) -> DeltaInputs:
    return DeltaInputs(**{name: torch.cat([getattr(part, name) for part in parts]) for name in DeltaInputs.__slots__})


def in_double(inputs: DeltaInputs) -> DeltaInputs:
    return DeltaInputs(**{name: getattr(inputs, name).double() for name in DeltaInputs.__slots__})


def remember(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch) -> None:
    """Write the rings that a round replays, as `convolve` does."""
    for slot, own, _ in batch.rows():
        place = batch.positions[own] % state.keys.shape[1]
        for ring, made in ((state.keys, inputs.k), (state.values, inputs.v), (state.gates, inputs.gates)):
            ring[slot, place] = made[own]


def by_definition(inputs: DeltaInputs, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """o and the state after the tokens of one row, in fp64, from the state before them or zeros.

    Written anew from the paper, with plain loops over heads and tokens.
    """
    inputs = in_double(inputs)
    num_tokens, value_heads, value_dim = inputs.v.shape
    key_heads, key_dim = inputs.k.shape[1:]
    out = torch.zeros_like(inputs.v)
    states = torch.zeros(value_heads, value_dim, key_dim, dtype=torch.float64, device=out.device) if before is None else before
    states = states.double().clone()
    for head in range(value_heads):
        s = states[head]
        for t in range(num_tokens):
            k, q = (x[t, head * key_heads // value_heads] for x in (inputs.k, inputs.q))
            g, beta = inputs.gates[t, head]
            s = g.exp() * (s - beta * torch.outer(s @ k, k)) + beta * torch.outer(inputs.v[t, head], k)
            out[t, head] = s @ q
        states[head] = s
    return out, states
