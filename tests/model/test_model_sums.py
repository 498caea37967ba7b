"""Sums over blocks give the products, bytes, seconds and noise that closed formulas gave before there were blocks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.draft.head import products as head_products
from batchspec.draft.head_tensors import head_bytes
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.model.families.shapes import shape_spec
from batchspec.model.products import products
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights, expected_shapes
from batchspec.packing.cost import num_multiplied, prefill_seconds, round_seconds
from batchspec.packing.memory import reserve_bytes
from tests.helpers.stand_ins import H200

BF16, CPU = torch.bfloat16, torch.device("cpu")
SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 90, "max_position_embeddings": 512, "head_dim": 10,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
}
FIGURES: dict[str, dict[str, Any]] = {
    "llama8b": {
        "multiplied": 7504658432,
        "bytes": 16059990016,
        "round": [0.005070753556480001, 0.009555497501767441, 0.03565270327482011],
        "prefill": 0.024540841050266334,
        "reserve": 5725938688,
        "head": 849379328,
    },
    "llama1b": {
        "multiplied": 1235746816,
        "bytes": 2471493632,
        "round": [0.00093282100224, 0.0018234565834418606, 0.0067346094303613845],
        "prefill": 0.0035219732608505155,
        "reserve": 4633846784,
        "head": 290471936,
    },
    "smol135m": {
        "multiplied": 134479872,
        "bytes": 268959744,
        "round": [0.0006921184000000001, 0.0010129209302325581, 0.002277441860465116],
        "prefill": 0.00045305877342783523,
        "reserve": 3415288832,
        "head": 47043072,
    },
    "llama": {
        "multiplied": 52704,
        "bytes": 114048,
        "round": [0.0001571536, 0.0001605720930232558, 0.00017374418604651162],
        "prefill": 3.8742449259020626e-05,
        "reserve": 2979560960,
        "head": 62784,
    },
    "qwen2": {
        "multiplied": 52704,
        "bytes": 105408,
        "round": [0.0001571536, 0.0001605720930232558, 0.00017374418604651162],
        "prefill": 3.8742449259020626e-05,
        "reserve": 2979560960,
        "head": 62784,
    },
    "qwen3": {
        "multiplied": 52704,
        "bytes": 114048,
        "round": [0.0001571536, 0.0001605720930232558, 0.00017374418604651162],
        "prefill": 3.8742449259020626e-05,
        "reserve": 2979560960,
        "head": 62784,
    },
    "mistral": {
        "multiplied": 52704,
        "bytes": 114048,
        "round": [0.0001570012288, 0.00015703929302325582, 0.00015716744186046512],
        "prefill": 3.833664967139176e-05,
        "reserve": 2979560960,
        "head": 62784,
    },
}
"""By the closed formulas: num_multiplied, weight_bytes, seconds of rounds and of a prefill, bytes reserved and for learning."""
NAMES = {
    "llama8b": "44e7cc22e3f676db",
    "llama1b": "51f6a3c5aab40e65",
    "smol135m": "e7b5721848a79df7",
    "llama": "88ec030e6190aac3",
    "qwen2": "148e13d30f790637",
    "qwen3": "ae949c20954d5c2a",
    "mistral": "f5c61c5d95497f0e",
}
"""sha256 of names and shapes of all tensors."""
NOISE = {
    "llama": ("3b75719dde11ee4d", "c2cc46033a10bab3"),
    "qwen2": ("4c5fb0dc1d2e1654", "c2cc46033a10bab3"),
    "qwen3": ("4a0fbf8c50114d0e", "c2cc46033a10bab3"),
    "mistral": ("da71766b6ab045c8", "c2cc46033a10bab3"),
}
"""sha256 of dummy weights in the order in which a target draws them, and of a dummy head of two layers."""


def spec_of(name: str) -> ModelSpec:
    return read_spec({**SMALL, "model_type": name, **FAMILIES[name]}, "config") if name in FAMILIES else shape_spec(name)


@pytest.mark.parametrize("name", FIGURES)
def test_sums_over_blocks_give_the_figures_of_the_closed_formulas(name: str) -> None:
    spec, expected = spec_of(name), FIGURES[name]
    assert num_multiplied(spec) == expected["multiplied"]
    assert spec.weight_bytes(BF16) == expected["bytes"]
    rounds = [
        round_seconds(spec, H200, dtype=BF16, rows=rows, context_tokens=1000, tokens_per_row=tokens)
        for rows, tokens in ((1, 1), (64, 4), (300, 3))
    ]
    assert rounds == pytest.approx(expected["round"], rel=1e-12)
    assert prefill_seconds(spec, H200, dtype=BF16, prompt_tokens=1000, pass_tokens=4096) == pytest.approx(
        expected["prefill"], rel=1e-12
    )
    reserve = reserve_bytes(spec, dtype=BF16, slots=64, num_buckets=8, num_verified=3, prefill_tokens=8192, max_len=4096)
    assert reserve == expected["reserve"]
    assert head_bytes(dummy_spec(spec), BF16) == expected["head"]


@pytest.mark.parametrize("name", NAMES)
def test_the_tensors_of_a_checkpoint_are_those_of_before(name: str) -> None:
    shapes = sorted((tensor, list(shape)) for tensor, shape in expected_shapes(spec_of(name)).items())
    text = repr(shapes).replace("'", '"').replace("(", "[").replace(")", "]")
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == NAMES[name]


@pytest.mark.parametrize("name", NOISE)
def test_dummy_weights_are_bit_for_bit_those_of_before(name: str) -> None:
    spec, drawn = spec_of(name), hashlib.sha256()

    class Recorded(DummyWeights):
        def tensor(self, name: str) -> Tensor:
            found = super().tensor(name)
            drawn.update(name.encode() + found.numpy().tobytes())
            return found

    Target(spec, Recorded(spec, dtype=torch.float32, device=CPU), CPU)
    head_spec = replace(dummy_spec(spec, draft_vocab_size=30), num_layers=2, windows=(None, None))
    head, of_head = dummy_head(head_spec, dtype=torch.float32, device=CPU), hashlib.sha256()
    for tensor in sorted(head.tensors):
        of_head.update(tensor.encode() + head.tensors[tensor].numpy().tobytes())
    assert (drawn.hexdigest()[:16], of_head.hexdigest()[:16]) == NOISE[name]


def test_the_tuner_times_what_decode_rounds_of_a_small_model_multiply() -> None:
    found = set(products(spec_of("qwen3")))
    assert found == {
        ("linear", 80, 48), ("norm_linear", 80, 48), ("linear", 48, 40), ("linear_add", 48, 40), ("linear", 144, 48),
        ("swiglu", 144, 48), ("norm_swiglu", 144, 48), ("linear", 48, 72), ("linear_add", 48, 72), ("lm_head", 90, 48),
    }
    head = set(head_products(replace(dummy_spec(spec_of("qwen3")), num_layers=2, windows=(None, None))))
    assert head == {
        ("linear", 48, 144), ("linear", 80, 96), ("linear", 40, 96), ("linear", 80, 48), ("linear", 40, 48), ("linear", 48, 40),
        ("linear_add", 48, 40), ("linear", 144, 48), ("swiglu", 144, 48), ("norm_swiglu", 144, 48), ("linear", 48, 72),
        ("lm_head", 90, 48),
    }
