"""Qwen3-MoE: routing, experts and their sum against transformers; costs of stored, read and active experts; lossless drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.engine.engine import Engine
from batchspec.errors import CheckpointError
from batchspec.model.blocks.gated_mlp import GatedMlpSpec
from batchspec.model.blocks.moe import Moe, MoeSpec, route
from batchspec.model.products import products
from batchspec.model.spec import ModelSpec, load_spec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import expected_shapes
from batchspec.packing.cost import num_multiplied, read_bytes
from batchspec.records import Completion, SamplingParams
from tests.engines import DEVICE, packed, request
from tests.models import make_checkpoint
from tests.test_target import Runner, assert_like_transformers, prompts

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
}  # fmt: skip


def kinds(spec: ModelSpec) -> str:
    return "".join({MoeSpec: "E", GatedMlpSpec: "d"}[type(layer.mlp)] for layer in spec.layers)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"norm_topk_prob": True}, "EEE"),
        ({"norm_topk_prob": False, "mlp_only_layers": [1]}, "EdE"),
        ({"norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4, "num_experts_per_tok": 1}, "dEdE"),
        ({"norm_topk_prob": True, "num_experts_per_tok": 7, "tie_word_embeddings": True}, "EEE"),
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


def test_the_lowest_id_of_equal_experts_is_chosen() -> None:
    weights, ids = route(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]]), 3, norm_topk=True)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))
    raw, _ = route(torch.zeros(1, 5), 2, norm_topk=False)
    torch.testing.assert_close(raw, torch.full((1, 2), 0.2))


def test_experts_on_all_tokens_masked_are_experts_on_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_moe()
    ids = prompts([9, 1, 4], 31)
    expected, _ = Runner.start(target, 3).feed(ids)
    monkeypatch.setattr(Moe, "_own_tokens", Moe._all_tokens)
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
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_spec({**QWEN3_30B, **changes}, "config.json")


def test_costs_tell_what_is_stored_from_what_is_read_and_used() -> None:
    spec, bf16 = read_spec(QWEN3_30B, "config.json"), torch.bfloat16
    assert spec.weight_bytes(bf16) == pytest.approx(61.06e9, rel=0.001)  # of the published files
    one_token = 6.1e9  # layers, 8 experts each, and the output matrix
    assert read_bytes(spec, bf16, 1) == pytest.approx(one_token, rel=0.01)
    assert 2 * num_multiplied(spec) == pytest.approx(one_token, rel=0.01)
    assert read_bytes(spec, bf16, 64) == pytest.approx(59.5e9, rel=0.01)
    assert read_bytes(spec, bf16, 10_000) == pytest.approx(spec.weight_bytes(bf16) - 2 * spec.vocab_size * 2048)
    assert {(rows, k) for op, rows, k in products(spec) if op != "lm_head"} == {(5120, 2048), (2048, 4096)}  # attention's alone


def tiny_moe() -> Target:
    config = {
        **QWEN3_30B, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 31, "max_position_embeddings": 256, "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 10, "rope_theta": 100.0,
    }  # fmt: skip
    return Target.load(Path(), read_spec(config, "config.json"), dtype=torch.float64, device=DEVICE, dummy=True)


def ids_of(done: Completion) -> list[int]:
    assert done.token_ids is not None
    return [int(token) for token in done.token_ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_any_kind_change_no_token(temperature: float) -> None:
    target = tiny_moe()
    head_spec = replace(dummy_spec(target.spec, draft_vocab_size=19), aux_layer_ids=(0, 1, 2))
    head = dummy_head(head_spec, dtype=torch.float64, device=DEVICE)
    drafters: list[Drafter] = [
        NoDrafter(), LookupDrafter(4, min_ngram=1, max_ngram=2), ChainDrafter(head, target, 3, slots=3),
    ]  # fmt: skip
    found = []
    for drafter in drafters:
        engine = Engine(target, drafter, packed(3, draft_len=4), device=DEVICE)
        asked = [request(i, [i, 2, 3, i, 2], cap=24, sampling=SamplingParams(temperature=temperature)) for i in range(5)]
        found.append({done.request_id: ids_of(done) for done in engine.run(iter(asked))})
    assert found[0] == found[1] == found[2]
    assert all(len(tokens) == 24 for tokens in found[0].values())
