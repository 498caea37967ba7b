"""The kernels of experts and of FP8 products inside a model, on a Hopper GPU: against plain torch, in graphs, in whole jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor

from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.kernels.gemm.fp8_tokens import Fp8Tokens
from batchspec.kernels.gemm.scaled_mm import scaled_mm
from batchspec.kernels.moe.route import lists_reference, route
from batchspec.kernels.moe.units import Routing
from batchspec.model.decoder import LayerWeights, ResidualStream
from batchspec.model.layers.mlp.moe import Moe, MoeSpec
from batchspec.model.quant import fp8_products
from batchspec.model.spec import ModelSpec, layer_prefix, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from batchspec.packing import memory
from batchspec.tuning.policy import expert_unit_pairs, has_fast_experts, largest_units_first
from tests.helpers.engines import make_engine, packed, request
from tests.helpers.int4_layouts import of_gptq
from tests.helpers.moe_models import ids_of, tiny_spec
from tests.helpers.nvfp4_layouts import MODELOPT
from tests.model.test_fp8 import TOKEN, compressed

GPU, BF16 = torch.device("cuda"), torch.bfloat16
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_fast_experts(GPU, BF16)), reason="needs a Hopper GPU or newer"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 352, "intermediate_size": 288, "moe_intermediate_size": 288, "num_local_experts": 24,
    "num_experts_per_tok": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 503,
    "max_position_embeddings": 512,
}
OTHERS = {key: value for key, value in SHAPE.items() if not key.startswith("moe")}
STATIC = {**TOKEN, "dynamic": False, "strategy": "tensor"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router"]}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("qwen3_moe", SHAPE),
    "bf16, biases, clamped": ("gpt_oss", OTHERS),
    "bf16, sigmoid": ("minimax_m2", {**OTHERS, "rotary_dim": 32}),
    "fp8 blocks": ("qwen3_moe", {**SHAPE, "quantization_config": BLOCKS}),
    "fp8 rows": ("mixtral", {**OTHERS, "quantization_config": compressed("channel", TOKEN)}),
    "fp8 tensors": ("mixtral", {**OTHERS, "quantization_config": compressed("tensor", TOKEN)}),
    "fp8 tensors, calibrated": ("qwen3_moe", {**SHAPE, "quantization_config": compressed("tensor", STATIC)}),
    "mxfp4": ("gpt_oss", {**OTHERS, "quantization_config": MXFP4}),
    "int4": ("qwen3_moe", {**SHAPE, "quantization_config": of_gptq(32).config}),
    "nvfp4": ("qwen3_moe", {**SHAPE, "quantization_config": MODELOPT}),
    "int4, zero points": ("mixtral", {**OTHERS, "quantization_config": of_gptq(64, sym=False).config}),
}
TOLERANCE = {"bf16": 5e-3, "mxfp4": 5e-3, "fp8": 8e-3, "int4": 8e-3, "nvfp4": 8e-3}
"""Of outputs in bf16; the tensor cores' sums of e4m3 hold about 14 bits, and scales and weights of INT4 are rounded to bf16."""
COUNTS = (1, 3, 16, 64, 256, 300, 1024, 2048)


class Fixed:
    """Noise that is the same number by number in every dtype: bf16 holds what is not quantised."""

    device = GPU

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.dtype, self._noise = dtype, DummyWeights(spec, dtype=torch.float32, device=GPU)
        self._wide = {tensor.name: tensor.wide for tensor in spec.tensors()}

    def tensor(self, name: str) -> Tensor:
        found = self._seeded(name).tensor(name)
        found = found * 20 if name.endswith(("bias", "sinks", "gate.weight", "router.weight")) else found
        return found.bfloat16().to(torch.float32 if self._wide[name] else self.dtype)

    def stored(self, name: str) -> Tensor:
        found = self._seeded(name).stored(name)
        return found.bfloat16() if found.dtype is torch.float32 and "scale" not in name else found

    def entry(self, name: str, index: int) -> Tensor:
        found = self._seeded(f"{name} {index}").entry(name, index)
        return found.bfloat16() if found.dtype is torch.float32 else found

    def _seeded(self, what: str) -> DummyWeights:
        self._noise._generator.manual_seed(crc32(what.encode()))
        return self._noise


def spec_of(name: str, dtype: torch.dtype = BF16, **changes: Any) -> ModelSpec:
    family, shape = FORMATS[name]
    return tiny_spec(family, **{**shape, **changes}).on(GPU, dtype, "fp8" if name.startswith("fp8") else "auto")


def source_of(spec: ModelSpec, dtype: torch.dtype = BF16) -> LayerWeights:
    return LayerWeights(Fixed(spec, dtype), spec.formats, layer_prefix(0))


def moe_of(spec: ModelSpec) -> Moe:
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MoeSpec)
    return mlp.build(source_of(spec))


def routing_of(spread: str, tokens: int, spec: MoeSpec, dtype: torch.dtype) -> Routing:
    """dtype: of the weights."""
    num_experts, top_k = spec.experts.num_experts, spec.router.top_k
    unit_pairs = expert_unit_pairs(tokens, top_k, num_experts, dtype)
    order = largest_units_first(unit_pairs, dtype)
    if spread == "random":
        logits = torch.randn(tokens, num_experts, device=GPU)
        return route(logits, top_k, norm_topk=True, unit_pairs=unit_pairs, largest_first=order)
    own = [7, 2, 23, 11] if spread == "all on the same" else None
    ids = torch.rand(tokens, num_experts // 2).argsort(1)[:, :top_k] * 2 if own is None else torch.tensor(own).expand(tokens, 4)
    ids, weights = ids.int().contiguous().to(GPU), torch.rand(tokens, top_k, device=GPU)
    return lists_reference(ids, weights, num_experts, unit_pairs, largest_first=order)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """By the norm of the difference; NaN never passes."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, float(error)


@pytest.mark.parametrize("spread", ["random", "all on the same", "experts without tokens"])
@pytest.mark.parametrize("name", FORMATS)
def test_grouped_products_are_those_of_plain_torch(name: str, spread: str) -> None:
    torch.manual_seed(0)
    spec, wide = spec_of(name), spec_of(name, torch.float32)
    mlp, tolerance = spec.layers[0].mlp, TOLERANCE[name.split()[0].rstrip(",")]
    assert isinstance(mlp, MoeSpec)
    up, down = (source_of(spec).grouped(grouped) for grouped in mlp.grouped)
    wide_up, wide_down = (source_of(wide, torch.float32).grouped(grouped) for grouped in mlp.grouped)
    for tokens in COUNTS:
        routing = routing_of(spread, tokens, mlp, up.weight_dtype)
        x = torch.randn(tokens, mlp.hidden_size, device=GPU).to(BF16)
        inner = up.up(x, routing, mlp.experts.gating, quantise=False)
        expected = wide_up.up(x.float(), routing, mlp.experts.gating, quantise=False)
        assert isinstance(inner, Tensor)
        assert isinstance(expected, Tensor)
        assert_near(inner, expected, tolerance)
        values = wide_down.down(inner.float(), routing)
        assert_near(down.down(inner, routing), values, tolerance)
        if down.reads_groups:
            assert_near(down.down(up.up(x, routing, mlp.experts.gating, quantise=True), routing), values, tolerance)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("fp8")])
def test_dense_fp8_products_are_those_of_plain_torch(name: str) -> None:
    """Bits may depend on the number of tokens, but are the same each time."""
    torch.manual_seed(0)
    spec, wide = spec_of(name), spec_of(name, torch.float32)
    for product in spec.layers[0].attention.products:
        fast, plain = source_of(spec).product(product), source_of(wide, torch.float32).product(product)
        x = torch.randn(max(COUNTS), product.k, device=GPU).to(BF16)
        for tokens in COUNTS:
            found = fast(x[:tokens], None)
            assert_near(found, plain(x[:tokens].float(), None), TOLERANCE["fp8"])
            assert torch.equal(found, fast(x[:tokens], None))


LAYOUTS = {
    "block": BLOCKS, "channel": compressed("channel", TOKEN, ignore=[]), "tensor": compressed("tensor", TOKEN, ignore=[]),
    "calibrated": compressed("tensor", STATIC, ignore=[]),
}


def dense_spec(layout: str, dtype: torch.dtype, **changes: Any) -> ModelSpec:
    shape = {key: value for key, value in OTHERS.items() if "expert" not in key}
    config = {**shape, "model_type": "llama", "num_hidden_layers": 1, "quantization_config": LAYOUTS[layout], **changes}
    return read_spec(config, "config.json").on(GPU, dtype, "fp8")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("hidden", "inner"), [(352, 288), (512, 1152)])
def test_dense_fp8_mlp_is_that_of_plain_torch(layout: str, hidden: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library multiplies more than a few tokens: 512 and 1152 are whole blocks, 352 and 288 are not."""
    torch.manual_seed(0)
    calls: list[int] = []

    def counted(x: Fp8Tokens, weight: Tensor, scales: Tensor, *, blocked: bool) -> Tensor:
        calls.append(x.num_tokens)
        return scaled_mm(x, weight, scales, blocked=blocked)

    monkeypatch.setattr(fp8_products, "scaled_mm", counted)
    specs = {dtype: dense_spec(layout, dtype, hidden_size=hidden, intermediate_size=inner) for dtype in (BF16, torch.float32)}
    mlps = {dtype: spec.layers[0].mlp.build(source_of(spec, dtype)) for dtype, spec in specs.items()}
    for tokens in (1, 7, 32, 33, 300, 1023):
        x, adds = torch.randn(tokens, hidden, device=GPU).to(BF16), []
        for dtype, mlp in mlps.items():
            stream = ResidualStream(x.to(dtype))
            mlp(stream, None, add_in_product=False)
            assert isinstance(stream._pending, Tensor)
            adds.append(stream._pending)
        assert_near(adds[0], adds[1], 7e-2)  # 3e-2 of it because what is rounded to bf16 first may round to another e4m3
    library = layout != "block" or hidden == 512
    assert calls == [33, 33, 300, 300, 1023, 1023] * library


@pytest.mark.parametrize("tokens", [5, 64, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_captured_dense_layer_gives_the_same_bits(layout: str, tokens: int) -> None:
    """Split products count in memory that the first call allocates, and each replay finds the counts zero."""
    torch.manual_seed(0)
    spec = dense_spec(layout, BF16, hidden_size=1024, intermediate_size=1152)
    mlp, x = spec.layers[0].mlp.build(source_of(spec)), torch.randn(tokens, 1024, device=GPU).to(BF16)
    weight = torch.ones(1024, device=GPU, dtype=BF16)

    def run() -> Tensor:
        stream = ResidualStream(x.clone())
        mlp(stream, None, add_in_product=False)
        return stream.normed(weight, 1e-5)

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def after(moe: Moe, x: Tensor, weight: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The residual stream after the block, and its norm."""
    stream = ResidualStream(x.clone(), live)
    moe(stream, None, add_in_product=False)
    out = stream.normed(weight, 1e-5)
    return stream.residual, out


@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_a_token_depend_neither_on_the_others_nor_on_padding(name: str) -> None:
    torch.manual_seed(0)
    spec = spec_of(name)
    moe, weight = moe_of(spec), torch.ones(spec.hidden_size, device=GPU, dtype=BF16)
    x = torch.randn(2048, spec.hidden_size, device=GPU).to(BF16)
    every, normed = after(moe, x, weight)
    for tokens in COUNTS:
        some, own = after(moe, x[:tokens], weight)
        assert torch.equal(some, every[:tokens]), tokens
        assert torch.equal(own, normed[:tokens]), tokens
    x[100:200] = torch.nan
    padded, _ = after(moe, x, weight)
    keep = torch.ones(2048, dtype=torch.bool, device=GPU)
    keep[100:200] = False
    assert torch.equal(padded[keep], every[keep])
    assert padded[100:200].isnan().all()


@pytest.mark.parametrize("tokens", [16, 64, 1024])
@pytest.mark.parametrize("name", FORMATS)
def test_dead_tokens_read_no_expert_and_change_no_bit(name: str, tokens: int) -> None:
    """Whatever memory held before."""
    torch.manual_seed(0)
    spec = spec_of(name)
    moe, weight = moe_of(spec), torch.ones(spec.hidden_size, device=GPU, dtype=BF16)
    x = torch.randn(tokens, spec.hidden_size, device=GPU).to(BF16)
    every, _ = after(moe, x, weight)
    live = torch.zeros(tokens, dtype=torch.bool, device=GPU)
    live[::5] = True
    alone, _ = after(moe, x[live], weight)
    num_alone = int(moe.num_experts_read)
    torch.full((64 << 20,), torch.nan, device=GPU)  # what the next allocations hold
    found, normed = after(moe, x, weight, live)
    assert int(moe.num_experts_read) == num_alone
    assert torch.equal(found[live], every[live])
    assert torch.equal(found[live], alone)
    assert torch.equal(found[~live], x[~live])
    assert normed.isfinite().all()


@pytest.mark.parametrize("tokens", [2, 64, 700])
@pytest.mark.parametrize("name", FORMATS)
def test_a_captured_graph_gives_the_right_result_for_other_tokens(name: str, tokens: int) -> None:
    torch.manual_seed(0)
    spec = spec_of(name)
    moe, weight = moe_of(spec), torch.ones(spec.hidden_size, device=GPU, dtype=BF16)
    x = torch.randn(tokens, spec.hidden_size, device=GPU).to(BF16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        after(moe, x, weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual, out = after(moe, x, weight)
    for scale in (1.0, 3.0):
        x.copy_(torch.randn(tokens, spec.hidden_size, device=GPU) * scale)
        if scale == 3.0:
            x.copy_(x[:1].expand_as(x).clone())  # all tokens on the same experts
        graph.replay()
        expected, normed = after(moe, x, weight)
        assert torch.equal(residual, expected)
        assert torch.equal(out, normed)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_activations_take_the_memory_that_is_planned(name: str) -> None:
    changes: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 1, "num_local_experts": 32, "intermediate_size": 1024}
    if "moe_intermediate_size" in FORMATS[name][1]:
        changes["moe_intermediate_size"] = 1024
    spec = spec_of(name, **changes)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    moe = moe_of(spec)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    *_, gate_up, down = spec.gemms(1)
    planned = sum(gemm.stored * spec.gemm_bytes(prefix, gemm, BF16) for prefix, gemm in (gate_up, down))
    assert held == pytest.approx(planned, rel=0.05)
    tokens = 8192
    x, weight = torch.randn(tokens, 1024, device=GPU).to(BF16), torch.ones(1024, device=GPU, dtype=BF16)
    stream = ResidualStream(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    moe(stream, None, add_in_product=False)
    stream.normed(weight, 1e-5)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < memory._activation_bytes(spec, BF16, tokens)


def test_fp8_checkpoints_quantise_activations_by_default() -> None:
    family, shape = FORMATS["fp8 blocks"]
    spec = tiny_spec(family, **shape)
    assert spec.on(GPU, BF16) == spec.with_fp8_activations()
    assert spec.on(GPU, torch.float32) == spec


@pytest.mark.parametrize("name", FORMATS)
def test_whole_jobs_with_and_without_drafts(name: str, record_property: Callable[[str, object], None]) -> None:
    """In bf16 rounding differs with the number of rows and tokens, so tokens may: the share of such rows is reported."""
    spec = spec_of(name)
    target = Target(spec, Fixed(spec, BF16), GPU)
    head_spec = replace(dummy_spec(spec, draft_vocab_size=97), aux_layer_ids=(0, 1, 2))
    head = dummy_head(head_spec, dtype=BF16, device=GPU)
    drafters: dict[str, Drafter] = {
        "none": NoDrafter(), "lookup": LookupDrafter(4, min_ngram=1, max_ngram=2),
        "eagle3": ChainDrafter(head, target, 3, slots=8),
    }
    found = {}
    for way, drafter in drafters.items():
        engine = make_engine(target, drafter, packed(8, num_verified=4, page_size=16), device=GPU)
        done = list(engine.run(request(i, [i % 50, 2, 3, i % 7, 2], cap=40) for i in range(48)))
        assert [one.error for one in done if one.error is not None] == []
        assert engine.executor.graphs.num_captured > 0
        found[way] = {one.request_id: ids_of(one) for one in done}
        assert all(len(tokens) == 40 for tokens in found[way].values())
    for way in ("lookup", "eagle3"):
        share = sum(found[way][row] != found["none"][row] for row in found["none"]) / 48
        record_property(f"{name}: rows that differ with {way}", share)
        print(f"{name}: {share:.0%} of 48 rows differ between no drafts and {way}")
