"""Whole models whose experts and FP8 products run as kernels, here interpreted, against the same in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.distributed.collectives import Collectives
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.errors import CheckpointError
from batchspec.model.decoder import LayerWeights, ResidualStream
from batchspec.model.families.shapes import shape_spec
from batchspec.model.layers.base import WHOLE, Shard
from batchspec.model.layers.mlp.moe import MoeSpec
from batchspec.model.quant.fp8_products import Fp8Experts
from batchspec.model.quant.mxfp4 import PackedExperts
from batchspec.model.shard import part_of
from batchspec.model.spec import ModelSpec, layer_prefix
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from batchspec.packing.cost import read_bytes
from batchspec.tuning import policy
from tests.helpers.engines import make_engine, packed, request
from tests.helpers.moe_models import Noise, ids_of, tiny_spec
from tests.model.test_fp8 import TOKEN, compressed
from tests.model.test_target import Runner, prompts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu_experts.py runs on a GPU")
CPU = torch.device("cpu")
VOCAB = 31
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
STATIC = {**TOKEN, "dynamic": False, "strategy": "tensor"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router"]}
ODD: dict[str, Any] = {"hidden_size": 152, "intermediate_size": 88, "num_local_experts": 7, "num_experts_per_tok": 3}
WIDE: dict[str, Any] = {**ODD, "hidden_size": 176, "intermediate_size": 144}
SIZE = "moe_intermediate_size"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16, mixtral": ("mixtral", {**ODD, "sliding_window": 9, "num_experts_per_tok": 2}),
    "bf16, qwen3_moe, one expert a token": ("qwen3_moe", {**ODD, SIZE: 40, "norm_topk_prob": False, "num_experts_per_tok": 1}),
    "bf16, minimax_m2": ("minimax_m2", ODD),
    "bf16, gpt_oss": ("gpt_oss", ODD),
    "fp8 blocks, qwen3_moe": ("qwen3_moe", {**WIDE, SIZE: 144, "quantization_config": FP8_BLOCKS}),
    "fp8 rows, minimax_m2": ("minimax_m2", {**WIDE, "quantization_config": compressed("channel", TOKEN)}),
    "fp8 rows, glm4_moe, groups of experts": (
        "glm4_moe",
        {
            **WIDE, SIZE: 144, "num_local_experts": 8, "n_group": 4, "first_k_dense_replace": 0,
            "quantization_config": compressed("channel", TOKEN),
        },
    ),
    "fp8 tensors, calibrated, mixtral": ("mixtral", {**WIDE, "quantization_config": compressed("tensor", STATIC)}),
    "mxfp4, gpt_oss": ("gpt_oss", {**ODD, "hidden_size": 160, "intermediate_size": 96, "quantization_config": MXFP4}),
}

TWO_LAYERS = ("bf16, gpt_oss", "fp8 blocks, qwen3_moe", "mxfp4, gpt_oss")
"""The sum of a layer's experts is added by the norm of the next one: one case of each kind of product."""


@contextmanager
def kernels(*dtypes: torch.dtype) -> Iterator[None]:
    """What is built and run in here takes a CPU for a GPU that has the kernels for models of these dtypes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "has_kernels", lambda device: True)
        patch.setattr(policy, "FAST_DTYPES", dtypes)
        yield


class Biased(Noise):
    """All tokens go to the same experts: the lowest of equal ones."""

    def tensor(self, name: str) -> Tensor:
        found = super().tensor(name)
        return found.zero_() if name.endswith((".gate.weight", "router.weight")) else found


def made(spec: ModelSpec, dtype: torch.dtype, weights: type[DummyWeights] = Noise) -> Target:
    return Target(spec, weights(spec, dtype=dtype, device=CPU), CPU)


def outputs(target: Target, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of two passes, the second of one token a row, and the auxiliary hidden states of the first."""
    runner = Runner.start(target, len(lengths), max_len=320)
    first, taps = runner.feed(prompts(lengths, VOCAB), tuple(range(target.spec.num_layers + 1)))
    second, _ = runner.feed([[3]] * len(lengths))
    return torch.cat([*first, *second]), torch.cat(taps)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """By the norm of the difference; NaN never passes."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, float(error)


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "lengths", "layers"),
    [*((name, [15, 2], 1 + (name in TWO_LAYERS)) for name in CASES), ("bf16, gpt_oss", [1], 2), ("bf16, mixtral", [300], 1)],
)
def test_a_whole_forward_is_that_of_plain_torch(name: str, lengths: list[int], layers: int) -> None:
    """fp32, but MXFP4: what differs is the order of sums, and how FP8 rounds activations."""
    family, changes = CASES[name]
    dtype = torch.bfloat16 if "mxfp4" in name else torch.float32
    spec, tolerance = tiny_spec(family, **changes, num_hidden_layers=layers), 1e-5 if "bf16" in name else 2e-2
    fp8 = "fp8" if "fp8" in name else "dtype"
    plain = made(spec.on(CPU, dtype, fp8), dtype)
    expected, taps = outputs(plain, lengths)
    with kernels(dtype):
        own = spec.on(CPU, dtype, "auto")
        assert own.formats.quantises == (fp8 == "fp8")
        found, own_taps = outputs(made(own, dtype), lengths)
    assert_near(found, expected, tolerance)
    assert_near(own_taps, taps, tolerance)


@pytest.mark.parametrize("name", [name for name in CASES if "qwen" not in name])
def test_all_tokens_may_have_the_same_experts(name: str) -> None:
    family, changes = CASES[name]
    dtype = torch.bfloat16 if "mxfp4" in name else torch.float32
    spec = tiny_spec(family, **{**changes, "num_hidden_layers": 1})
    plain = made(spec.on(CPU, dtype, "fp8" if "fp8" in name else "dtype"), dtype, Biased)
    expected = torch.cat(Runner.start(plain, 1).feed(prompts([20], VOCAB))[0])
    with kernels(dtype):
        found = torch.cat(Runner.start(made(spec.on(CPU, dtype), dtype, Biased), 1).feed(prompts([20], VOCAB))[0])
    assert_near(found, expected, 1e-5 if "bf16" in name else 2e-2)


@pytest.mark.second
@pytest.mark.parametrize("name", ["bf16, gpt_oss", "fp8 blocks, qwen3_moe", "mxfp4, gpt_oss"])
def test_bits_of_a_token_depend_neither_on_the_others_nor_on_padding(name: str) -> None:
    """NaN in padding rows changes no other row."""
    family, changes = CASES[name]
    dtype = torch.bfloat16
    with kernels(dtype):
        spec = tiny_spec(family, **changes).on(CPU, dtype)
        mlp = spec.layers[0].mlp
        assert isinstance(mlp, MoeSpec)
        moe = mlp.build(LayerWeights(Noise(spec, dtype=dtype, device=CPU), spec.formats, layer_prefix(0)))

        def stream_after(x: Tensor) -> Tensor:
            stream = ResidualStream(x.clone())
            moe(stream, None, add_in_product=False)
            stream.normed(torch.ones(x.shape[1], dtype=dtype), 1e-5)
            return stream.residual

        x = torch.randn(40, spec.hidden_size).to(dtype)
        every = stream_after(x)
        for count in (1, 9):
            assert torch.equal(stream_after(x[:count]), every[:count])
        x[25:] = torch.nan
        padded = stream_after(x)
        assert torch.equal(padded[:25], every[:25])
        assert padded[25:].isnan().all()


@pytest.mark.parametrize("name", [None, "bf16, gpt_oss", "fp8 blocks, qwen3_moe", "mxfp4, gpt_oss"])
def test_dead_tokens_read_no_expert_and_change_no_bit(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of each format, and plain torch. What memory held before does not reach a token, a dead one neither."""
    family, changes = CASES[name or "bf16, gpt_oss"]
    dtype = torch.bfloat16
    empty = torch.Tensor.new_empty
    with kernels(dtype) if name else nullcontext():
        spec = tiny_spec(family, **changes).on(CPU, dtype)
        mlp = spec.layers[0].mlp
        assert isinstance(mlp, MoeSpec)
        moe = mlp.build(LayerWeights(Noise(spec, dtype=dtype, device=CPU), spec.formats, layer_prefix(0)))

        def stream_after(x: Tensor, live: Tensor | None) -> tuple[Tensor, int]:
            stream = ResidualStream(x.clone(), live)
            moe(stream, None, add_in_product=False)
            stream.normed(torch.ones(x.shape[1], dtype=dtype), 1e-5)
            return stream.residual, int(moe.num_experts_read)

        def of_nan(self: Tensor, *size: Any, **options: Any) -> Tensor:
            found = empty(self, *size, **options)
            return found.fill_(torch.nan) if found.is_floating_point() and found.itemsize > 1 else found

        x, live = torch.randn(13, spec.hidden_size).to(dtype), torch.zeros(13, dtype=torch.bool)
        live[[1, 7]] = True  # six pairs of seven experts
        every, _ = stream_after(x, None)
        alone, num_alone = stream_after(x[live], None)
        monkeypatch.setattr(torch.Tensor, "new_empty", of_nan)
        found, num_read = stream_after(x, live)
    assert num_read == num_alone < mlp.experts.num_experts
    for expected in (every[live], alone):
        torch.testing.assert_close(found[live], expected, rtol=0 if name else 2e-2, atol=0)
    assert torch.equal(found[~live], x[~live])


class Alone(Collectives):
    """An end of exchanges that keeps what this rank gives to a sum."""

    given: Tensor

    def gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def sum(self, x: Tensor) -> Tensor:
        self.given = x
        return x


@pytest.mark.parametrize(
    ("name", "sizes", "ranks"),
    [("fp8 blocks, qwen3_moe", {SIZE: 384, "head_dim": 128}, 2), ("mxfp4, gpt_oss", {"intermediate_size": 96}, 2)],
)
def test_experts_of_ranks_with_more_and_with_fewer_blocks_add_up(name: str, sizes: dict[str, int], ranks: int) -> None:
    """The kernels of each rank, with its own number of blocks of 128, or of 32, of every expert."""
    family, changes = CASES[name]
    dtype = torch.bfloat16
    with kernels(dtype):
        spec = tiny_spec(family, **{**changes, **sizes, "num_hidden_layers": 1}).on(CPU, dtype)
        x = torch.randn(5, spec.hidden_size).to(dtype)

        def added(shard: Shard) -> Tensor:
            part, own = part_of(spec, shard), Alone(shard.rank, shard.ranks)
            moe = part.layers[0].mlp.build(LayerWeights(Noise(part, dtype=dtype, device=CPU), part.formats, layer_prefix(0)))
            stream = ResidualStream(x.clone(), ranks=own)
            moe(stream, None, add_in_product=False)
            stream.normed(torch.ones(x.shape[1], dtype=dtype), 1e-5)
            counts.add(part.layers[0].mlp.inner_size)
            return own.given.double()

        counts: set[int] = set()
        whole = added(WHOLE)
        counts.clear()
        parts = [added(Shard(rank, ranks)) for rank in range(ranks)]
    assert len(counts) == 2
    assert all(float(part.norm()) > 0.1 * float(whole.norm()) for part in parts)
    assert_near(torch.stack(parts).sum(0), whole, 1e-2)


@pytest.mark.parametrize(("name", "smaller"), [("fp8 blocks, qwen3_moe", 0.6), ("mxfp4, gpt_oss", 0.45)])
def test_bytes_are_those_that_are_kept(name: str, smaller: float) -> None:
    family, changes = CASES[name]
    dtype = torch.bfloat16
    whole = tiny_spec(family, **changes)
    with kernels(dtype):
        spec = whole.on(CPU, dtype)
        mlp = spec.layers[0].mlp
        assert isinstance(mlp, MoeSpec)
        source = LayerWeights(Noise(spec, dtype=dtype, device=CPU), spec.formats, layer_prefix(0))
        kept = 0
        for grouped in mlp.grouped:
            product = source.grouped(grouped)
            assert isinstance(product, Fp8Experts | PackedExperts)
            kept += sum(part.nbytes for part in product.weight if isinstance(part, Tensor))
    _, *gemms = mlp.gemms(1)
    planned = sum(gemm.stored * spec.gemm_bytes(layer_prefix(0), gemm, dtype) for gemm in gemms)
    assert planned == pytest.approx(kept, rel=0.01)
    of_experts = sum(gemm.stored * whole.gemm_bytes(layer_prefix(0), gemm, dtype) for gemm in gemms)
    assert kept < smaller * of_experts
    assert spec.weight_bytes(dtype) < whole.weight_bytes(dtype)
    assert read_bytes(spec, dtype, 64) < read_bytes(whole, dtype, 64)


def test_activations_are_quantised_by_default_if_that_is_fast_and_the_checkpoint_declares_it() -> None:
    blocks = tiny_spec("qwen3_moe", **CASES["fp8 blocks, qwen3_moe"][1])
    plain = tiny_spec("mixtral", **{**WIDE, "quantization_config": compressed("channel", None)})
    for spec in (blocks, plain):
        assert spec.on(CPU, torch.bfloat16) == spec
    with kernels(torch.bfloat16):
        assert blocks.on(CPU, torch.bfloat16) == blocks.with_fp8_activations()
        assert blocks.on(CPU, torch.bfloat16, "dtype") == blocks.on(CPU, torch.float32) == blocks
        assert plain.on(CPU, torch.bfloat16) == plain


@pytest.mark.parametrize(
    ("name", "kept", "converted"),
    [("gpt-oss-20b", 14.0, 41.8), ("gpt-oss-120b", 66.3, 233.7), ("qwen3-30b-a3b-fp8", 31.2, 61.1), ("llama8b-fp8", 9.1, 16.1)],
)
def test_gigabytes_of_published_models(name: str, kept: float, converted: float) -> None:
    """Scales of MXFP4 are stored to whole blocks of 128 columns and rows."""
    spec = shape_spec(name)
    assert spec.weight_bytes(torch.bfloat16) / 1e9 == pytest.approx(converted, rel=0.01)
    with kernels(torch.bfloat16):
        assert spec.on(CPU, torch.bfloat16).weight_bytes(torch.bfloat16) / 1e9 == pytest.approx(kept, rel=0.01)


def test_scales_that_the_kernels_cannot_read_are_refused_with_what_can() -> None:
    spec = tiny_spec("gpt_oss", **CASES["mxfp4, gpt_oss"][1])

    class Large(Noise):
        def entry(self, name: str, index: int) -> Tensor:
            found = super().entry(name, index)
            return found.fill_(130) if name.endswith("scales") and index == 4 else found

    with (
        kernels(torch.bfloat16),
        pytest.raises(CheckpointError, match=r"gate_up_proj_scales: a scale is 2\^3, .* at most 2\^1; set model\.dtype=float32"),
    ):
        made(spec.on(CPU, torch.bfloat16), torch.bfloat16, Large)


@pytest.mark.second
def test_an_engine_emits_the_same_tokens_with_and_without_drafts() -> None:
    family, changes = CASES["bf16, mixtral"]
    found = []
    with kernels(torch.float32):
        target = made(tiny_spec(family, **changes, num_hidden_layers=1).on(CPU, torch.float32), torch.float32)
        for drafter in (NoDrafter(), LookupDrafter(2, min_ngram=1, max_ngram=2)):
            engine = make_engine(target, drafter, packed(2, num_verified=2), device=CPU)
            done = engine.run(request(i, [i, 2, 3, i, 2], cap=6) for i in range(2))
            found.append({one.request_id: ids_of(one) for one in done})
    assert found[0] == found[1]
    assert all(len(tokens) == 6 for tokens in found[0].values())
