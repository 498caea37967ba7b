"""A small target two of whose three layers are recurrent, and what may go wrong in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.cache.pages import KVCache
from batchspec.kernels.gated_delta.convolve import convolve
from batchspec.kernels.gated_delta.delta_steps import delta_steps
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState
from batchspec.model.layers.attention.of_model import attentions_of
from batchspec.model.layers.base import PLAIN_NORM, NormForm
from batchspec.model.layers.gated_delta import block as gated_delta
from batchspec.model.layers.gated_delta.block import GatedDeltaSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.mtp import JoinSpec, MtpSpec
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from batchspec.packed_batch import PREFIX_STATES
from tests.helpers.engines import DEVICE, tiny_spec

LOUD = 20.0
"""Factor of the noise in the weights: what a layer adds to the stream is as large as the stream."""


def recurrent_spec(window: int | None = None, **changes: Any) -> ModelSpec:
    """Recurrent layers around one that attends; the last one has the columns of Qwen3-Next. Sizes that are no powers of two."""
    plain = tiny_spec(window, **changes)
    attends = plain.layers[0]
    first = GatedDeltaSpec(
        hidden_size=plain.hidden_size, eps=plain.rms_eps, num_key_heads=2, num_value_heads=6, key_dim=5, value_dim=3, conv_width=4
    )
    last = replace(first, num_key_heads=3, num_value_heads=3, key_dim=4, value_dim=7, conv_width=3, interleaved=True)
    layers = (LayerSpec(first, attends.mlps), attends, LayerSpec(last, attends.mlps))
    return replace(plain, layers=layers)


def mtp_of(spec: ModelSpec, norms: NormForm = PLAIN_NORM) -> MtpSpec:
    """An MTP layer for this model: as its last layer that attends."""
    join = JoinSpec(hidden_size=spec.hidden_size, eps=spec.rms_eps, norms=norms)
    return MtpSpec(join=join, layer=spec.layers[[*attentions_of(spec)][-1]], formats=spec.formats)


class LoudNoise(DummyWeights):
    """Dummy weights in which every layer counts."""

    def tensor(self, name: str) -> Tensor:
        found = super().tensor(name)
        tensor = self._tensors[name]
        return found if tensor.role == "norm" or tensor.between is not None else found * LOUD


@cache
def recurrent_target(dtype: torch.dtype = torch.float64, window: int | None = None) -> Target:
    spec = recurrent_spec(window)
    return Target(spec, LoudNoise(spec, dtype=dtype, device=DEVICE), DEVICE)


def _without_replay(patch: pytest.MonkeyPatch) -> None:
    """A round takes the state to be that of the token before its first."""

    def steps(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, out: Tensor, *, commits: bool) -> None:
        begins = batch.cu_seqlens[:-1].clamp(max=len(batch.positions) - 1).long()
        folded = state.folded.clone()
        folded[batch.slots.long()] = batch.positions[begins].int()
        _STEPS(inputs, replace(state, folded=folded), batch, out, commits=commits)

    patch.setattr(gated_delta, "delta_steps", steps)


def _with_a_late_count(patch: pytest.MonkeyPatch) -> None:
    """The state is taken to hold one token more than it does."""

    def steps(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, out: Tensor, *, commits: bool) -> None:
        _STEPS(inputs, replace(state, folded=state.folded + 1), batch, out, commits=commits)

    patch.setattr(gated_delta, "delta_steps", steps)


def _with_a_shifted_window(patch: pytest.MonkeyPatch) -> None:
    """The convolution reads its earlier inputs one position late."""

    def shifted(*args: Any, **options: Any) -> DeltaInputs:
        inputs = args[4].conv_inputs
        inputs.copy_(inputs.roll(1, 1))
        return _CONVOLVE(*args, **options)

    patch.setattr(gated_delta, "convolve", shifted)


def _with_the_state_of_another_row(patch: pytest.MonkeyPatch) -> None:
    def steps(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, out: Tensor, *, commits: bool) -> None:
        others = replace(state, state=state.state.roll(1, 0))
        _STEPS(inputs, others, batch, out, commits=commits)
        state.state.copy_(others.state.roll(-1, 0))

    patch.setattr(gated_delta, "delta_steps", steps)


def _with_states_kept_late(patch: pytest.MonkeyPatch) -> None:
    """The state of a prefix is kept after the next pass of the group."""
    late: list[list[tuple[int, int]]] = [[], []]

    def copy_states(self: KVCache, copies: Sequence[tuple[int, int]]) -> None:
        keeps = [copy for copy in copies if copy[1] >= copy[0] and copy[1] >= len(self.states[0]) - PREFIX_STATES]
        late.append(keeps)
        _COPY(self, [copy for copy in copies if copy not in keeps])
        _COPY(self, late.pop(0))

    patch.setattr(KVCache, "copy_states", copy_states)


def _without_states_of_prefixes(patch: pytest.MonkeyPatch) -> None:
    """Rows that begin with a prefix go on with what their slots held."""
    patch.setattr(KVCache, "copy_states", lambda self, copies: None)


_STEPS, _CONVOLVE, _COPY = delta_steps, convolve, KVCache.copy_states
FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a replay is left out": _without_replay,
    "a state is counted one token late": _with_a_late_count,
    "a window is shifted by one": _with_a_shifted_window,
    "a row has the state of another": _with_the_state_of_another_row,
}
PREFIX_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a state is kept late": _with_states_kept_late,
    "states are not copied": _without_states_of_prefixes,
}
