"""Qwen3-MoE: routing, experts and their sum against transformers; costs of stored, read and active experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.errors import CheckpointError
from batchspec.kernels.moe.route import lists_reference, route_reference
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.mlp.moe import MoeSpec
from batchspec.model.products import products
from batchspec.model.quant import grouped
from batchspec.model.spec import ModelSpec, load_spec, read_spec
from batchspec.model.weights import expected_shapes
from batchspec.packing.cost import num_multiplied, read_bytes
from tests.helpers.models import make_checkpoint
from tests.helpers.moe_models import tiny_moe
from tests.model.test_target import Runner, assert_like_transformers, prompts

TINY: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "head_dim": 10,
    "hidden_size": 36,
    "intermediate_size": 50,
}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def kinds(spec: ModelSpec) -> str:
    return "".join({MoeSpec: "E", GatedMlpSpec: "d"}[type(layer.mlp)] for layer in spec.layers)


@pytest.mark.second
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"norm_topk_prob": True, "num_hidden_layers": 1}, "E"),
        ({"norm_topk_prob": False, "mlp_only_layers": [1], "num_hidden_layers": 2}, "Ed"),
        ({"norm_topk_prob": True, "decoder_sparse_step": 2, "num_experts_per_tok": 1}, "dEd"),
        ({"norm_topk_prob": True, "num_experts_per_tok": 7, "tie_word_embeddings": True, "num_hidden_layers": 1}, "E"),
    ],
)
def test_logits_and_greedy_tokens_equal_those_of_transformers(config: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", **{**TINY, **config})
    assert kinds(load_spec(folder)) == expected
    assert_like_transformers(folder, experts_implementation="eager")  # its grouped products need sizes that divide by 4


def test_the_tensors_are_those_that_transformers_saves(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = make_checkpoint(tmp_path, "qwen3_moe", vocab=64, **TINY, mlp_only_layers=[0])
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert expected_shapes(load_spec(folder)) == saved


def test_the_lowest_id_of_equal_experts_is_chosen_and_a_selection_bias_does_not_weigh() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    others: list[dict[str, Any]] = [{}, {"scoring": "sigmoid", "bias": torch.zeros(5)}]
    for options in others:
        routing = route_reference(logits, 3, norm_topk=True, unit_pairs=16, **options)
        assert routing.expert_ids.tolist() == [[1, 2, 4], [0, 1, 2]]
        torch.testing.assert_close(routing.weights, torch.full((2, 3), 1 / 3))
    raw = route_reference(torch.zeros(1, 5), 2, norm_topk=False, unit_pairs=16)
    torch.testing.assert_close(raw.weights, torch.full((1, 2), 0.2))
    scores, bias = torch.tensor([[0.5, 0.7, 0.4, 0.9, 0.4]]), torch.tensor([0.4, 0.1, 0.4, -0.5, 0.4])
    routing = route_reference(torch.logit(scores), 4, scoring="sigmoid", norm_topk=True, bias=bias, unit_pairs=16)
    assert routing.expert_ids.tolist() == [[1, 0, 2, 4]]  # 0.8, 0.9, 0.8, 0.8 with the bias: expert 3 has 0.4 alone
    torch.testing.assert_close(routing.weights, scores[:, [1, 0, 2, 4]] / 2)


def test_the_pairs_of_each_expert_are_listed_and_cut_into_units() -> None:
    ids = torch.tensor([[3, 0], [0, 1], [3, 4], [3, 5]])
    routing = lists_reference(ids, torch.ones(4, 2), 7, 2)
    assert routing.pairs.tolist() == [1, 2, 3, 0, 4, 6, 5, 7]
    assert routing.offsets.tolist() == [0, 2, 3, 3, 6, 7, 8, 8]
    used = [[0, 0, 2, 0], [1, 2, 1, 0], [3, 3, 3, 0], [3, 3, 3, 1], [4, 6, 1, 0], [5, 7, 1, 0]]  # expert 3 has two units
    assert routing.units.tolist() == used + [[0, 0, 0, 0]] * 5
    indices = (routing.expert_ids, routing.pairs, routing.offsets, routing.units)
    assert {tensor.dtype for tensor in indices} == {torch.int32}


def test_experts_that_compute_a_pair_of_each_token_give_what_they_give_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_moe("qwen3_moe")
    ids = prompts([9, 1, 4], 31)
    expected, _ = Runner.start(target, 3).feed(ids)
    monkeypatch.setattr(grouped, "own_places", grouped.bounded_places)
    found, _ = Runner.start(target, 3).feed(ids)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 200}, "num_experts_per_tok 200 exceeds the 128 experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be an integer in 1 .. 4096"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "not supported: use_sliding_window=true"),
        ({"n_routed_experts": 4}, "n_routed_experts=4"),
        ({"use_qk_norm": False}, "use_qk_norm=false"),
        ({"shared_expert_intermediate_size": 768}, "shared_expert_intermediate_size=768"),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_spec({**QWEN3_30B, **changes}, "config.json")


def test_the_keys_that_qwen3_coder_has_in_addition_change_nothing() -> None:
    more = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}
    spec = read_spec({**QWEN3_30B, **more}, "config.json")
    assert spec == read_spec(QWEN3_30B, "config.json")
    assert spec.unread == ()


def test_costs_tell_what_is_stored_from_what_is_read_and_used() -> None:
    spec, bf16 = read_spec(QWEN3_30B, "config.json"), torch.bfloat16
    assert spec.weight_bytes(bf16) == pytest.approx(61.06e9, rel=0.001)  # of the published files
    one_token = 6.1e9  # layers, 8 experts each, and the output matrix
    assert read_bytes(spec, bf16, 1) == pytest.approx(one_token, rel=0.01)
    assert 2 * num_multiplied(spec) == pytest.approx(one_token, rel=0.01)
    assert read_bytes(spec, bf16, 64) == pytest.approx(59.5e9, rel=0.01)
    assert read_bytes(spec, bf16, 10_000) == pytest.approx(spec.weight_bytes(bf16) - 2 * spec.vocab_size * 2048)
    assert {(rows, k) for op, rows, k in products(spec) if op != "lm_head"} == {(5120, 2048), (2048, 4096)}  # attention's alone
