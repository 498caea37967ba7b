"""LFM2, dense and with experts: tensors, logits and keys of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchspec.errors import CheckpointError, ConfigError
from batchspec.job.prepare import with_states
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.short_conv.block import ShortConvSpec
from batchspec.model.spec import load_spec, read_spec
from batchspec.model.weights import expected_shapes
from tests.checkpoint.test_config_values import ODD_NUMBERS, ODD_VALUES, ours
from tests.helpers.models import make_checkpoint
from tests.model.test_target import assert_bf16_near_the_exact_logits, assert_like_transformers

SHAPE: dict[str, Any] = {
    "hidden_size": 52, "head_dim": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8,
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "num_dense_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("lfm2", SHAPE),
    "biases, four taps, the last layer attends": (
        "lfm2",
        {
            **SHAPE, "conv_bias": True, "conv_L_cache": 4, "layer_types": ["conv", "conv", "full_attention"],
            "block_ffn_dim_multiplier": 1.3, "tie_word_embeddings": False, "norm_eps": 1e-2,
        },
    ),
    "one tap, an MLP as large as config.json says": (
        "lfm2",
        {**SHAPE, "conv_L_cache": 1, "block_auto_adjust_ff_dim": False, "layer_types": ["full_attention", "conv", "conv"]},
    ),
    "experts": ("lfm2_moe", {**SHAPE, **EXPERTS}),
    "experts without a bias, weights as they are": (
        "lfm2_moe", {**SHAPE, **EXPERTS, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
    ),
}


@pytest.mark.second
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_fp64_and_64_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, **config)
    assert_like_transformers(folder, dtype=torch.float64, experts_implementation="eager")


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_those_that_transformers_saves(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, vocab=64, **config)
    saved = {key: tuple(tensor.shape) for key, tensor in load_file(folder / "model.safetensors").items()}
    assert expected_shapes(load_spec(folder)) == saved


@pytest.mark.second
@pytest.mark.parametrize("name", ["biases, four taps, the last layer attends", "experts"])
def test_logits_in_bf16_are_as_near_to_the_exact_ones_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, dtype=torch.bfloat16, initializer_range=0.1, **config)
    assert_bf16_near_the_exact_logits(folder, experts_implementation="eager")


LFM2_1_2B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3,
    "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02, "max_position_embeddings": 128000,
    "model_type": "lfm2", "norm_eps": 1e-5, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_cache": True,
    "use_pos_enc": True, "vocab_size": 65536,
}
KINDS = {"1.2b": "ccaccaccacacacac", "2.6b": "ccaccacccacccacccacccaccaccacc", "8b": "ccacccacccacccacccaccacc"}
"""Of each layer: a short convolution, or attention."""


def without(config: dict[str, Any], *keys: str, kinds: str = "", **changes: Any) -> dict[str, Any]:
    layer_types = {"layer_types": ["conv" if kind == "c" else "full_attention" for kind in kinds]} if kinds else {}
    return {**{key: value for key, value in config.items() if key not in keys}, **layer_types, **changes}


ROPE_OF_2_5 = {"rope_theta": 5000000.0, "rope_type": "default"}
LFM2_8B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "dtype": "bfloat16",
    "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7168,
    "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-5,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0, "use_cache": True, "use_expert_bias": True, "vocab_size": 65536,
}
# The config.json of LFM2-700M is the published one. Those of the others are from copies and fine-tuned models of them in public,
# which may have lost or gained keys that change nothing; of LFM2.5-2.6B and LFM2.5-8B-A1B only the keys that give the shape were
# found, and of LFM2-24B-A2B none.
PUBLISHED: dict[str, tuple[dict[str, Any], str, int, float]] = {
    "LFM2-1.2B": (LFM2_1_2B, KINDS["1.2b"], 8192, 1e6),
    "LFM2-700M": (
        {
            **LFM2_1_2B, "block_dim": 1536, "block_ff_dim": 10240, "conv_dim": 1536, "conv_dim_out": 1536, "hidden_size": 1536,
            "num_attention_heads": 24, "num_heads": 24,
        },
        KINDS["1.2b"], 6912, 1e6,
    ),
    "LFM2-350M": (
        without(
            LFM2_1_2B, "full_attn_idxs", kinds=KINDS["1.2b"], block_dim=1024, block_ff_dim=6656, intermediate_size=6656,
            conv_dim=1024, conv_dim_out=1024, hidden_size=1024, num_attention_heads=16, num_heads=16, tie_embedding=True,
        ),
        KINDS["1.2b"], 4608, 1e6,
    ),
    "LFM2.5-1.2B": (
        without(
            LFM2_1_2B, "block_ff_dim", "conv_dim_out", "rope_theta", "torch_dtype", kinds=KINDS["1.2b"], full_attn_idxs=None,
            intermediate_size=12288, dtype="bfloat16", rope_parameters={**ROPE_OF_2_5, "rope_theta": 1000000.0},
            tie_word_embeddings=True,
        ),
        KINDS["1.2b"], 8192, 1e6,
    ),
    "LFM2.5-2.6B": (
        {
            "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": False, "bos_token_id": 124894, "conv_L_cache": 3,
            "conv_bias": False, "eos_token_id": 124900, "hidden_size": 2048, "intermediate_size": 10752,
            "max_position_embeddings": 131072, "model_type": "lfm2", "norm_eps": 1e-5, "num_attention_heads": 32,
            "num_hidden_layers": 30, "num_key_value_heads": 8, "pad_token_id": 124893, "tie_word_embeddings": True,
            "rope_parameters": {**ROPE_OF_2_5, "rope_theta": 10000000.0}, "vocab_size": 128000,
            **without({}, kinds=KINDS["2.6b"]),
        },
        KINDS["2.6b"], 10752, 1e7,
    ),
    "LFM2-8B-A1B": (without(LFM2_8B, kinds=KINDS["8b"]), KINDS["8b"], 7168, 1e6),
    "LFM2.5-8B-A1B": (
        without(
            LFM2_8B, "rope_theta", kinds=KINDS["8b"], rope_parameters=ROPE_OF_2_5, vocab_size=128000, tie_word_embeddings=True,
        ),
        KINDS["8b"], 7168, 5e6,
    ),
}
"""config.json -> kinds of layers, values of a dense MLP, theta."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_whole(name: str) -> None:
    config, kinds, inner_size, theta = PUBLISHED[name]
    spec = read_spec(config, "config.json")
    assert spec.unread == ()
    assert (spec.tie, spec.rms_eps, spec.rope.theta, spec.eos_ids) == (True, 1e-5, theta, (config["eos_token_id"],))
    assert "".join("c" if isinstance(layer.mixer, ShortConvSpec) else "a" for layer in spec.layers) == kinds
    dense = [mlp for layer in spec.layers for mlp in layer.mlps if isinstance(mlp, GatedMlpSpec)]
    assert {mlp.inner_size for mlp in dense} == {inner_size}
    assert len(dense) == config.get("num_dense_layers", len(kinds))


def test_a_short_convolution_keeps_the_inputs_of_a_round_and_of_its_first_window() -> None:
    (ring,) = read_spec(LFM2_1_2B, "config.json").layer_states(torch.bfloat16, 16, draft_len=3)[0].row
    assert (ring.shape, ring.dtype) == ((6, 2048), torch.bfloat16)


@pytest.mark.parametrize("name", ["LFM2.5-2.6B", "LFM2-8B-A1B"])
def test_the_tensors_of_a_published_model(name: str) -> None:
    """Names and shapes in its files, of the first layer of each kind; norms and the embedding once."""
    shapes = expected_shapes(read_spec(PUBLISHED[name][0], "config.json"))
    size, inner, vocab = 2048, PUBLISHED[name][2], PUBLISHED[name][0]["vocab_size"]
    wanted: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, size), "model.embedding_norm.weight": (size,),
        "model.layers.0.operator_norm.weight": (size,), "model.layers.0.ffn_norm.weight": (size,),
        "model.layers.0.feed_forward.w1.weight": (inner, size), "model.layers.0.feed_forward.w2.weight": (size, inner),
        "model.layers.0.feed_forward.w3.weight": (inner, size), "model.layers.0.conv.in_proj.weight": (3 * size, size),
        "model.layers.0.conv.conv.weight": (size, 1, 3), "model.layers.0.conv.out_proj.weight": (size, size),
        "model.layers.2.self_attn.q_proj.weight": (size, size), "model.layers.2.self_attn.k_proj.weight": (512, size),
        "model.layers.2.self_attn.v_proj.weight": (512, size), "model.layers.2.self_attn.out_proj.weight": (size, size),
        "model.layers.2.self_attn.q_layernorm.weight": (64,), "model.layers.2.self_attn.k_layernorm.weight": (64,),
    }
    if name == "LFM2-8B-A1B":
        wanted |= {
            "model.layers.2.feed_forward.gate.weight": (32, size), "model.layers.2.feed_forward.expert_bias": (32,),
            "model.layers.2.feed_forward.experts.7.w1.weight": (1792, size),
            "model.layers.2.feed_forward.experts.7.w2.weight": (size, 1792),
            "model.layers.2.feed_forward.experts.7.w3.weight": (1792, size),
        }
    assert wanted.items() <= shapes.items()
    counts = {"LFM2.5-2.6B": 2 + 30 * 5 + 22 * 3 + 8 * 6, "LFM2-8B-A1B": 2 + 24 * 2 + 18 * 3 + 6 * 6 + 2 * 3 + 22 * (2 + 32 * 3)}
    assert len(shapes) == counts[name]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["conv"] * 15 + ["mamba"]}, 'layer_types: ["mamba"] not supported; conv and full_attention are'),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types: 2 for 16 layers; conv and full_attention are supported"),
        ({"full_attn_idxs": []}, "no layer of the 16 has full_attention, which is not supported; correct layer_types"),
        ({"norm_eps": -1}, "norm_eps is -1; it must be a number"),
        ({"norm_eps": None}, "norm_eps is null; it must be a number"),
        ({"block_ff_dim": None, "intermediate_size": 8192}, "block_ff_dim is null; it must be an integer"),
        ({"block_ff_dim": 0}, "block_ff_dim is 0; it must be an integer in 1 .. 16777216"),
        ({"conv_L_cache": 0}, "conv_L_cache is 0; it must be an integer in 1 .. 16"),
        ({"sliding_window": 5}, "sliding_window=5 in a lfm2"),
        ({"num_experts": 4}, "num_experts=4"),
        ({"model_type": "lfm3"}, 'model_type="lfm3" is not supported: it needs one gate per attention head; supported are'),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec({**LFM2_1_2B, **changes}, "config.json")
    assert named in str(caught.value)


def test_a_dtype_of_states_has_no_effect_on_convolutions_and_is_refused() -> None:
    said = "^cache.state_dtype=bfloat16 applies to recurrent layers, and lfm2 has none; remove the key$"
    with pytest.raises(ConfigError, match=said):
        with_states(read_spec(LFM2_1_2B, "config.json"), "bfloat16", torch.bfloat16)


@pytest.mark.second
def test_any_value_of_a_key_is_read_or_refused_in_one_line() -> None:
    keys = (*LFM2_1_2B, "layer_types", "tie_embedding", "intermediate_size", "head_dim")
    for changes in [{key: value} for key in keys for value in (*ODD_VALUES, *ODD_NUMBERS)]:
        ours({**LFM2_1_2B, "num_hidden_layers": 4, "full_attn_idxs": [2], **changes})
