"""Mixtral and MiniMax-M2 against transformers; what of their keys is read and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.errors import CheckpointError
from batchspec.model.spec import load_spec, read_spec
from batchspec.model.weights import expected_shapes
from batchspec.packing.cost import num_multiplied
from tests.models import make_checkpoint
from tests.test_target import assert_like_transformers

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


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_the_tensors_are_those_that_transformers_saves(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = make_checkpoint(tmp_path, family, vocab=64, **ODD)
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
