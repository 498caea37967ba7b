"""Latent attention: both of its forms, what it keeps, costs and refuses; GLM-4.7-Flash against transformers."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.batch.flat_batch import FlatBatch
from batchspec.config.schema import PackingConfig
from batchspec.draft.weights import dummy_spec
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.deterministic import in_one_order
from batchspec.model.families.shapes import COMMON, SHAPES, shape_spec
from batchspec.model.kv_calibration import check_fp8_kv
from batchspec.model.layers.base import Shard
from batchspec.model.layers.latent.attend import HeadSizes, Matrices, TorchLatentPlan, absorbed, expanded
from batchspec.model.layers.latent.block import LatentSpec
from batchspec.model.layers.latent.pages import LatentLayout
from batchspec.model.lora_shape import LoraShape
from batchspec.model.spec import load_spec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights, expected_shapes
from batchspec.packing.cost import kv_read_bytes, num_multiplied, round_seconds
from batchspec.packing.memory import pass_key_bytes, reserve_bytes
from batchspec.packing.planner import Demand, choose_batch
from batchspec.packing.rates import Rates
from tests.distributed.test_tensor_parallel import IDS, LONG, assert_like_one
from tests.helpers.engines import one_pass
from tests.helpers.latents import CPU, SIZES, latent_spec, latent_target
from tests.helpers.models import make_checkpoint
from tests.helpers.mtp_checkpoints import make_mtp_model
from tests.helpers.mtp_drafting import drafter_spec
from tests.helpers.recurrent import LoudNoise
from tests.model.test_target import Runner, assert_like_transformers, prompts
from tests.packing.test_planner import SLOW, always

SHAPE = SHAPES["glm-4.7-flash"]
TINY: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 14, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 22,
    "n_shared_experts": 2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
MODELS: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {},
    "glm4_moe_lite, without q_a, biases, halves, yarn": {
        "q_lora_rank": None, "attention_bias": True, "rope_interleave": False, "rope_parameters": YARN,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "mistral4": {
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 8},
    },
    "deepseek_v3": {"first_k_dense_replace": 1, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v3, without q_a, all layers dense": {"q_lora_rank": None, "first_k_dense_replace": 3, "rope_interleave": False},
}


@pytest.mark.second
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, name.partition(",")[0], **{**TINY, **MODELS[name]})
    assert load_spec(folder).unread == ()
    assert_like_transformers(folder, dtype=torch.float64, experts_implementation="eager")


@pytest.mark.second
@pytest.mark.parametrize("name", [name for name in MODELS if name != "mistral4"])  # whose experts are saved as one tensor
def test_the_tensors_are_those_that_transformers_saves(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = make_checkpoint(tmp_path, name.partition(",")[0], vocab=64, **{**TINY, **MODELS[name]})
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert expected_shapes(load_spec(folder)) == saved


def test_glm_4_7_flash_keeps_54_kilobytes_per_token() -> None:
    spec = shape_spec("glm-4.7-flash")
    assert (spec.unread, spec.num_mtp_layers) == ((), 1)
    assert spec.ignores("model.layers.47.self_attn.kv_b_proj.weight")
    assert sum(state.page_bytes for state in spec.layer_states(torch.bfloat16, 16, draft_len=0)) == 16 * 47 * 576 * 2
    assert kv_read_bytes(spec, dtype=torch.bfloat16, rows=2, context_tokens=100, tokens_per_row=4) == 200 * 47 * 576 * 2
    assert spec.weight_bytes(torch.bfloat16) == pytest.approx(59.9e9, rel=0.002)
    assert num_multiplied(spec) == pytest.approx(3.6e9, rel=0.1)
    ((label, said),) = spec.about(spec.computing(torch.bfloat16, draft_len=0))[0].model
    assert (label, said.partition(",")[0]) == ("latents", "47 of the layers keep 54.1 kB per token")


@pytest.mark.parametrize(("shape", "last", "weights"), [("glm-4.7-flash", 47, 0.645e9), ("deepseek-v3", 61, 11.61e9)])
def test_the_mtp_layer_is_one_of_experts_after_the_last_one(shape: str, last: int, weights: float) -> None:
    spec = shape_spec(shape)
    assert spec.mtp is not None
    tensors = [tensor for tensor in spec.mtp.tensors() if not tensor.name.endswith("_scale_inv")]
    own = {tensor.name.removeprefix(f"model.layers.{last}."): tensor.shape for tensor in tensors}
    around = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    inside = {name for name in own if not name.startswith("mlp.")} - around
    of_experts = {f"model.layers.{last - 1}.{name}" for name in own if name.startswith("mlp.")}
    names = {tensor.name for tensor in spec.tensors() if not tensor.name.endswith("_scale_inv")}
    assert around <= own.keys()
    assert own["eh_proj.weight"] == (spec.hidden_size, 2 * spec.hidden_size)
    assert {f"model.layers.{last - 1}.{name}" for name in inside} | of_experts == {
        name for name in names if name.startswith(f"model.layers.{last - 1}.")
    }
    assert sum(prod(size) for size in own.values()) == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize("keys", [{"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": 2}])
def test_another_number_of_mtp_layers_is_none_to_draft_with(keys: dict[str, int]) -> None:
    spec = read_spec({**COMMON, **SHAPE, **keys}, "config.json")
    assert (spec.mtp, spec.num_mtp_layers) == (None, keys["num_nextn_predict_layers"])


def test_each_rank_keeps_whole_latents_of_the_mtp_layer_and_those_are_counted(tmp_path: Path) -> None:
    folder = make_mtp_model(tmp_path, "glm, latents")
    drafter = drafter_spec(folder, load_spec(folder))
    for own in (drafter, drafter.of_rank(Shard(1, 2))):
        (kept,) = own.layer_states(torch.bfloat16, 16)
        assert (kept.page_bytes, kept.window) == (16 * 2 * (12 + 6), None)
    weights = sum(prod(tensor.shape) for tensor in drafter.checkpoint.mtp.tensors())
    assert drafter.weight_bytes(dtype=torch.bfloat16, device=CPU) == pytest.approx(2 * weights, rel=0.01)
    (kept,) = drafter_spec(folder, load_spec(folder), cache_dtype="fp8").layer_states(torch.bfloat16, 16)
    assert kept.page_bytes == 16 * (4 + 2 * 6 + 12)


@pytest.mark.parametrize(("shape", "ratios"), [("glm-4.7-flash", [1.0, 1.0, 4 / 3]), ("deepseek-v3", [2.0, 3.0, 4.0])])
def test_drafts_cost_attention_that_is_bound_by_arithmetic(shape: str, ratios: list[float]) -> None:
    """20 heads fill one tile, of 32 or 64, with up to three tokens: then reading is the bound. Four tokens are two tiles, whose
    arithmetic takes 4 / 3 of the time in which a card with 181 operations a byte reads them. Each token of 128 heads is two."""
    rates = Rates(name="card", bytes_s=4e12, gemm=((64, 7.26e14), (2048, 7.26e14)), overhead_s=0.0)

    def seconds(draft_len: int) -> float:
        long, none = (
            round_seconds(
                shape_spec(shape), rates, dtype=torch.bfloat16, rows=64, context_tokens=context, tokens_per_row=draft_len + 1
            )
            for context in (32768, 0)
        )
        return long - none

    assert [seconds(k) / seconds(0) for k in (1, 2, 3)] == pytest.approx(ratios, rel=0.01)


def test_latents_in_e4m3_take_644_bytes_a_token_and_have_no_scales_of_layers() -> None:
    spec = shape_spec("glm-4.7-flash").with_fp8_kv()
    assert not spec.has_kv_scales
    assert sum(state.page_bytes for state in spec.layer_states(torch.bfloat16, 16, draft_len=0)) == 16 * 47 * 644
    assert kv_read_bytes(spec, dtype=torch.bfloat16, rows=2, context_tokens=100, tokens_per_row=4) == 200 * 47 * 644
    assert {layout.read_bytes for layout in spec.page_formats(torch.bfloat16, 16)} == {2 * 576}
    run = spec.computing(torch.bfloat16, draft_len=0)
    ((_, said),) = spec.about(run)[0].model
    assert said.startswith("47 of the layers keep 30.3 kB per token, one vector of all heads")
    assert "rounds compute 216 operations with each byte of them" in said
    assert said.endswith("from K = 0 on")
    assert spec.sharded(Shard(1, 4)).page_formats(torch.bfloat16, 16) == spec.page_formats(torch.bfloat16, 16)


@pytest.mark.parametrize("how", ["calibrate", "checkpoint"])
def test_scales_of_a_checkpoint_or_calibrated_ones_are_refused_for_latents(how: str) -> None:
    spec = latent_spec().with_fp8_kv()
    check_fp8_kv("auto", spec, None, CPU)
    with pytest.raises(ConfigError, match=f"cache.scales={how}: each latent of llama has a scale of its own"):
        check_fp8_kv(how, spec, None, CPU)


def test_latents_in_e4m3_change_logits_a_little() -> None:
    """Those of most tokens: the weights are loud noise, which makes much of a small difference at some."""
    ids = prompts([96], 31)[0]
    exact, found = (one_pass(latent_target(fp8=fp8), ids)[0] for fp8 in (False, True))
    errors = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 1e-3 < float(errors.median()) < 0.1


@pytest.mark.parametrize(
    ("shape", "flop", "bound"), [("glm-4.7-flash", 60, 3), ("mistral-small-4", 58, 2), ("deepseek-v3", 242, 0)]
)
def test_a_round_costs_whole_tiles_and_plan_says_from_which_k_on_arithmetic_bounds_it(shape: str, flop: int, bound: int) -> None:
    """Tiles have 64 pairs of a head and a token, or 32 for rows with no more; in e4m3 and in fp32 others."""
    spec = shape_spec(shape)
    run, (_, mixer) = spec.computing(torch.bfloat16, draft_len=0), spec.mixers[0]
    assert isinstance(mixer, LatentSpec)
    ((_, said),) = spec.about(run)[0].model
    assert f"rounds compute {flop} operations with each byte" in said
    assert said.endswith(f"on an H200 arithmetic bounds their attention from K = {bound} on")
    lines = [32, 64, 64, 128] if "glm" in shape else [32, 64, 128, 128] if "mistral" in shape else [128, 256, 384, 512]
    in_e4m3 = [max(64, each) for each in lines]
    in_fp32 = [-(-mixer.num_heads * tokens // 16) * 16 for tokens in (1, 2, 3, 4)]
    of_fp8, of_fp32 = replace(run, fp8_kv=True), replace(run, dtype=torch.float32)
    for own, expected in ((run, lines), (of_fp8, in_e4m3), (of_fp32, in_fp32)):
        flops = [mixer.round_work(own, 1000, tokens).flop * tokens for tokens in (1, 2, 3, 4)]
        assert flops == pytest.approx([2.0 * each * (2 * mixer.sizes.latent_dim + 64) * 1000 for each in expected])
    average = mixer.round_work(run, 1000, 1.55).flop * 1.55 / (2.0 * (2 * mixer.sizes.latent_dim + 64) * 1000)
    assert average == pytest.approx({"glm-4.7-flash": 32, "mistral-small-4": 64, "deepseek-v3": 256}[shape])


def test_sums_in_one_order_are_refused_in_bf16() -> None:
    spec, said = latent_spec(), "decode.deterministic=true: llama has latent attention, whose sums have no fixed order on a GPU"
    with pytest.raises(ConfigError, match=said):
        in_one_order(spec, CPU, torch.bfloat16, on_this_machine=False)
    assert in_one_order(spec, CPU, torch.float64) is spec


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads=4"), ({"head_dim": 128}, "head_dim=128"),
        ({"qk_head_dim": 192}, "qk_head_dim=192"), ({"topk_method": "greedy"}, 'topk_method="greedy"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"), ({"first_k_dense_replace": 3}, "first_k_dense_replace=3"),
        ({"scoring_func": "softmax"}, 'scoring_func="softmax"'), ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: 1 for 47 layers"),
        ({"mlp_layer_types": ["linear"] * 47}, 'mlp_layer_types: ["linear"] not supported; dense and sparse are supported'),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"), ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be"),
        ({"use_qk_norm": True}, "use_qk_norm=true"), ({"quantization_config": {"quant_method": "awq2"}}, "awq2"),
    ],
)
def test_what_it_does_not_compute_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        read_spec({**COMMON, **SHAPE, **changes}, "config.json")
    assert named in str(refused.value)


def test_trees_and_adapters_are_refused_in_one_line() -> None:
    spec = latent_spec()
    with pytest.raises(ConfigError, match="not merged: llama has latent attention, whose kv_b_proj has no adapters of"):
        spec.with_lora(LoraShape(1, ()))
    with pytest.raises(ConfigError, match="draft heads: llama has no layer of attention with K/V heads"):
        dummy_spec(spec)
    assert spec.refuses("tree") == "has latent attention, which verifies chains of drafts only"
    assert {spec.refuses("self_draft"), spec.refuses("drafter")} == {None}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_both_forms_compute_the_same(dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(0)
    q, vectors, kv_b = (
        torch.randn(shape, generator=noise, dtype=torch.float64).to(dtype) for shape in ((6, 4, 9), (11, 11), (4, 8, 7))
    )
    mask = torch.zeros(6, 11, dtype=dtype).masked_fill_(torch.arange(11) > torch.arange(5, 11)[:, None], float("-inf"))
    matrices = Matrices(kv_b[:, :5], kv_b[:, 5:])
    found = [form(q, vectors[:, :7], vectors[:, 7:], mask, matrices, SIZES, 0.4) for form in (expanded, absorbed)]
    heads = torch.einsum("kr,hnr->hkn", vectors[:, :7].double(), kv_b.double())
    keys = torch.cat((heads[..., :5], vectors[:, 7:].double().expand(4, -1, -1)), -1)
    scores = torch.einsum("qhd,hkd->hqk", q.double(), keys) * 0.4 + mask
    expected = torch.einsum("hqk,hkv->qhv", scores.softmax(-1), heads[..., 5:])
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    for own in found:
        torch.testing.assert_close(own.double(), expected, atol=limit, rtol=limit)


def test_rounds_are_absorbed_and_prefills_expanded() -> None:
    sizes = HeadSizes(key_dim=192, rope_dim=64, value_dim=256, latent_dim=512)
    assert [sizes.absorbs(num_q, 4000) for num_q in (1, 8, 300, 500, 4000)] == [True, True, True, False, False]
    assert not sizes.absorbs(8, 8)


def flat(num_q: int, num_keys: int, page_size: int = 4) -> FlatBatch:
    """The last tokens of one row, whose pages are in descending order."""
    pages = torch.arange(-(-num_keys // page_size), 0, -1, dtype=torch.int32)[None]
    positions = torch.arange(num_keys - num_q, num_keys)
    return FlatBatch(
        token_ids=torch.zeros(num_q, dtype=torch.int32), row_ids=torch.zeros(num_q, dtype=torch.int32), positions=positions,
        slot_mapping=pages[0, positions // page_size].long() * page_size + positions % page_size,
        cu_seqlens_q=torch.tensor([0, num_q], dtype=torch.int32), kv_len=torch.tensor([num_keys], dtype=torch.int32),
        page_table=pages, max_q=num_q, max_kv=num_keys,
    )


@pytest.mark.parametrize("num_q", [1, 3, 10])
def test_only_queries_that_read_a_key_that_is_not_finite_get_nan(num_q: int) -> None:
    """In either form; a key beyond a window is not read."""
    layout = LatentLayout(dtype=torch.float64, size=11, rope_dim=4, page_size=4)
    pages = layout.open(layout.allocate(1, 4, CPU)[0], None)
    noise = torch.Generator().manual_seed(0)
    vectors = torch.randn(12, 11, generator=noise, dtype=torch.float64)
    vectors[9, 3] = float("inf")
    pages.write(vectors[:, :7], vectors[:, 7:], flat(12, 12).slot_mapping)
    q, kv_b = (torch.randn(shape, generator=noise, dtype=torch.float64) for shape in ((num_q, 4, 9), (4, 8, 7)))
    for window, sink in ((None, 0), (2, 1)):
        plan = TorchLatentPlan(flat(num_q, 12), window=window, sink=sink)
        read = [p >= 9 and (window is None or p - window < 9) for p in range(12 - num_q, 12)]
        assert plan.attend(q, pages, Matrices(kv_b[:, :5], kv_b[:, 5:]), SIZES, 0.4).isnan().all((1, 2)).tolist() == read


def test_a_pass_that_computes_only_ends_leaves_the_same_latents() -> None:
    ids = prompts([9, 1, 20], 31)
    whole, ends = Runner.start(latent_target(), 3), Runner.start(latent_target(), 3)
    expected, found = whole.feed(ids, (1,)), ends.feed(ids, (1,), ends_only=True)
    torch.testing.assert_close(found[0], [own[-1:] for own in expected[0]], atol=1e-12, rtol=0)
    torch.testing.assert_close(found[1], expected[1], atol=1e-12, rtol=0)
    torch.testing.assert_close(ends.cache.target_pages, whole.cache.target_pages, atol=1e-12, rtol=0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_divide_the_heads_and_each_keeps_whole_vectors(ranks: int) -> None:
    spec = latent_spec()
    assert_like_one(spec, ranks, IDS)
    assert_like_one(spec, ranks, LONG, ends_only=True)


def test_the_weights_of_a_loaded_model_are_replaced_in_place() -> None:
    spec, ids = latent_spec(), [3, 1, 4, 1, 5, 9]
    target, other = (Target(spec, kind(spec, dtype=torch.float64, device=CPU), CPU) for kind in (LoudNoise, DummyWeights))
    expected = one_pass(other, ids)[0]
    assert not torch.allclose(one_pass(target, ids)[0], expected, atol=0.1)
    target.rewrite(DummyWeights(spec, dtype=torch.float64, device=CPU))
    torch.testing.assert_close(one_pass(target, ids)[0], expected, atol=0, rtol=0)


def test_the_keys_and_values_that_a_prefill_makes_of_latents_are_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of GLM-4.7-Flash makes 192 + 256 numbers of a latent, and a key of 256 is put together. A pass that is longer than
    2**29 bytes hold is computed a head at a time."""
    glm, a_key, a_head = shape_spec("glm-4.7-flash"), 2 * 2 * 576, 2 * (192 + 256 + 256)
    none: dict[str, Any] = {"dtype": torch.bfloat16, "slots": 0, "num_buckets": 0, "num_verified": 3, "prefill_tokens": 0}

    def reserved(max_len: int) -> int:
        return reserve_bytes(glm, **none, max_len=max_len)

    assert reserved(1000) == reserved(3000)
    assert reserved(10**6) - reserved(9 * 10**5) == 10**5 * (a_key + a_head)
    assert reserved(2 * 10**5) - reserved(10**5) == 10**5 * a_key
    assert pass_key_bytes(glm, torch.bfloat16, 1000) == 2**15 * a_key + 2**29
    spec, demand = latent_spec(), Demand(num_completions=40, prompt_tokens=900, output_tokens=90, max_tokens=1000)
    made = pass_key_bytes(spec, torch.float32, 1000)
    assert made == 4 * 2**15 * (2 * 11 + 4 * (5 + 9 + 3 + 9))

    def pages(free_bytes: int) -> int:
        return choose_batch(
            PackingConfig(), spec, SLOW, demand, device=CPU, dtype=torch.float32, drafts=always(3), free_bytes=free_bytes
        ).num_pages

    before = pages(made + 10**6)
    assert made > 10**5
    monkeypatch.setattr(LatentSpec, "row_bytes_of_pass", lambda spec, run, num_keys: 0)
    assert pages(10**6) == before < pages(made + 10**6)
