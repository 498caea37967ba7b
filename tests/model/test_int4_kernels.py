"""Models with INT4 weights whose products run as kernels, here interpreted, against the same in plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.checkpoint.files import LocalFiles
from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.common.four_bit import dequantise
from batchspec.kernels.gemm import four_bit_tiles
from batchspec.kernels.gemm.four_bit_tiles import op_of
from batchspec.kernels.gemm.tiles import Tile
from batchspec.model.layers.base import GroupedSpec
from batchspec.model.products import products
from batchspec.model.quant import four_bit, four_bit_experts
from batchspec.model.quant.four_bit import FourBitLinear
from batchspec.model.quant.four_bit_experts import ExpertWeights, FourBitExperts
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from batchspec.tuning import policy
from tests.helpers.int4_layouts import Layout, make, of_awq, of_compressed_tensors, of_gptq
from tests.helpers.moe_models import tiny_spec
from tests.model.test_expert_kernels import CPU, assert_near, kernels
from tests.model.test_int4 import Numbers
from tests.model.test_int4_models import EXPERTS
from tests.model.test_target import Runner, prompts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu_experts.py runs on a GPU")
BF16 = torch.bfloat16
ALL: dict[str, Any] = {**EXPERTS, "num_experts_per_tok": 3}
"""Each token goes to all experts: rounding sends none to others."""
GROUPED = {"experts_four_bit_up": 2, "experts_four_bit_down": 2}
CASES: dict[str, tuple[str, Layout, dict[str, Any], dict[str, int]]] = {
    "groups of 32": ("llama", of_compressed_tensors(32), {}, {"four_bit_linear": 5, "four_bit_swiglu": 2}),
    "act order, biases": ("qwen2", of_gptq(64, desc_act=True), {}, {"four_bit_linear": 13}),
    "zero points, rows, gelu": ("gemma3_text", of_awq(-1), {}, {"four_bit_linear": 7}),
    "groups that no kernel reads": ("llama", of_compressed_tensors(16), {}, {}),
    "experts": ("qwen3_moe", of_gptq(32), ALL, {"four_bit_linear": 4, **GROUPED}),
    "experts with zero points": ("qwen3_moe", of_awq(32), ALL, {"four_bit_linear": 4, **GROUPED}),
    "experts in act order": ("qwen3_moe", of_gptq(32, desc_act=True), ALL, {"four_bit_linear": 8}),
    "experts of odd sizes": (
        "qwen3_moe", of_gptq(32), {**ALL, "moe_intermediate_size": 72}, {"four_bit_linear": 4, "experts_four_bit_down": 2}
    ),
}
"""Family, layout, sizes, and the kernels that one pass through two layers calls; of the dense models the second layer has one
plain projection. In act order each projection has an order of its own."""
CALLED = {four_bit: ("four_bit_linear", "four_bit_swiglu", "multiply_dequantised"), four_bit_experts: tuple(GROUPED)}


def counting(patch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()

    def counted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return own(*args, **kwargs)

        return call

    for module, names in CALLED.items():
        for name in names:
            patch.setattr(module, name, counted(name, getattr(module, name)))
    return counts


def logits(folder: Path, spec: ModelSpec) -> Tensor:
    """Of two prompts, and of a token more of each."""
    runner = Runner.start(Target.load(folder, spec, dtype=BF16, device=CPU), 2)
    first, _ = runner.feed(prompts([13, 2], 320))
    return torch.cat([*first, *runner.feed([[3], [5]])[0]])


@pytest.mark.second
@pytest.mark.parametrize("name", CASES)
def test_a_whole_forward_is_that_of_plain_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, layout, sizes, calls = CASES[name]
    folder, _ = make(tmp_path, layout, family, **sizes)
    spec, counts = judge_model(LocalFiles(folder)), counting(monkeypatch)
    expected = logits(folder, spec)
    assert not counts
    with kernels(BF16):
        own = spec.on(CPU, BF16)
        assert own.block_bytes(BF16) == spec.block_bytes(BF16)
        found = logits(folder, own)
    assert_near(found, expected, 5e-2)  # the interpreter cuts bf16 off
    assert counts == {key: 2 * count for key, count in calls.items()}  # two passes


def assert_dequantised_for_many_tokens(folder: Path, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of more than two tokens dequantise the weights of a model in four bits, and its logits stay the same.

    calls  of each product in a pass of few tokens
    """
    spec, counts = judge_model(LocalFiles(folder)), counting(monkeypatch)
    expected = logits(folder, spec)
    monkeypatch.setattr(four_bit_tiles, "MOST_TOKENS", 2)
    with kernels(BF16):
        found = logits(folder, spec.on(CPU, BF16))
    assert_near(found, expected, 5e-2)
    assert counts == {**calls, "multiply_dequantised": sum(calls.values())}


@pytest.mark.second
@pytest.mark.parametrize("name", ["groups of 32", "act order, biases"])
def test_for_many_tokens_weights_are_dequantised(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, layout, sizes, calls = CASES[name]
    folder, _ = make(tmp_path, layout, family, **sizes)
    assert_dequantised_for_many_tokens(folder, calls, monkeypatch)


def test_a_tuned_product_has_the_choice_that_measured_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """None too, which is the library; a product that was not measured has the rule's."""
    tile = Tile(16, 64, 128, 3, 4, True)
    table = {(op_of(128, gated=False), 64, 256): tile, (op_of(128, gated=True), 64, 256): None}
    monkeypatch.setattr(policy, "is_measured", lambda op, rows, k, device: (op, rows, k) in table)
    monkeypatch.setattr(policy, "measured_tile", lambda op, tokens, rows, k, device: table[op, rows, k])
    assert policy.four_bit_tile(9, 64, 256, 128, CPU, gated=False) == tile
    assert policy.four_bit_tile(9, 64, 256, 128, CPU, gated=True) is None
    for group, rows in ((64, 64), (128, 80)):
        rule = four_bit_tiles.four_bit_tile(9, rows, 256, group, INTERPRETER, gated=True)
        assert policy.four_bit_tile(9, rows, 256, group, CPU, gated=True) == rule


def test_the_products_that_are_worth_timing() -> None:
    def found(layout: Layout) -> list[tuple[str, int, int]]:
        sizes: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 16, "num_hidden_layers": 1}
        return products(tiny_spec("llama", **sizes, quantization_config=layout.config))

    assert found(of_compressed_tensors(32)) == [
        ("four_bit_linear_g32", 128, 192), ("four_bit_linear_g32", 192, 64), ("four_bit_linear_g32", 640, 192),
        ("four_bit_swiglu_g32", 640, 192), ("four_bit_linear_g32", 192, 320), ("lm_head", 31, 192),
    ]
    assert found(of_compressed_tensors(16)) == [("lm_head", 31, 192)]
    assert ("four_bit_linear_g0", 192, 320) in found(of_awq(-1))


def test_rows_from_a_multiple_of_16_on_are_a_slice() -> None:
    weight = Numbers(80, 96, 32, zeros=True, order="", dtype=BF16).weight
    x = torch.randn(5, 96).bfloat16()
    with kernels(BF16):
        product = FourBitLinear([weight, replace(weight, k=96)])
        own = product.rows_from(32)
        assert isinstance(own, FourBitLinear)
        assert own.weights[0].words.data_ptr() == product.weights[0].words[:, 2:].data_ptr()
        for first in (32, 40):
            assert_near(product.rows_from(first)(x, None), product(x)[:, first:], 1e-6)


def test_experts_of_projections_in_order_are_one_weight() -> None:
    spec = GroupedSpec(name="e", parts=("gate", "up"), num_experts=3, part_rows=32, k=96)
    parts = [[Numbers(32, 96, 32, zeros=True, order="", dtype=BF16).weight for _ in range(2)] for _ in range(3)]
    stacked = ExpertWeights(spec, parts[0][0], act_order=False)
    for expert, own in enumerate(parts):
        for place, part in enumerate(own):
            stacked.put(expert, place, "p", part)
    whole = stacked.for_kernels()
    assert whole is not None
    assert whole.num_rows == 64
    for expert, own in enumerate(parts):
        expected = torch.cat([dequantise(part, BF16) for part in own])
        assert torch.equal(dequantise(whole.expert(expert), BF16), expected)
        assert torch.equal(torch.cat([dequantise(part, BF16) for part in stacked.of(expert)]), expected)
    assert not FourBitExperts(stacked, None, 64, BF16).reads_rows
    with kernels(BF16):
        assert FourBitExperts(stacked, None, 64, BF16).reads_rows
