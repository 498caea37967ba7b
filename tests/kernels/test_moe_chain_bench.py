"""The benchmark of a layer of experts runs every part, leaves one out where asked, and finds other bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchspec.kernels.benchmarks import moe_chain_bench
from batchspec.kernels.benchmarks.moe_chain_bench import (
    DEFAULT,
    PARTS,
    SORTED_APART,
    VARIANTS,
    Layers,
    shares_of,
    times_of,
    variants_of,
)
from batchspec.kernels.benchmarks.moe_weights import MODELS, MoeShape
from batchspec.kernels.moe.gate import Gate
from batchspec.kernels.moe.route import route
from batchspec.kernels.moe.units import Routing
from tests.kernels.test_moe_bench import Clock

SHAPE = MoeShape(4, 2, 128, 128, Gate(7.0), True)


def test_every_variant_is_timed_and_other_bits_are_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = Clock()
    clock.us = lambda calls, repeats: float(bool(calls[0]() or 1))
    layers = Layers(SHAPE, device)
    found = times_of(layers, 3, clock)
    assert found.keys() == {variant.name for variant in VARIANTS}
    assert all(same for _, same in found.values())
    assert len(shares_of(layers, 3, clock, found)) == 2
    monkeypatch.setattr(moe_chain_bench, "route", _other_weights)
    found = times_of(layers, 3, clock)
    assert [found[variant.name][1] for variant in VARIANTS] == [not variant.rows_by_route for variant in VARIANTS]


def _other_weights(*args: Any, **how: Any) -> Routing:
    """Other weights where `route` is not asked to copy rows."""
    routing = route(*args, **how)
    return routing if "rows_of" in how else routing._replace(weights=routing.weights * 1.01)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_left_out(part: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(SHAPE, device)
    layers.begin(3)
    layers.forward(DEFAULT, "keep")
    wanted = layers.residual.clone()
    names = {"route": "route", "up": "experts_mxfp4_up", "down": "experts_mxfp4_down", "combine": "combine_norm"}
    monkeypatch.setattr(moe_chain_bench, names[part], None)
    layers.forward(DEFAULT, part)
    assert torch.equal(layers.residual, wanted) == (part != "combine")


def test_variants_are_those_of_the_units(device: torch.device) -> None:
    assert len(variants_of(MODELS["gpt-oss-120b"], 1)) == len(VARIANTS)
    assert len(variants_of(MODELS["gpt-oss-120b"], 512)) < len(VARIANTS)
    up, down = DEFAULT.tiles(MODELS["gpt-oss-120b"], 1)
    assert up != SORTED_APART.tiles(MODELS["gpt-oss-120b"], 1)[0]
    assert down != SORTED_APART.tiles(MODELS["gpt-oss-120b"], 1)[1]
