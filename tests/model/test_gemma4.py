"""Gemma 4: logits, tokens, tensors and config keys of transformers; sizes of the published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.checkpoint.files import LocalFiles, stored_tensors
from batchspec.errors import CheckpointError
from batchspec.model.families.gemma4 import GEMMA4_TEXT
from batchspec.model.families.shapes import shape_spec
from batchspec.model.fused_experts import tensors_of
from batchspec.model.layers.attention.rope import rope_frequencies
from batchspec.model.spec import ModelSpec, load_spec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import expected_shapes, judge_model
from batchspec.packing.cost import num_multiplied
from batchspec.packing.kv_memory import KVMemory
from batchspec.tuning import policy
from tests.checkpoint.test_config_values import ODD_VALUES, ours
from tests.helpers.attentions import attentions, windows
from tests.helpers.engines import DEVICE, VOCAB
from tests.helpers.gemma4_models import DENSE, EXPERTS, LAYER_INPUTS, MIXED, NO_LAYER_INPUTS
from tests.helpers.models import make_checkpoint, make_wrapped
from tests.model.test_dense_families import made_by_transformers
from tests.model.test_target import assert_like_transformers, prompts
from tests.model.test_target import run as logits_of

BF16 = torch.bfloat16
ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.35, "factor": 2.0},
    "sliding_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("gemma4_text", {**DENSE, "hidden_size": 60, "num_hidden_layers": 4, "layer_types": MIXED}),
    "own values, biases": (
        "gemma4_text",
        {
            **DENSE, "hidden_size": 60, "attention_k_eq_v": False, "attention_bias": True, "rope_parameters": ROPES,
            "tie_word_embeddings": False, "final_logit_softcapping": None, "global_head_dim": 14,
        },
    ),
    "experts": ("gemma4_text", {**EXPERTS, "hidden_size": 44}),
    "layer inputs": ("gemma4_text", {**LAYER_INPUTS, "hidden_size": 44}),
    "layer inputs, own values": (
        "gemma4_text",
        {
            **LAYER_INPUTS, "hidden_size_per_layer_input": 5, "attention_k_eq_v": False, "use_double_wide_mlp": False,
            "layer_types": [*MIXED[1:3], *MIXED[1:]], "hidden_size": 60,
        },
    ),
    "unified": ("gemma4_unified_text", {"hidden_size": 44, "head_dim": 10, "global_head_dim": 16, "sliding_window": 9}),
}


@pytest.mark.second
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_64_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    options: dict[str, Any] = {"experts_implementation": "eager"} if "num_experts" in config else {}
    assert_like_transformers(make_checkpoint(tmp_path, family, **config), **options)


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_those_that_transformers_saves(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, vocab=64, **config)
    spec, files = load_spec(folder), LocalFiles(folder)
    saved = tensors_of(spec, files.where, stored_tensors(files))
    assert expected_shapes(spec) == {name: tensor.shape for name, tensor in saved.items()}


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_the_language_model_of_a_whole_model_has_its_logits_on_text(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    folder = make_wrapped(tmp_path, kind, {key: value for key, value in DENSE.items() if kind == "gemma4" or "input" not in key})
    spec, (row,) = judge_model(LocalFiles(folder)), prompts([40])
    assert spec.unread == ()
    target = Target.load(folder, spec, dtype=torch.float32, device=torch.device("cpu"))
    auto: Any = AutoModelForImageTextToText
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(torch.tensor([row])).logits[0]
    torch.testing.assert_close(logits_of(target, row)[0], expected, atol=1e-4, rtol=1e-4)


# --- config.json

TINY: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 256, **NO_LAYER_INPUTS,
}
OWN: dict[str, Any] = {
    "head_dim": 4, "global_head_dim": 6, "sliding_window": 5, "layer_types": MIXED[:2], "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "final_logit_softcapping": 2.0,
}


MOE: dict[str, Any] = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 9}


def spec_of(**changes: Any) -> ModelSpec:
    return read_spec({**TINY, **changes}, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"layer_types": MIXED[1:2] * 2}, {"layer_types": MIXED[::-1][1:3]}, {"rope_parameters": ROPES},
        {"per_layer_config": {"0": {"head_dim": 10, "num_key_value_heads": 4}}}, {"per_layer_config": None},
        {"num_global_key_value_heads": 1}, {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "head_dim": 64},
        {"num_hidden_layers": 13, "global_head_dim": 48}, {"use_bidirectional_attention": "vision", "attention_bias": True},
    ],
)
@pytest.mark.parametrize("family", ["gemma4_text", "gemma4_unified_text"])
def test_heads_windows_and_rotations_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    values = {key: value for key, value in {**TINY, **changes}.items() if key not in ("model_type", "num_key_value_heads")}
    spec, made = read_spec({"model_type": family, **values}, "config.json"), made_by_transformers(family, values)
    own = made.per_layer_config
    assert [(layer.num_kv_heads, layer.head_dim) for layer in attentions(spec)] == [
        (own[i].num_key_value_heads, own[i].head_dim) for i in range(spec.num_layers)
    ]
    kinds = made.layer_types
    assert windows(spec) == tuple(made.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert [layer.shared_v for layer in attentions(spec)] == [
        made.attention_k_eq_v and kind == "full_attention" for kind in kinds
    ]
    assert spec.max_len == made.max_position_embeddings
    both: Any = Gemma4TextRotaryEmbedding(made)
    for layer, kind in zip(attentions(spec), kinds, strict=True):
        found = rope_frequencies(layer.rotation, layer.head_dim)
        torch.testing.assert_close(found, getattr(both, f"{kind}_inv_freq"), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention="all"'),
        ({"hidden_activation": "silu"}, 'hidden_activation="silu"'),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0; it must be a number"),
        ({"rope_scaling": {"factor": 2.0}}, 'rope_scaling={"factor": 2.0}'),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, 'rope_parameters.rope_type="default"'),
        ({"rope_parameters": {"full_attention": ROPES["full_attention"]}}, "rope_parameters has no sliding_attention"),
        (
            {"rope_parameters": ROPES | {"full_attention": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 9.0}}},
            'rope_type="yarn"',
        ),
        ({"rope_parameters": ROPES | {"full_attention": {"rope_type": "proportional"}}}, "full_attention.rope_theta is null"),
        ({"per_layer_config": {"1": {"intermediate_size": 9}}}, 'per_layer_config={"1": {"intermediate_size": 9}}'),
        ({"per_layer_config": {"1": {"head_dim": 5}}}, "head_dim 5 is odd"),
        ({"global_head_dim": 7}, "head_dim 7 is odd"),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "is not a multiple of num_key_value_heads 3"),
        ({"enable_moe_block": True}, "num_experts is null; it must be an integer"),
        ({**MOE, "top_k_experts": 6}, "top_k_experts 6 exceeds the 5 experts"),
        ({"num_experts": 5}, "not supported: num_experts=5"),
        ({"layer_types": ["linear_attention"] * 2}, '["linear_attention"] not supported'),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2 of 2 layers: those before them must have each kind of layer"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers 1 of 2 layers: those before them must have each kind of layer"),
        ({"hidden_size_per_layer_input": 3, "vocab_size_per_layer_input": VOCAB - 1}, f"is below vocab_size {VOCAB}"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_of(**{**OWN, "layer_types": MIXED[:2], **changes})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "weights_gb", "active", "token_bytes"),
    [
        ("gemma4-31b", 61.4, 30.7e9, (10 * 2 * 4 * 512, 50 * 2 * 16 * 256)), ("gemma4-31b-fp8", 32.3, 30.7e9, None),
        ("gemma4-12b", 23.9, 11.9e9, (8 * 2 * 512, 40 * 2 * 8 * 256)),
        ("gemma4-26b-a4b", 50.5, 3.8e9, (5 * 2 * 2 * 512, 25 * 2 * 8 * 256)),
        ("gemma4-e2b", 9.3, 2.3e9, (3 * 2 * 512, 12 * 2 * 256)), ("gemma4-e4b", 15.0, 4.6e9, (4 * 2 * 2 * 512, 20 * 2 * 2 * 256)),
    ],
)
def test_sizes_are_the_published_ones(
    name: str, weights_gb: float, active: float, token_bytes: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of a token, of layers that read all keys and of those with a window, in bf16."""
    monkeypatch.setattr(policy, "has_kernels", lambda device: True)
    spec = shape_spec(name).on(torch.device("cpu"), BF16)
    assert spec.unread == ()
    assert spec.weight_bytes(BF16) == pytest.approx(weights_gb * 1e9, rel=0.01)
    assert num_multiplied(spec) == pytest.approx(active, rel=0.05)
    if token_bytes is not None:
        memory = KVMemory.of(
            spec, BF16, (), page_size=1, max_len=8192, max_tokens=8192, lookahead=1, pass_tokens=1, num_verified=0,
        )
        assert memory.page_bytes == tuple(2 * size for size in token_bytes)


def test_any_value_of_a_key_is_read_or_refused_in_one_line() -> None:
    keys = (*GEMMA4_TEXT.integers, *OWN, "per_layer_config", "rope_parameters", "use_bidirectional_attention", "attention_bias")
    odd = [{key: value} for key in keys for value in ODD_VALUES]
    odd += [{"rope_parameters": ROPES | {"full_attention": value}} for value in ODD_VALUES]
    odd += [{"per_layer_config": {"1": value}} for value in ODD_VALUES]
    for changes in odd:
        spec = ours({**TINY, **OWN, **changes})
        assert spec is None or all(
            rope_frequencies(own.rotation, own.head_dim).isfinite().all() for own in attentions(spec)
        )


def test_logits_are_capped_and_tokens_are_chosen_among_capped_logits() -> None:
    """Where the cap rounds several to one number, the lowest id is chosen."""
    target = Target.load(Path(), spec_of(**OWN), dtype=torch.float64, device=DEVICE, dummy=True)
    hidden = 40 * torch.randn(5, 24, dtype=torch.float64, device=DEVICE)
    logits = target.logits(hidden)
    assert 1.0 < logits.abs().max() < 2.0
    torch.testing.assert_close(logits, 2 * torch.tanh(hidden @ target.embedding.T / 2))
    assert torch.equal(logits.argmax(1).int(), target.greedy_sample(hidden))
    many = target.logits(1e4 * hidden)
    assert (many == 2.0).sum(1).min() > 1
    assert torch.equal(many.argmax(1).int(), target.greedy_sample(1e4 * hidden))
