"""Rows, states and inputs for the tests of Mamba2's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.gated_delta.layout import wide
from batchspec.kernels.mamba2.layout import Sizes, SsmState, SsmWeights
from batchspec.kernels.short_conv.short_conv import ConvRows
from tests.kernels.test_short_conv import Row, rows_of

NAN = float("nan")
SMALL, ODD = Sizes(6, 40, 2, 24), Sizes(3, 19, 1, 7)
RING = 8

__all__ = ["NAN", "ODD", "SMALL", "ConvRows", "Row", "Sizes", "rows_of"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of T tokens."""

    xbc: Tensor
    dt: Tensor

    def pick(self, tokens: slice) -> Inputs:
        return Inputs(self.xbc[tokens].contiguous(), self.dt[tokens].contiguous())

    def in_wider_rows(self) -> Inputs:
        """The same as slices of rows whose other columns are NaN."""
        return Inputs(*(F.pad(part, (3, 5), value=NAN)[:, 3:-5] for part in (self.xbc, self.dt)))


def joined(parts: Sequence[Inputs]) -> Inputs:
    return Inputs(torch.cat([part.xbc for part in parts]), torch.cat([part.dt for part in parts]))


def random_inputs(num_tokens: int, sizes: Sizes, device: torch.device, *, dtype: torch.dtype = torch.float32) -> Inputs:
    """Of dt, steps from nearly 0 to 20."""
    xbc = torch.randn(num_tokens, sizes.channels, dtype=torch.float64)
    xbc[:, sizes.inner :] *= sizes.state_size**-0.25
    dt = 3 * torch.randn(num_tokens, sizes.heads, dtype=torch.float64) - 2
    if num_tokens > 3:
        dt[3] = 25.0
    return Inputs(xbc.to(device, dtype), dt.to(device, dtype))


def weights_of(sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.float32) -> SsmWeights:
    heads = sizes.heads
    a_log, dt_bias, d = torch.rand(heads).mul(4).add(0.05).log(), torch.rand(heads) - 1, torch.randn(heads)
    return SsmWeights(a_log=a_log.to(device, dtype), dt_bias=dt_bias.to(device, dtype), d=d.to(device, dtype))


def poisoned_state(
    slots: int, sizes: Sizes, device: torch.device, *, dtype: torch.dtype = torch.float32, state_dtype: torch.dtype | None = None
) -> SsmState:
    """NaN everywhere, as views of wider tensors whose other half belongs to another layer."""

    def made(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full((slots, 2, *shape), NAN, dtype=dtype, device=device)[:, 1]

    kept = sizes.inner + sizes.groups * sizes.state_size
    return SsmState(
        state=made(sizes.heads, sizes.head_dim, sizes.state_size, dtype=state_dtype or wide(dtype)),
        inputs=made(RING, kept, dtype=dtype), steps=made(RING, sizes.heads, dtype=dtype),
        folded=torch.zeros(slots, dtype=torch.int32, device=device),
    )


def copy_of(state: SsmState) -> SsmState:
    return SsmState(**{name: getattr(state, name).clone() for name in SsmState.__slots__})


def by_definition(
    inputs: Inputs, weights: SsmWeights, sizes: Sizes, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y and the state after the tokens of one row, in fp64, from the state before them or zeros.

    Written anew from the paper, with plain loops over heads and tokens.
    """
    xbc, dt = inputs.xbc.double(), inputs.dt.double()
    heads, dim, groups, size = sizes
    out = torch.zeros(len(xbc), heads, dim, dtype=torch.float64, device=xbc.device)
    states = torch.zeros(heads, dim, size, dtype=torch.float64, device=xbc.device) if before is None else before
    states = states.double().clone()
    for head in range(heads):
        group, state = head * groups // heads, states[head]
        for t in range(len(xbc)):
            raised = dt[t, head] + weights.dt_bias[head].double()
            step = raised if raised > 20 else (1 + raised.exp()).log()  # as torch has it
            x = xbc[t, head * dim : (head + 1) * dim]
            b = xbc[t, heads * dim + group * size :][:size]
            c = xbc[t, heads * dim + (groups + group) * size :][:size]
            state = (-step * weights.a_log[head].double().exp()).exp() * state + step * torch.outer(x, b)
            out[t, head] = state @ c + weights.d[head].double() * x
        states[head] = state
    return out.flatten(1), states
