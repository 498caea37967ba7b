"""A small target two of whose three layers are short convolutions, and what may go wrong in what they keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from batchspec.kernels.short_conv.short_conv import ConvRows, short_conv
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.short_conv import block
from batchspec.model.layers.short_conv.block import ShortConvSpec
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.helpers.engines import DEVICE, tiny_spec
from tests.helpers.recurrent import LoudNoise


def conv_spec(window: int | None = None, *, channels: int = 13) -> ModelSpec:
    """Short convolutions around a layer that attends. channels: of the first one; the last one has biases, and another width."""
    plain = tiny_spec(window)
    attends, size = plain.layers[0], plain.hidden_size
    first = ShortConvSpec(hidden_size=size, inner_size=channels, eps=plain.rms_eps, width=4)
    last = replace(first, inner_size=size, width=3, bias=True)
    return replace(plain, layers=(LayerSpec(first, attends.mlps), attends, LayerSpec(last, attends.mlps)))


@cache
def conv_target(window: int | None = None) -> Target:
    spec = conv_spec(window)
    return Target(spec, LoudNoise(spec, dtype=torch.float64, device=DEVICE), DEVICE)


def _with_a_short_ring(patch: pytest.MonkeyPatch) -> None:
    """A rejected input takes the place of one that the next round reads: two places of a ring are not used."""

    def short(inputs: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: ConvRows) -> Tensor:
        used = ring[:, :-2].clone()
        found = short_conv(inputs, weight, bias, used, rows)
        ring[:, :-2] = used
        return found

    patch.setattr(block, "short_conv", short)


def _with_a_shifted_ring(patch: pytest.MonkeyPatch) -> None:
    """The convolution reads its earlier inputs one position late."""

    def shifted(inputs: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: ConvRows) -> Tensor:
        ring.copy_(ring.roll(1, 1))
        return short_conv(inputs, weight, bias, ring, rows)

    patch.setattr(block, "short_conv", shifted)


def _with_the_ring_of_another_row(patch: pytest.MonkeyPatch) -> None:
    def rolled(inputs: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: ConvRows) -> Tensor:
        others = ring.roll(1, 0)
        found = short_conv(inputs, weight, bias, others, rows)
        ring.copy_(others)
        return found

    patch.setattr(block, "short_conv", rolled)


def _without_inputs_of_prompts(patch: pytest.MonkeyPatch) -> None:
    """Long passes leave nothing for later ones."""

    def forgetful(inputs: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: ConvRows) -> Tensor:
        kept = ring if rows.max_tokens <= 4 else ring.clone()
        return short_conv(inputs, weight, bias, kept, rows)

    patch.setattr(block, "short_conv", forgetful)


CONV_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a ring is too short by two": _with_a_short_ring,
    "a ring is shifted by one": _with_a_shifted_ring,
    "a row has the ring of another": _with_the_ring_of_another_row,
    "a prompt leaves nothing": _without_inputs_of_prompts,
}
