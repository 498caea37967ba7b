"""Models with NVFP4 weights whose products run as kernels, here interpreted, against the same in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.checkpoint.files import LocalFiles
from batchspec.model.layers.base import GroupedSpec
from batchspec.model.products import products
from batchspec.model.quant.four_bit import FourBitLinear
from batchspec.model.quant.four_bit_experts import FourBitExperts
from batchspec.model.quant.nvfp4_format import COMPRESSED
from batchspec.model.quant.nvfp4_format import MODELOPT as MODELOPT_LAYOUT
from batchspec.model.weights import judge_model
from tests.helpers.moe_models import tiny_spec
from tests.helpers.nvfp4_layouts import FP8_AND_NVFP4, MODELOPT, Packer, all_but_one, make, nvfp4, of_compressed_tensors
from tests.kernels.moe_cases import SPREADS, routing_of
from tests.model.test_expert_kernels import CPU, assert_near, kernels
from tests.model.test_int4 import Stored
from tests.model.test_int4_kernels import ALL, GROUPED, assert_dequantised_for_many_tokens, counting, logits
from tests.model.test_nvfp4 import LAYOUTS, stored_parts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu_experts.py runs on a GPU")
BF16 = torch.bfloat16
JOINED = {"head_dim": 24}
"""Rows of k are a multiple of 16, so that q, k and v are one product; otherwise they are three."""
CASES: dict[str, tuple[str, dict[str, Any], Packer, dict[str, Any], dict[str, int]]] = {
    "biases": (
        "llama", MODELOPT, nvfp4(divides=False), {**JOINED, "attention_bias": True}, {"four_bit_linear": 5, "four_bit_swiglu": 2}
    ),
    "gelu, divided": ("gemma3_text", of_compressed_tensors(), nvfp4(divides=True), JOINED, {"four_bit_linear": 7}),
    "experts": ("qwen3_moe", MODELOPT, nvfp4(divides=False), {**JOINED, **ALL}, {"four_bit_linear": 4, **GROUPED}),
    "experts, divided": ("qwen3_moe", of_compressed_tensors(), nvfp4(divides=True), ALL, {"four_bit_linear": 8, **GROUPED}),
}
"""Family, quantization_config, packer, sizes, and the kernels that one pass through two layers calls. Each projection of a
checkpoint has another global scale."""


@pytest.mark.second
@pytest.mark.parametrize("name", CASES)
def test_a_whole_forward_is_that_of_plain_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, config, packer, sizes, calls = CASES[name]
    folder, _ = make(tmp_path, config, all_but_one(packer), family, **sizes)
    spec, counts = judge_model(LocalFiles(folder)), counting(monkeypatch)
    expected = logits(folder, spec)
    assert not counts
    with kernels(BF16):
        found = logits(folder, spec.on(CPU, BF16))
    assert_near(found, expected, 5e-2)  # the interpreter cuts bf16 off
    assert counts == {key: 2 * count for key, count in calls.items()}  # two passes


def test_for_many_tokens_weights_are_dequantised_by_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, config, packer, sizes, calls = CASES["biases"]
    folder, _ = make(tmp_path, config, all_but_one(packer), family, **sizes)
    assert_dequantised_for_many_tokens(folder, calls, monkeypatch)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gate_and_up_of_each_expert_keep_their_own_global_scales(layout: Any) -> None:
    """One of the experts has no tokens."""
    spec = GroupedSpec(name="e", parts=("w1", "w3"), num_experts=3, part_rows=16, k=32)
    names = [f"e.{expert}.{part}" for expert in range(3) for part in ("w1", "w3")]
    stored, _ = stored_parts(layout, {name: 3.0**i / 30 for i, name in enumerate(names)}, rows=16)
    x, routing = torch.randn(5, 32).bfloat16(), routing_of(5, 3, 1, SPREADS[2], 16, CPU)
    expected = layout.load_grouped(Stored(stored, BF16), spec).up(x, routing, "silu", quantise=False)
    with kernels(BF16):
        loaded = layout.for_kernels().load_grouped(Stored(stored, BF16), spec)
        assert isinstance(loaded, FourBitExperts)
        assert loaded.reads_rows
        assert_near(loaded.up(x, routing, "silu", quantise=False), expected, 2e-2)


def test_memory_is_that_of_the_form_in_which_kernels_read_weights() -> None:
    """Rows are padded to 16 and columns to 128; other devices and dtypes keep the checkpoint's form."""
    spec = tiny_spec("llama", hidden_size=64, intermediate_size=96, head_dim=16, quantization_config=MODELOPT)
    assert spec.on(CPU, BF16).block_bytes(BF16) == spec.block_bytes(BF16)
    with kernels(BF16):
        own = spec.on(CPU, BF16).formats.quantised
        assert spec.on(CPU, torch.float32).formats == spec.formats
        stored, _ = stored_parts(MODELOPT_LAYOUT, {"m.a": 1.0, "m.b": 2.0})
        part = own.load(Stored(stored, BF16), ["m.a", "m.b"], bias=False)
    assert isinstance(part, FourBitLinear)
    tensors = [made for weight in part.weights for made in (weight.words, weight.scales, weight.row_scales)]
    assert sum(made.nbytes for made in tensors if made is not None) == 2 * own.nbytes(8, 32, BF16) == 2 * 16 * (72 + 4)


def test_the_products_that_are_worth_timing() -> None:
    sizes: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 16, "num_hidden_layers": 1}
    assert products(tiny_spec("llama", **sizes, quantization_config=MODELOPT)) == [
        ("four_bit_linear_g16", 128, 192), ("four_bit_linear_g16", 192, 64), ("four_bit_linear_g16", 640, 192),
        ("four_bit_swiglu_g16", 640, 192), ("four_bit_linear_g16", 192, 320), ("lm_head", 31, 192),
    ]


def test_formats_that_differ_among_modules_keep_their_own_kernels() -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 1}
    spec = tiny_spec("qwen3_moe", **sizes, quantization_config=FP8_AND_NVFP4)
    with kernels(BF16):
        own = spec.on(CPU, BF16)
    experts = "model.layers.0.mlp.experts.0.up_proj"
    assert own.formats.of(experts) == MODELOPT_LAYOUT.for_kernels() != COMPRESSED.for_kernels()
    assert (own.formats.of(experts).unpacking(grouped=True), own.formats.dequantises(experts)) == (4 / 3, False)
    assert (spec.formats.of(experts).unpacking(grouped=True), spec.formats.dequantises(experts)) == (None, True)
    assert own.formats.of("model.layers.0.self_attn.q_proj").unpacking(grouped=False) is None
