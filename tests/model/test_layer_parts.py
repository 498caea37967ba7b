"""Layers of one block: a mixer, or an MLP. Each layer of a model is divided into two, which compute the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from batchspec.draft.lookup import LookupDrafter
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.packing.cost import kv_read_bytes, num_multiplied
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, request, tiny_spec
from tests.helpers.recurrent import recurrent_spec
from tests.model.test_target import Runner, prompts

CPU = torch.device("cpu")
MODELS = {"window": tiny_spec(window=5), "states": recurrent_spec()}


def divided(spec: ModelSpec) -> ModelSpec:
    parts = [(LayerSpec(layer.mixer, ()), LayerSpec(None, layer.mlps)) for layer in spec.layers]
    return replace(spec, layers=tuple(part for pair in parts for part in pair))


def load(spec: ModelSpec, device: torch.device = CPU) -> Target:
    """Dummy weights are drawn block by block: a model and its divided form have the same ones."""
    return Target.load(Path(), spec, dtype=torch.float64, device=device, dummy=True)


@pytest.mark.parametrize("name", MODELS)
def test_they_compute_what_layers_of_two_blocks_compute(name: str) -> None:
    """In a pass that begins rows, in one that goes on, and at each boundary of the residual stream."""
    spec, ids = MODELS[name], prompts([9, 2, 20], VOCAB)
    taps = tuple(range(spec.num_layers + 1))
    whole, parts = Runner.start(load(spec), 3), Runner.start(load(divided(spec)), 3)
    for feed in ([row[:-1] for row in ids], [row[-1:] for row in ids]):
        expected, found = whole.feed(feed, taps), parts.feed(feed, tuple(2 * tap for tap in taps))
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("taps", [(), (1,), (2, 3)])
def test_a_pass_may_leave_out_tokens_from_a_layer_that_keeps_nothing_on(name: str, taps: tuple[int, ...]) -> None:
    spec, ids = divided(MODELS[name]), prompts([9, 2, 20], VOCAB)
    spec = replace(spec, layers=(*spec.layers, *spec.layers[-1:]))  # MLPs follow the last mixer
    assert spec.last_kept == spec.num_layers - 3
    taps = tuple(spec.num_layers - 3 + tap for tap in taps)
    whole, ends = Runner.start(load(spec), 3), Runner.start(load(spec), 3)
    expected, expected_taps = whole.feed(ids, taps)
    found, found_taps = ends.feed(ids, taps, ends_only=True)
    torch.testing.assert_close(found, [own[-1:] for own in expected], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found_taps, expected_taps, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_writes_the_same_tokens(name: str) -> None:
    requests = [request(i, ids, cap=12) for i, ids in enumerate(prompts([3, 17, 8, 30, 5], VOCAB))]

    def tokens(spec: ModelSpec) -> dict[str, bytes]:
        drafter, batch = LookupDrafter(3, min_ngram=1, max_ngram=2), packed(2, num_verified=3)
        engine = make_engine(load(spec, DEVICE), drafter, batch, device=DEVICE)
        return {done.request_id: np.asarray(done.token_ids).tobytes() for done in engine.run(iter(requests))}

    assert tokens(divided(MODELS[name])) == tokens(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_their_bytes_are_those_of_their_blocks(name: str) -> None:
    whole, parts = MODELS[name], divided(MODELS[name])
    for dtype in (torch.float32, torch.bfloat16):
        read = [
            kv_read_bytes(spec, dtype=dtype, rows=3, context_tokens=40, tokens_per_row=2) for spec in (whole, parts)
        ]
        assert read[0] == read[1]
        assert parts.weight_bytes(dtype) == whole.weight_bytes(dtype)
    assert num_multiplied(parts) == num_multiplied(whole)
    assert parts.last_kept == 2 * whole.last_kept
