"""Dense models in FP8 with interpreted kernels, or with a stand-in for the library's products, against plain torch."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from batchspec.kernels.gemm import fp8_tiles
from batchspec.kernels.gemm.fp8_tokens import quantise_tokens
from batchspec.model import decoder
from batchspec.model.fused import norm_quantised, rms_norm
from batchspec.model.layers.mlp import gated_mlp
from batchspec.model.quant import fp8_products
from batchspec.model.quant.fp8_products import Activations, Fp8Linear, Fp8Weight
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.tuning import policy
from tests.helpers.scaled_mm import library_on_cpu
from tests.model.test_expert_kernels import CPU, FP8_BLOCKS, STATIC, assert_near, kernels, made, outputs
from tests.model.test_fp8 import TOKEN, compressed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu_experts.py runs on a GPU")
ROWS = compressed("channel", TOKEN, ignore=["lm_head"])
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 31,
    "max_position_embeddings": 512,
}
SIZES: dict[str, Any] = {"hidden_size": 176, "intermediate_size": 144}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("llama", {**SIZES, "quantization_config": FP8_BLOCKS}),
    "rows, biases": ("qwen2", {**SIZES, "quantization_config": ROWS}),
    "calibrated": ("llama", {**SIZES, "quantization_config": compressed("tensor", STATIC, ignore=["lm_head"])}),
    "gelu, post norms, norms in fp32": ("gemma3_text", {**SIZES, "head_dim": 16, "quantization_config": ROWS}),
    "gemma4, layers that scale the stream": ("gemma4_text", {
        **SIZES, "quantization_config": ROWS, "global_head_dim": 32, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    }),
    "gemma4, layer inputs, late layers": ("gemma4_text", {
        **SIZES, "quantization_config": ROWS, "global_head_dim": 32, "hidden_size_per_layer_input": 48,
        "vocab_size_per_layer_input": 31, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_hidden_layers": 3, "num_kv_shared_layers": 1,
    }),
    "down plain": ("llama", {**SIZES, "quantization_config": compressed("channel", TOKEN, ignore=["lm_head", "re:.*down_proj"])}),
}
WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_key_value_heads": 4, "head_dim": 32
}


def dense_spec(family: str, **changes: Any) -> ModelSpec:
    return read_spec({**SHAPE, "model_type": family, **changes}, "config.json")


@pytest.mark.parametrize("name", CASES)
def test_a_whole_forward_is_that_of_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms and activations quantised in their kernels: each is asked for at least once a layer."""
    family, changes = CASES[name]
    spec, dtype, counts = dense_spec(family, **changes), torch.float32, {"norm_quantised": 0, "activation_quantised": 0}

    def counted(module: Any, function: str) -> None:
        original = getattr(module, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[function] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, function, call)

    counted(decoder, "norm_quantised")
    counted(gated_mlp, "activation_quantised")
    plain = made(spec.on(CPU, dtype, "fp8"), dtype)
    expected, taps = outputs(plain, [15, 2])
    assert not any(counts.values())
    with kernels(dtype):
        found, own_taps = outputs(made(spec.on(CPU, dtype, "fp8"), dtype), [15, 2])
    assert_near(found, expected, 2e-2)
    assert_near(own_taps, taps, 2e-2)
    layers = 2 * spec.num_layers  # in 2 passes
    assert counts == {"norm_quantised": 2 * layers, "activation_quantised": 0 if name == "down plain" else layers}


@pytest.mark.parametrize(("scales", "calls"), [("blocks", 16), ("rows", 16), ("rows of odd sizes", 12)])
def test_the_library_multiplies_what_it_can(scales: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 products a layer, 2 layers, 2 passes; 17 and 2 tokens, which are no multiples of 4. K = 392 is not a multiple of 16."""
    quantisation = FP8_BLOCKS if scales == "blocks" else ROWS
    sizes = {**WHOLE_BLOCKS, "intermediate_size": 392} if "odd" in scales else WHOLE_BLOCKS
    spec, dtype, made_calls = dense_spec("llama", **sizes, quantization_config=quantisation), torch.bfloat16, list[str]()
    expected, _ = outputs(made(spec.on(CPU, dtype, "fp8"), dtype), [15, 2])
    monkeypatch.setattr(policy, "has_scaled_mm", lambda device, dtype, blocked: True)
    monkeypatch.setattr(fp8_products, "has_scaled_mm", lambda device, dtype, blocked: True)
    monkeypatch.setattr(fp8_tiles, "FEW_TOKENS", 0)
    with kernels(dtype), library_on_cpu(made_calls):
        found, _ = outputs(made(spec.on(CPU, dtype, "fp8"), dtype), [15, 2])
    assert_near(found, expected, 8e-2)  # the interpreter cuts bf16 off
    assert made_calls == [scales.split()[0]] * calls


def weight(rows: int, k: int, *, blocked: bool, static: float | None = None) -> Fp8Weight:
    shape = (-(-rows // 128), -(-k // 128)) if blocked else (rows,)
    return Fp8Weight((torch.randn(rows, k) * 50).to(torch.float8_e4m3fn), (torch.rand(shape) + 0.1) / 500, static)


@pytest.mark.parametrize(
    ("parts", "kind", "bias", "calls"),
    [
        ([weight(256, 384, blocked=True), weight(128, 384, blocked=True)], "group", False, ["blocks"]),
        ([weight(144, 384, blocked=True), weight(128, 384, blocked=True)], "group", False, ["blocks"]),  # 144 rows: the kernel
        ([weight(128, 384, blocked=True)], "group", True, []),
        ([weight(48, 272, blocked=False), weight(32, 272, blocked=False)], "token", False, ["rows"]),
        ([weight(48, 272, blocked=False, static=0.1), weight(32, 272, blocked=False, static=0.2)], "static", False, ["rows"] * 2),
        ([weight(32, 272, blocked=False)], "token", True, []),
    ],
)
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_each_piece_goes_to_the_library_if_it_can_multiply_it(
    parts: list[Fp8Weight], kind: Activations, bias: bool, calls: list[str], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_products, "has_scaled_mm", lambda device, dtype, blocked: True)
    monkeypatch.setattr(fp8_tiles, "FEW_TOKENS", 0)
    made_calls: list[str] = []
    x, dtype = torch.randn(tokens, parts[0].values.shape[1]).bfloat16(), torch.bfloat16
    shift = torch.randn(sum(len(part.values) for part in parts)).bfloat16() if bias else None
    expected = Fp8Linear(parts, shift, kind)(x)
    with kernels(dtype), library_on_cpu(made_calls):
        product = Fp8Linear(parts, shift, kind)
        found = product(x)
        if product.fp8_form is not None:
            rows = quantise_tokens(x, product.fp8_form, interpret=True)
            again: Tensor = product.of_fp8(rows)
            assert torch.equal(again, found)
    assert (product.fp8_form is None) == (kind == "static")
    assert found.shape == expected.shape
    assert made_calls == (calls if product.fp8_form is None else calls * 2) * (tokens > 0)
    if tokens:
        assert_near(found, expected, 1e-2)


@pytest.mark.parametrize("kind", ["group", "token", "static"])
def test_the_norm_of_slices_of_rows_is_quantised_by_its_kernel_if_all_parts_read_it(
    kind: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """static: the input scales of two parts differ, so that they quantise the norm themselves."""
    quantised = Mock(wraps=norm_quantised)
    monkeypatch.setattr(fp8_products, "norm_quantised", quantised)
    parts = [weight(48, 272, blocked=kind == "group", static=each if kind == "static" else None) for each in (0.1, 0.2)]
    x, norm, dtype = torch.randn(5, 300)[:, 28:].bfloat16(), torch.rand(272).bfloat16() + 0.5, torch.bfloat16
    with kernels(dtype):
        product = Fp8Linear(parts, None, kind)
        assert_near(product.of_norm(x, norm, 1e-5), product(rms_norm(x, norm, 1e-5)), 5e-2)  # in bf16 the interpreter cuts off
    assert quantised.call_count == (kind != "static")


def test_a_model_in_fp32_and_a_cpu_have_no_library() -> None:
    policy.has_scaled_mm.cache_clear()
    assert not policy.has_scaled_mm(CPU, torch.bfloat16, blocked=True)
    assert not policy.has_scaled_mm(torch.device("cuda"), torch.float32, blocked=True)
