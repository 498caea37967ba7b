"""Small targets with Mamba2 layers, around one that attends or beside attention, and what may go wrong in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.mamba2 import scan_steps as steps_module
from batchspec.kernels.mamba2.layout import Sizes, SsmState, SsmWeights
from batchspec.kernels.mamba2.scan_steps import scan_steps
from batchspec.kernels.short_conv.short_conv import ConvRows, short_conv
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mamba2 import block
from batchspec.model.layers.mamba2.block import Mamba2Spec
from batchspec.model.layers.parallel.block import ParallelSpec
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.helpers.engines import DEVICE, tiny_spec
from tests.helpers.recurrent import LoudNoise


def mamba_spec(window: int | None = None, **changes: Any) -> ModelSpec:
    """Mamba2 layers around one that attends; the first is a layer of one block. Sizes that are no powers of two."""
    plain = tiny_spec(window, **changes)
    attends = plain.layers[0]
    first = Mamba2Spec(
        hidden_size=plain.hidden_size, eps=plain.rms_eps, num_heads=6, head_dim=3, num_groups=2, state_size=5, conv_width=4,
        norm="input_layernorm",
    )
    last = replace(first, num_heads=3, head_dim=7, num_groups=3, conv_width=3, bias=True, conv_bias=False)
    layers = (LayerSpec(first, ()), attends, LayerSpec(last, attends.mlps))
    return replace(plain, layers=layers)


@cache
def mamba_target(dtype: torch.dtype = torch.float64, window: int | None = None) -> Target:
    spec = mamba_spec(window)
    return Target(spec, LoudNoise(spec, dtype=dtype, device=DEVICE), DEVICE)


def parallel_spec(window: int | None = None, **changes: Any) -> ModelSpec:
    """As `mamba_spec`, but each Mamba2 layer is beside attention, and all it computes has factors; the layers between have one
    mixer. Mamba2 counts more than attention, so that a fault in its states changes tokens."""
    plain = mamba_spec(window, **changes)
    attention = replace(plain.layers[1].attention, norm=None, scale=0.3, out_scale=0.2)
    layers = list(plain.layers)
    for i, scales in ((0, (3.0, 2.0, 8.0, 6.0, 0.5)), (2, (1.0, 2.0, 6.0, 8.0, 1.5))):
        mamba = layers[i].mixer
        assert isinstance(mamba, Mamba2Spec)
        mamba = replace(mamba, norm=None, out_norm=i == 2, scales=scales, out_scale=3.0)
        both = ParallelSpec(hidden_size=plain.hidden_size, eps=plain.rms_eps, attention=attention, mamba=mamba)
        layers[i] = LayerSpec(both, layers[i].mlps)
    return replace(plain, layers=tuple(layers))


@cache
def parallel_target(dtype: torch.dtype = torch.float64, window: int | None = None) -> Target:
    spec = parallel_spec(window)
    return Target(spec, LoudNoise(spec, dtype=dtype, device=DEVICE), DEVICE)


Change = Callable[[SsmState, ConvRows], SsmState]


def _steps_of(patch: pytest.MonkeyPatch, change: Change) -> None:
    """Rounds read and write a changed state."""

    def steps(
        xbc: Tensor, dt: Tensor, weights: SsmWeights, state: SsmState, rows: ConvRows, out: Tensor, *, commits: bool
    ) -> None:
        scan_steps(xbc, dt, weights, change(state, rows), rows, out, commits=commits)

    patch.setattr(block, "scan_steps", steps)


def _at_the_first_token(state: SsmState, rows: ConvRows) -> SsmState:
    begins = rows.cu_seqlens[:-1].clamp(max=len(rows.positions) - 1).long()
    folded = state.folded.clone()
    folded[rows.slots.long()] = rows.positions[begins].int()
    return replace(state, folded=folded)


def _with_the_state_of_another_row(patch: pytest.MonkeyPatch) -> None:
    def steps(xbc: Tensor, dt: Tensor, weights: SsmWeights, state: SsmState, *args: Any, **options: Any) -> None:
        others = replace(state, state=state.state.roll(1, 0))
        scan_steps(xbc, dt, weights, others, *args, **options)
        state.state.copy_(others.state.roll(-1, 0))

    patch.setattr(block, "scan_steps", steps)


def _with_a_shifted_window(patch: pytest.MonkeyPatch) -> None:
    def shifted(inputs: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: ConvRows, *, gated: bool) -> Tensor:
        ring.copy_(ring.roll(1, 1))
        return short_conv(inputs, weight, bias, ring, rows, gated=gated)

    patch.setattr(block, "short_conv", shifted)


def _without_d(patch: pytest.MonkeyPatch) -> None:
    def steps(xbc: Tensor, dt: Tensor, weights: SsmWeights, *args: Any, **options: Any) -> None:
        scan_steps(xbc, dt, replace(weights, d=torch.zeros_like(weights.d)), *args, **options)

    patch.setattr(block, "scan_steps", steps)


def _with_groups_in_turn(patch: pytest.MonkeyPatch) -> None:
    def of_heads(values: Tensor, sizes: Sizes) -> Tensor:
        return values.view(sizes.groups, sizes.state_size).repeat(sizes.heads // sizes.groups, 1)[:, None]

    patch.setattr(steps_module, "of_heads", of_heads)


MAMBA_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a replay is left out": partial(_steps_of, change=_at_the_first_token),
    "a state is counted one token late": partial(
        _steps_of, change=lambda state, rows: replace(state, folded=state.folded + 1)
    ),
    "a state is not written": partial(_steps_of, change=lambda state, rows: replace(state, state=state.state.clone())),
    "inputs are not kept": partial(_steps_of, change=lambda state, rows: replace(state, inputs=state.inputs.clone())),
    "a row has the state of another": _with_the_state_of_another_row,
    "a window is shifted by one": _with_a_shifted_window,
    "x is not added": _without_d,
    "heads take groups in turn": _with_groups_in_turn,
}
