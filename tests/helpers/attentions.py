"""What tests ask of the layers of a model that attend."""

from __future__ import annotations

from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.attention.of_model import attentions_of
from batchspec.model.spec import ModelSpec


def attentions(spec: ModelSpec) -> tuple[AttentionSpec, ...]:
    return tuple(attentions_of(spec).values())


def windows(spec: ModelSpec) -> tuple[int | None, ...]:
    return tuple(own.window for own in attentions(spec))
