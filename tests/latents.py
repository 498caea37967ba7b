"""A small target with latent attention."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.latent.attend import HeadSizes
from batchspec.model.layers.latent.block import LatentSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.engines import tiny_spec
from tests.recurrent import LoudNoise

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
def latent_target(dtype: torch.dtype = torch.float64) -> Target:
    spec = latent_spec()
    return Target(spec, LoudNoise(spec, dtype=dtype, device=CPU), CPU)
