"""The cost model multiplies each product at the rate of its weight format, and reads its weights in their bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from batchspec.model.families.shapes import shape_spec
from batchspec.model.spec import ModelSpec
from batchspec.packing.cost import NVFP4_BYTES, prefill_seconds, read_bytes, round_seconds
from batchspec.packing.rates import Rates, calibrate
from tests.helpers.stand_ins import H200

BF16 = torch.bfloat16
QUICK = replace(H200, overhead_s=0.0, layer_s=0.0)


def kept(spec: ModelSpec) -> ModelSpec:
    """With MXFP4 or NVFP4 weights as a GPU keeps them."""
    return replace(spec, formats=replace(spec.formats, quantised=spec.formats.quantised.for_kernels()))


def plain(spec: ModelSpec) -> ModelSpec:
    """With weights that were converted at load."""
    return replace(spec, formats=type(spec.formats)())


def prefill_s(spec: ModelSpec, rates: Rates = QUICK) -> float:
    """Of one token among so many that arithmetic bounds every product, and attention is nothing."""
    return prefill_seconds(spec, rates, dtype=BF16, prompt_tokens=1, pass_tokens=2**17) * 2**17


def round_s(spec: ModelSpec, rows: int = 1, tokens: int = 1, *, rates: Rates = QUICK) -> float:
    return round_seconds(spec, rates, dtype=BF16, rows=rows, context_tokens=1, tokens_per_row=tokens)


def layer_flop(spec: ModelSpec, which: Callable[[str], bool]) -> float:
    """Of a token in all layers, of the products whose first part's name `which` accepts."""
    return sum(2.0 * gemm.active * gemm.size for _, gemm in spec.gemms(1) if which(gemm.product.parts[0].name))


@pytest.mark.parametrize("name", ["llama8b-fp8", "qwen3-30b-a3b-fp8"])
def test_fp8_products_run_at_their_own_rate_and_the_others_at_that_of_plain_ones(name: str) -> None:
    """Router and output matrix are not FP8."""
    spec = shape_spec(name).with_fp8_activations()
    of_router = layer_flop(spec, lambda part: part == "mlp.gate")
    of_fp8, head = layer_flop(spec, lambda part: part != "mlp.gate"), 2.0 * spec.vocab_size * spec.hidden_size
    assert of_fp8 > 5 * (of_router + head)
    moved = 2 * sum(gemm.active * (gemm.product.k + gemm.product.rows) for _, gemm in spec.gemms(1) if gemm.grouped)
    for speedup in (1.0, 1.3, 2.0):
        rates = replace(QUICK, fp8_speedup=speedup)
        expected = 2**17 * ((of_fp8 / speedup + of_router + head) / rates.gemm[-1][1] + moved / rates.bytes_s)
        assert prefill_s(spec, rates) == pytest.approx(expected, rel=1e-3)


def test_fp8_weights_that_were_converted_at_load_cost_what_plain_ones_do() -> None:
    spec = shape_spec("llama8b-fp8")
    assert round_s(spec, 64, 4) == round_s(shape_spec("llama8b"), 64, 4)
    assert prefill_s(spec) == prefill_s(shape_spec("llama8b"))


def test_mxfp4_products_of_many_tokens_run_at_the_rate_of_plain_ones() -> None:
    """After they were read, which is all that they take longer."""
    spec = kept(shape_spec("gpt-oss-20b"))
    experts = [(prefix, gemm) for prefix, gemm in spec.gemms(2**17) if gemm.grouped]
    read_s = sum(gemm.stored * spec.gemm_bytes(prefix, gemm, BF16) for prefix, gemm in experts) / QUICK.bytes_s
    assert prefill_s(spec) == pytest.approx(prefill_s(plain(spec)) + read_s)


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("name", ["llama8b-fp8", "qwen3-30b-a3b-fp8"])
def test_few_tokens_take_as_long_as_reading_their_weights_takes(name: str, rows: int) -> None:
    """A weight in half of the bytes takes half of the time: what products take at few tokens is no limit of arithmetic."""
    spec = shape_spec(name).with_fp8_activations()
    for own in (spec, plain(spec)):
        bytes_s = read_bytes(own, BF16, rows) / round_s(own, rows)
        assert bytes_s == pytest.approx(QUICK.weight_bytes_s(BF16), rel=0.02)
    assert round_s(spec, rows) < 0.6 * round_s(plain(spec), rows)


def test_fp8_products_become_bound_by_arithmetic_at_more_tokens_than_they_are_read_for() -> None:
    """Half of the bytes at 64 tokens, at many tokens the ratio of the rates."""
    fp8, bf16 = shape_spec("llama8b-fp8").with_fp8_activations(), shape_spec("llama8b")
    ratios = [round_s(bf16, rows) / round_s(fp8, rows) for rows in (64, 256, 8192)]
    assert 1.8 < ratios[0] < 2.0
    assert 1.2 < ratios[2] < H200.fp8_speedup < ratios[1] < ratios[0]


def test_the_time_of_dense_products_is_added_to_that_of_reading_experts() -> None:
    """Products run one after the other: at 1,024 tokens the experts' are bound by memory, attention's by arithmetic."""
    spec = shape_spec("qwen3-30b-a3b")
    of_experts = 2.0 * sum(gemm.stored * gemm.size for _, gemm in spec.gemms(1) if gemm.grouped) / QUICK.weight_bytes_s(BF16)
    head = 2.0 * spec.vocab_size * spec.hidden_size
    dense = 1024 * (head + layer_flop(spec, lambda part: "experts" not in part)) / QUICK.flop_s(1024)
    assert round_s(spec, 256, 4) == pytest.approx(of_experts + dense, rel=0.01)


@pytest.mark.second
def test_w8a8_products_are_measured_where_a_model_has_them() -> None:
    """Plain torch emulates them on a CPU: that takes longer than the plain product."""
    device = torch.device("cpu")
    assert 0 < calibrate(device, torch.float32, fp8=True).fp8_speedup < 1
    assert calibrate(device, torch.float32).fp8_speedup == 1


def test_int4_weights_are_read_and_then_unpacked_once_for_each_tile_of_tokens_or_multiplied() -> None:
    """The longer of the two is added to the time of reading; the output matrix is plain."""
    int4, bf16 = shape_spec("llama8b-int4"), shape_spec("llama8b")
    size = sum(gemm.size for prefix, gemm in int4.gemms(1) if int4.unpacking(prefix, gemm))
    assert size == 32 * 4096 * (6144 + 4096 + 3 * 14336)
    quick, slow = (replace(QUICK, unpack_s=rate) for rate in (float("inf"), size / 1e-1))
    for tokens, tiles in ((1, 1), (128, 1), (256, 2), (512, 4)):
        arithmetic_s = 2.0 * size * tokens / QUICK.full_flop_s
        assert round_s(int4, tokens, rates=slow) - round_s(int4, tokens, rates=quick) == pytest.approx(0.1 * tiles - arithmetic_s)
    assert round_s(int4, 8192, rates=quick) == pytest.approx(round_s(bf16, 8192, rates=quick), rel=0.01)
    assert 0.2 < round_s(int4, 1, rates=quick) / round_s(bf16, 1, rates=quick) < 0.3


# us a layer of an 8B's products with INT4 weights in groups of 128, one H200 (jobs/pages/NOTEBOOK.md)
@pytest.mark.parametrize(("tokens", "measured_us"), [(1, 47.4), (16, 47.4), (64, 74.0), (128, 121.0), (256, 215.0)])
def test_the_predicted_time_of_int4_products_is_near_the_measured_one(tokens: int, measured_us: float) -> None:
    rates = replace(QUICK, unpack_s=1.2e13)
    head = 2.0 * 128256 * 4096
    head_s = max(head / QUICK.weight_bytes_s(BF16), head * tokens / QUICK.product_flop_s(tokens, fp8=False))
    layer_us = (round_s(shape_spec("llama8b-int4"), tokens, rates=rates) - head_s) / 32 * 1e6
    assert layer_us == pytest.approx(measured_us, rel=0.15)


def test_int4_experts_are_unpacked_if_tokens_choose_them() -> None:
    spec = shape_spec("qwen3-30b-a3b-int4")
    (prefix, experts), *_ = [(prefix, gemm) for prefix, gemm in spec.gemms(64) if gemm.grouped]
    assert spec.unpacking(prefix, experts) == 1
    dense = shape_spec("qwen3-30b-a3b")
    assert round_s(spec, 64) < 0.4 * round_s(dense, 64)
    slow = replace(QUICK, unpack_s=1e12)
    of_experts = sum(gemm.read * gemm.size for _, gemm in spec.gemms(64) if gemm.grouped) / 1e12
    assert round_seconds(spec, slow, dtype=BF16, rows=64, context_tokens=1, tokens_per_row=1) > of_experts


def test_nvfp4_weights_are_read_in_their_bytes_and_take_a_third_longer_than_int4_to_be_unpacked() -> None:
    size = 32 * 4096 * (6144 + 4096 + 3 * 14336)
    quick, slow = (replace(QUICK, unpack_s=rate) for rate in (float("inf"), size / 1e-1))
    nvfp4, int4 = kept(shape_spec("llama8b-nvfp4")), shape_spec("llama8b-int4")
    later, sooner = (round_s(spec, 256, rates=slow) - round_s(spec, 256, rates=quick) for spec in (nvfp4, int4))
    assert later - sooner == pytest.approx(0.2 / 3)
    more = read_bytes(nvfp4, BF16, 1) - read_bytes(int4, BF16, 1)
    assert round_s(nvfp4, 1, rates=quick) - round_s(int4, 1, rates=quick) == pytest.approx(more / QUICK.bytes_s)
    experts = kept(shape_spec("qwen3-30b-a3b-nvfp4"))
    assert round_s(experts, 64) < 0.4 * round_s(shape_spec("qwen3-30b-a3b"), 64)


# us of a layer's experts, one H200 (jobs/pages/NOTEBOOK.md)
@pytest.mark.parametrize(
    ("name", "tokens", "measured_us"),
    [("20b", 64, 128), ("20b", 256, 185), ("20b", 512, 274), ("120b", 64, 411), ("120b", 256, 492)],
)
def test_the_predicted_time_of_mxfp4_experts_is_near_the_measured_one(name: str, tokens: int, measured_us: float) -> None:
    spec, rates = kept(shape_spec(f"gpt-oss-{name}")), replace(QUICK, unpack_s=1.2e13)
    experts = [gemm for _, gemm in spec.gemms(tokens) if gemm.grouped]
    bytes_s, flop_s = rates.weight_bytes_s(BF16), rates.flop_s(tokens)
    of_plain_s = sum(max(2.0 * g.read * g.size / bytes_s, 2.0 * g.active * g.size * tokens / flop_s) for g in experts)
    others_s = round_s(plain(spec), tokens, rates=rates) - of_plain_s
    layer_us = (round_s(spec, tokens, rates=rates) - others_s) / spec.num_layers * 1e6
    assert layer_us == pytest.approx(measured_us, rel=0.15)


def test_without_kernels_nvfp4_weights_are_dequantised_in_each_pass() -> None:
    """Before each product, for any number of tokens; at many the product then takes the arithmetic of plain weights."""
    nvfp4, bf16 = shape_spec("llama8b-nvfp4"), shape_spec("llama8b")
    dequantised_s = NVFP4_BYTES * 32 * 4096 * (6144 + 4096 + 3 * 14336) / QUICK.bytes_s
    for rows in (256, 8192):
        assert round_s(nvfp4, rows) - round_s(bf16, rows) == pytest.approx(dequantised_s, rel=1e-6)
    assert 0.3 < (round_s(nvfp4, 1) - dequantised_s) / round_s(bf16, 1) < 0.4  # read once in their own bytes


def test_without_kernels_nvfp4_experts_are_dequantised_and_multiplied_whether_tokens_choose_them_or_not() -> None:
    nvfp4, bf16 = shape_spec("qwen3-30b-a3b-nvfp4"), shape_spec("qwen3-30b-a3b")
    of_experts = sum(gemm.stored * gemm.size for _, gemm in nvfp4.gemms(1) if gemm.grouped)
    assert of_experts == 48 * 128 * 3 * 768 * 2048
    assert round_s(nvfp4, 1) > NVFP4_BYTES * of_experts / QUICK.bytes_s
    assert prefill_s(nvfp4) - prefill_s(bf16) > 2**17 * 2.0 * of_experts * (1 - 8 / 128) / QUICK.flop_s(2**17)
