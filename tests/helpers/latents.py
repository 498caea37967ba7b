"""A small target with latent attention, and what may go wrong in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.cache.kept import Kept
from batchspec.kernels.latent.e4m3_latents import Fp8Latents
from batchspec.model.layers.attention.rope import Rope, rope_of
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.latent import attend
from batchspec.model.layers.latent.attend import HeadSizes, Matrices, absorbed
from batchspec.model.layers.latent.block import LatentSpec
from batchspec.model.layers.latent.plan import LatentPlan
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.passes import Pass
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.helpers.engines import tiny_spec
from tests.helpers.recurrent import LoudNoise

CPU = torch.device("cpu")
SIZES = HeadSizes(key_dim=5, rope_dim=4, value_dim=3, latent_dim=7)


def latent_spec(**changes: Any) -> ModelSpec:
    """Three layers, the last one without q_a and with another rotation. Sizes that are no powers of two."""
    plain = tiny_spec(**changes)
    first = LatentSpec(
        hidden_size=plain.hidden_size, eps=plain.rms_eps, inner_eps=1e-6, num_heads=4, sizes=SIZES, query_rank=6, scale=0.4,
        rope=RopeSpec(type="default", theta=100.0, interleaved=True),
    )
    last = replace(first, query_rank=None, rope=RopeSpec(type="default", theta=50.0), bias=True)
    mlps = plain.layers[0].mlps
    return replace(plain, layers=tuple(LayerSpec(own, mlps) for own in (first, first, last)))


@cache
def latent_target(dtype: torch.dtype = torch.float64, *, fp8: bool = False) -> Target:
    spec = latent_spec().with_fp8_kv() if fp8 else latent_spec()
    return Target(spec, LoudNoise(spec, dtype=dtype, device=CPU), CPU)


def _with_late_rotations_of_drafts(patch: pytest.MonkeyPatch) -> None:
    """Rounds rotate queries and keys by the positions after their own."""

    def late(spec: LatentSpec, pass_: Pass, kept: Kept) -> tuple[Rope, Tensor, LatentPlan]:
        rope, slots, plan = _PREPARED(spec, pass_, kept)
        if not pass_.batch.commits:
            positions, frequencies = pass_.batch.positions + 1, pass_.tables[spec.rope, spec.sizes.rope_dim]
            rope = rope_of(positions, frequencies, spec.rope, pass_.dtype)
        return rope, slots, plan

    patch.setattr(LatentSpec, "_prepared", late)


def _with_the_scale_of_another_token(patch: pytest.MonkeyPatch) -> None:
    """A latent in e4m3 is read with twice the scale of the token before it."""
    read = Fp8Latents.read

    def other(self: Fp8Latents, slots: Tensor) -> tuple[Tensor, Tensor]:
        return read(replace(self, scales=2 * self.scales.roll(1, 1)), slots)

    patch.setattr(Fp8Latents, "read", other)


def _with_the_matrix_of_another_head(patch: pytest.MonkeyPatch) -> None:
    """In the absorbed form queries and results of a head are multiplied by the matrices of the next one."""

    def other(
        q: Tensor, latents: Tensor, rotated: Tensor, mask: Tensor, matrices: Matrices, sizes: HeadSizes, scale: float
    ) -> Tensor:
        others = Matrices(matrices.keys.roll(1, 0), matrices.values.roll(1, 0))
        return absorbed(q, latents, rotated, mask, others, sizes, scale)

    patch.setattr(attend, "absorbed", other)


_PREPARED = LatentSpec._prepared
LATENT_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "drafts are rotated by one position too many": _with_late_rotations_of_drafts,
    "a head reads with the matrix of another": _with_the_matrix_of_another_head,
}
E4M3_FAULTS = LATENT_FAULTS | {"a latent is read with the scale of another": _with_the_scale_of_another_token}
