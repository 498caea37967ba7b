"""The layers of a model that attend, for what concerns them alone: scales of K and V, draft heads like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from batchspec.errors import ConfigError
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.layer import LayerSpec


class Layered(Protocol):
    """The shape of a model."""

    @property
    def family(self) -> str: ...

    @property
    def layers(self) -> Sequence[LayerSpec]: ...


def attentions_of(spec: Layered) -> dict[int, AttentionSpec]:
    """The attention of each layer that has one, by the layer's index."""
    mixers = [(i, layer.mixer) for i, layer in enumerate(spec.layers) if layer.mixer is not None]
    return {i: part for i, mixer in mixers for part in mixer.parts if isinstance(part, AttentionSpec)}


def keepers_of(spec: Layered) -> dict[int, AttentionSpec]:
    """Of the layers that keep K and V: the others read those of one of these."""
    return {i: own for i, own in attentions_of(spec).items() if own.kv_of is None}


def first_attention(spec: Layered) -> AttentionSpec:
    """That of the first layer that attends: a new draft head has as many heads of as many numbers. Raises ConfigError for a model
    without one."""
    for own in attentions_of(spec).values():
        return own
    raise ConfigError(
        f"draft heads: {spec.family} has no layer of attention with K/V heads, whose shape a new head would have; use a head "
        "that was made for the model, or draft=lookup"
    )
