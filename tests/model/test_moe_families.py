"""Mixtral, MiniMax-M2 and GLM-4.5 against transformers; what of their keys is read and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.errors import CheckpointError
from batchspec.model.spec import load_spec, read_spec
from batchspec.model.weights import expected_shapes
from batchspec.packing.cost import num_multiplied
from tests.helpers.models import make_checkpoint
from tests.model.test_target import assert_like_transformers

pytestmark = pytest.mark.second

ODD: dict[str, Any] = {
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "hidden_size": 36,
    "intermediate_size": 22,
    "head_dim": 10,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_experts_per_tok": 2}),
    "mixtral window": ("mixtral", {"sliding_window": 11, "num_local_experts": 5}),
    "minimax": ("minimax_m2", {"rotary_dim": 6}),
    "glm": (
        "glm4_moe",
        {
            "num_local_experts": 12, "moe_intermediate_size": 22, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 2.5, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.6,
        },
    ),
    "minimax, all experts, one key head": ("minimax_m2", {"num_experts_per_tok": 7, "num_key_value_heads": 1, "rotary_dim": 2}),
}
MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196_608,
    "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
    "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200_064,
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = FAMILIES[name]
    folder = make_checkpoint(tmp_path, family, **{**ODD, **config})
    assert_like_transformers(folder, experts_implementation="eager")


@pytest.mark.parametrize("name", ["mixtral", "minimax", "glm"])
def test_the_tensors_are_those_that_transformers_saves(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    family, config = FAMILIES[name]
    folder = make_checkpoint(tmp_path, family, vocab=64, **{**ODD, **config})
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert expected_shapes(load_spec(folder)) == saved


def test_published_minimax_is_read_with_the_ends_of_its_generation_config_and_without_mtp_layers() -> None:
    spec = read_spec(MINIMAX_M2, "config.json", {"eos_token_id": 200_020}, "generation_config.json")
    assert spec.unread == ()
    assert spec.eos_ids == (200_020,)
    assert read_spec(MINIMAX_M2, "config.json").eos_ids == (2,)
    assert (spec.num_layers, spec.rope.rotary_dim, spec.rope.theta) == (62, 64, 5e6)
    shapes = expected_shapes(spec)
    assert shapes["model.layers.61.self_attn.q_norm.weight"] == (6144,)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (1024,)
    assert shapes["model.layers.0.block_sparse_moe.e_score_correction_bias"] == (256,)
    assert shapes["model.layers.0.block_sparse_moe.experts.255.w2.weight_scale_inv"] == (24, 12)
    assert spec.weight_bytes(torch.bfloat16) == pytest.approx(2 * 228.7e9, rel=0.001)
    assert num_multiplied(spec) == pytest.approx(11.1e9 - 0.6e9, rel=0.05)  # without the embedding


GLM_4_5_AIR: dict[str, Any] = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "pad_token_id": 151_329, "eos_token_id": [151_329, 151_336, 151_338], "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 10_944,
    "max_position_embeddings": 131_072, "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96,
    "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1_000_000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": False, "vocab_size": 151_552,
}
GLM_4_6: dict[str, Any] = {
    **GLM_4_5_AIR, "hidden_size": 5120, "intermediate_size": 12_288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "num_hidden_layers": 92, "use_qk_norm": True,
    "max_position_embeddings": 202_752,
}


@pytest.mark.parametrize(("config", "weights", "active"), [(GLM_4_5_AIR, 106.0e9, 12e9), (GLM_4_6, 352.8e9, 32e9)])
def test_published_glm_has_an_mtp_layer_after_its_last_one(config: dict[str, Any], weights: float, active: float) -> None:
    spec = read_spec(config, "config.json")
    assert spec.unread == ()
    last, shapes = spec.num_layers, expected_shapes(spec)
    assert not any(name.startswith(f"model.layers.{last}.") for name in shapes)
    assert ("model.layers.5.self_attn.q_norm.weight" in shapes) == config["use_qk_norm"]
    assert [spec.layers[i].mlp.inner_size == config["intermediate_size"] for i in (0, config["first_k_dense_replace"])] == [
        True, False,
    ]
    assert spec.mtp is not None
    own = {tensor.name.removeprefix(f"model.layers.{last}."): tensor.shape for tensor in spec.mtp.tensors()}
    assert own["eh_proj.weight"] == (config["hidden_size"], 2 * config["hidden_size"])
    assert {"enorm.weight", "hnorm.weight", "shared_head.norm.weight", "mlp.gate.e_score_correction_bias"} <= own.keys()
    assert not any(name.startswith(("embed_tokens", "shared_head.head")) for name in own)
    assert spec.weight_bytes(torch.bfloat16) == pytest.approx(2 * weights, rel=0.01)
    assert num_multiplied(spec) == pytest.approx(active, rel=0.07)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 3}, "n_group 3 and topk_group 1 do not fit 128 experts of which a token has 8: groups have equal sizes"),
        ({"n_group": 4, "topk_group": 5}, "n_group 4 and topk_group 5 do not fit 128 experts"),
        ({"n_group": 128, "topk_group": 64}, "n_group 128 and topk_group 64 do not fit 128 experts"),
        ({"n_group": 32, "topk_group": 1}, "n_group 32 and topk_group 1 do not fit 128 experts of which a token has 8"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0; it must be an integer in 1 .. 4096"),
        ({"scoring_func": "softmax"}, 'scoring_func="softmax"'),
        ({"num_experts": 64}, "num_experts=64"),
        ({"sliding_window": 64}, "sliding_window=64 in a glm4_moe"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512"),
    ],
)
def test_what_glm_does_not_have_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        read_spec({**GLM_4_5_AIR, **changes}, "config.json")
    assert named in str(refused.value)


def test_more_than_one_mtp_layer_is_none_that_drafts_can_come_from_and_none_is_read() -> None:
    spec = read_spec({**GLM_4_5_AIR, "num_nextn_predict_layers": 2}, "config.json")
    assert spec.mtp is None
    assert [spec.ignores(f"model.layers.{layer}.eh_proj.weight") for layer in (45, 46, 47, 48)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "softmax"}, 'scoring_func="softmax"'),
        ({"use_routing_bias": False}, "use_routing_bias=false"),
        ({"qk_norm_type": "per_head"}, 'qk_norm_type="per_head"'),
        ({"use_qk_norm": False}, "use_qk_norm=false"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
        ({"attn_type_list": [1, 0]}, r"attn_type_list=\[1, 0\]"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok 300 exceeds the 256 experts"),
        ({"rotary_dim": 63}, "rotates 63 of the 128 numbers of a head"),
        ({"model_type": "mixtral", "architectures": None, "layer_types": ["full_attention"] * 62}, "layer_types="),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], named: str) -> None:
    """transformers gives all layers of a Mixtral one window, whatever layer_types says."""
    with pytest.raises(CheckpointError, match=named):
        read_spec({**MINIMAX_M2, **changes}, "config.json")
