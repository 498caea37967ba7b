"""Qwen3-Next and Qwen3.5, dense and with experts, alone and as the language model of a larger one: tensors, logits, keys.

Shapes, names, logits and what keys mean are those of transformers, on tiny random models.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchspec.checkpoint.files import LocalFiles
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from batchspec.model.families.qwen3_next import QWEN3_NEXT
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.attention.rope import rope_frequencies
from batchspec.model.layers.base import Shard
from batchspec.model.layers.gated_delta.block import GatedDeltaSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.mlp.moe import MoeSpec
from batchspec.model.quant.base import Slices
from batchspec.model.shard import slices_of
from batchspec.model.spec import ModelSpec, load_spec, read_spec
from batchspec.model.weights import Checkpoint, DummyWeights, expected_shapes, judge_model, taken
from batchspec.packing.cost import num_multiplied
from tests.checkpoint.test_config_values import ODD_VALUES, ours
from tests.distributed.test_shard import FP8_BLOCK, size_of
from tests.helpers.attentions import attentions
from tests.helpers.models import make_checkpoint, make_wrapped
from tests.model.test_dense_families import made_by_transformers
from tests.model.test_target import assert_like_transformers

CPU = torch.device("cpu")
FAMILIES = {family.name: family for family in (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24}
LINEAR = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
}
SHAPE: dict[str, Any] = {"hidden_size": 60, "head_dim": 24, **LINEAR}
PATTERN = ["linear_attention", "full_attention", "full_attention", "linear_attention", "linear_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("qwen3_next", {**SHAPE, **EXPERTS, "num_hidden_layers": 4}),
    "next, dense layers": (
        "qwen3_next",
        {**SHAPE, **EXPERTS, "num_hidden_layers": 5, "layer_types": PATTERN, "mlp_only_layers": [3], "decoder_sparse_step": 2},
    ),
    "next, a value head a key head": (
        "qwen3_next", {**SHAPE, **EXPERTS, "linear_num_value_heads": 3, "full_attention_interval": 2, "attention_bias": True},
    ),
    "dense": ("qwen3_5_text", {**SHAPE, "num_hidden_layers": 5, "layer_types": PATTERN}),
    "dense, tied": ("qwen3_5_text", {**SHAPE, "full_attention_interval": 3, "tie_word_embeddings": True, "attention_bias": True}),
    "dense, one key head, two taps": (
        "qwen3_5_text", {**SHAPE, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 2, "full_attention_interval": 2},
    ),
    "moe": ("qwen3_5_moe_text", {**SHAPE, **EXPERTS, "num_hidden_layers": 4}),
    "next, weights of experts as they are": (
        "qwen3_next",
        {
            **SHAPE, **EXPERTS, "num_hidden_layers": 2, "full_attention_interval": 1, "mlp_only_layers": [0],
            "norm_topk_prob": False,
        },
    ),
    "dense, sections of rotations": (
        "qwen3_5_text",
        {
            **SHAPE, "num_hidden_layers": 2, "full_attention_interval": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [1, 1, 1]},
        },
    ),
    "moe, half of each head rotated": (
        "qwen3_5_moe_text",
        {**SHAPE, **EXPERTS, "partial_rotary_factor": 0.5, "num_hidden_layers": 2, "full_attention_interval": 1},
    ),
}


def kinds(spec: ModelSpec) -> str:
    """r for a recurrent layer, a for one that attends; capital if it has experts."""
    letters: dict[type, str] = {AttentionSpec: "a", GatedDeltaSpec: "r"}
    mixers = [letters[type(layer.mixer)] for layer in spec.layers]
    return "".join(
        mixer.upper() if isinstance(layer.mlp, MoeSpec) else mixer for mixer, layer in zip(mixers, spec.layers, strict=True)
    )


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


# --- tensors


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("next", "RRRA"), ("next, dense layers", "rAarr"), ("next, a value head a key head", "RAR"), ("dense", "raarr"),
        ("dense, tied", "rra"), ("dense, one key head, two taps", "rar"), ("moe", "RRRA"),
        ("next, weights of experts as they are", "aA"), ("dense, sections of rotations", "aa"),
        ("moe, half of each head rotated", "AA"),
    ],
)
def test_the_tensors_are_those_that_transformers_saves(name: str, layers: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, vocab=64, **config)
    spec = judge_model(LocalFiles(folder))
    assert (spec.family, kinds(spec), spec.unread) == (family, layers, ())
    assert expected_shapes(spec) == shapes_in(folder)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_larger_one_has_the_shape_of_one_alone(kind: str, tmp_path: Path) -> None:
    text = {**SHAPE, "num_hidden_layers": 4, **(EXPERTS if "moe" in kind else {})}
    folder = make_wrapped(tmp_path / "whole", kind, text, vocab=64)
    alone = make_checkpoint(tmp_path / "alone", f"{kind}_text", vocab=64, **text)
    spec = judge_model(LocalFiles(folder))
    assert spec.unread == ()
    assert spec == replace(judge_model(LocalFiles(alone)), eos_ids=spec.eos_ids)
    names = [name for name in shapes_in(folder) if not name.startswith("model.visual.")]
    assert sorted(name.replace("model.language_model.", "model.") for name in names) == sorted(expected_shapes(spec))


@pytest.mark.parametrize("name", ["next", "dense"])
def test_weights_are_loaded_with_decays_in_fp32_and_the_norm_of_a_head_as_it_is(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, vocab=64, **config)
    spec, stored = load_spec(folder), load_file(folder / "model.safetensors")
    prefix = "model.layers.0."
    with Checkpoint(folder, spec, dtype=torch.bfloat16, device=CPU) as source:
        for own in ("A_log", "dt_bias"):
            assert torch.equal(source.tensor(f"{prefix}linear_attn.{own}"), stored[f"{prefix}linear_attn.{own}"])
        of_head = source.tensor(f"{prefix}linear_attn.norm.weight")
        assert torch.equal(of_head, stored[f"{prefix}linear_attn.norm.weight"].bfloat16())
        of_stream = source.tensor(f"{prefix}input_layernorm.weight")
        assert torch.equal(of_stream, stored[f"{prefix}input_layernorm.weight"] + 1)
        taps = source.tensor(f"{prefix}linear_attn.conv1d.weight")
    assert (taps.dtype, tuple(taps.shape)) == (torch.bfloat16, (144, 1, 4))


@pytest.mark.parametrize("ranks", [3, 1])
@pytest.mark.parametrize("name", ["next", "dense", "next, a value head a key head"])
def test_a_rank_has_whole_key_heads_with_their_value_heads(name: str, ranks: int, tmp_path: Path) -> None:
    """The parts of all ranks, put together, are the model's tensors; each has the shape that a rank computes with."""
    family, config = MODELS[name]
    config = {**config, "num_attention_heads": 6, "num_key_value_heads": 3}
    config |= {"moe_intermediate_size": 21} if "num_experts" in config else {}
    spec = read_spec({"model_type": family, **USUAL, **config, "vocab_size": 60}, "config.json")
    whole, parts = expected_shapes(spec), [spec.sharded(Shard(rank, ranks)) for rank in range(ranks)]
    cuts = [slices_of(part) for part in parts]
    for part, slices in zip(parts, cuts, strict=True):
        if slices is None:
            assert part == spec
            continue
        local = expected_shapes(replace(part, vocab_size=part.num_logits))
        assert {n: size_of(whole[n], own) for n, own in slices.items() if "layers" in n} == {
            n: shape for n, shape in local.items() if "layers" in n and n in slices
        }
    if ranks > 1:
        assert_covered(whole, [own for own in cuts if own is not None])


def assert_covered(whole: dict[str, tuple[int, ...]], cuts: list[Slices]) -> None:
    for tensor, shape in whole.items():
        count = torch.zeros(shape, dtype=torch.int32)
        for own in cuts:
            for piece in own.get(tensor, ((slice(0, 0),),)) or (...,):
                count[piece] += 1
        assert int(count.min()) == int(count.max()), tensor
        assert int(count.min()) in (1, len(cuts)), tensor


def test_a_rank_of_a_split_model_and_of_an_interleaved_one_hold_the_same_heads() -> None:
    """Rows of the split product, put in the order of the other one, are cut into the rows of the same key heads."""
    shape = {**LINEAR, "hidden_size": 8}
    split = GatedDeltaSpec(hidden_size=8, eps=1e-6, num_key_heads=3, num_value_heads=6, key_dim=10, value_dim=14, conv_width=4)
    woven = replace(split, interleaved=True)
    assert (shape["linear_num_key_heads"], split.qkvz.rows, woven.qkvz.rows) == (3, 228, 228)
    rows = torch.arange(228)
    q, k, v, z = (part.view(3, -1) for part in rows.split((30, 30, 84, 84)))
    order = torch.cat((q, k, v, z), 1).flatten()  # of key head after key head
    shard = Shard(1, 3)
    qkv, of_z = (split.shares(shard, 1)[f"linear_attn.in_proj_{x}"].ranges for x in ("qkv", "z"))
    own = taken(rows[:144], tuple((part,) for part in qkv)).tolist() + taken(rows[144:], tuple((part,) for part in of_z)).tolist()
    (range_,) = woven.shares(shard, 1)["linear_attn.in_proj_qkvz"].ranges
    assert sorted(order[range_].tolist()) == sorted(own)
    assert len(own) == split.sharded(shard, 1).qkvz.rows == 76


def test_what_a_layer_keeps_of_a_row() -> None:
    split = GatedDeltaSpec(hidden_size=8, eps=1e-6, num_key_heads=3, num_value_heads=6, key_dim=10, value_dim=14, conv_width=4)
    state, inputs, keys, values, gates = split.row_tensors(torch.bfloat16, torch.float32, 5)
    assert (state.shape, state.dtype) == ((6, 14, 10), torch.float32)
    assert (inputs.shape, keys.shape, values.shape) == ((12, 144), (12, 3, 10), (12, 6, 14))
    assert (inputs.dtype, gates.shape, gates.dtype) == (torch.bfloat16, (12, 6, 2), torch.float32)
    state, inputs, *_, gates = split.row_tensors(torch.float64, torch.float32, 0)
    assert (state.dtype, inputs.dtype, gates.dtype, inputs.shape[0]) == (torch.float64, torch.float64, torch.float64, 4)
    assert split.row_tensors(torch.bfloat16, torch.bfloat16, 0)[0].dtype is torch.bfloat16


def test_fp8_checkpoints_keep_the_gates_of_recurrent_layers_plain() -> None:
    plain = ["in_proj_b", "in_proj_a", "conv1d"]
    names = [f"model.language_model.layers.{i}.linear_attn.{name}" for i in range(3) for name in plain]
    config = {**TEXT_35B, "quantization_config": {**FP8_BLOCK, "modules_to_not_convert": [*names, "lm_head", "model.visual"]}}
    config |= {"num_hidden_layers": 4, "layer_types": None}
    spec = read_spec({"model_type": "qwen3_5_moe", "text_config": config}, "config.json")
    scales = {name: shape for name, shape in expected_shapes(spec).items() if name.endswith(".weight_scale_inv")}
    found = {name.split(".")[4] for name in scales if name.startswith("model.layers.0.linear_attn.")}
    assert found == {"in_proj_qkv", "in_proj_z", "out_proj"}
    assert scales["model.layers.0.linear_attn.in_proj_qkv.weight_scale_inv"] == (64, 16)
    assert scales["model.layers.0.mlp.shared_expert.down_proj.weight_scale_inv"] == (16, 4)
    assert scales["model.layers.0.mlp.experts.255.up_proj.weight_scale_inv"] == (4, 16)
    noise = DummyWeights(spec, dtype=torch.bfloat16, device=CPU)
    assert noise.tensor("model.layers.0.linear_attn.A_log").dtype is torch.float32
    part = spec.sharded(Shard(1, 2))
    assert part.layers[0].blocks[0].inner_size == 16 * 128
    with pytest.raises(ConfigError, match="linear_num_key_heads 16 cannot be cut into 3 equal parts"):
        spec.sharded(Shard(0, 3))


# --- logits


LONG = (200, 5, 131)
"""Lengths of prompts, of several chunks of the recurrence and of less than one."""


@pytest.mark.second
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_fp64_and_64_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, **config, max_position_embeddings=512)
    assert_like_transformers(folder, LONG, dtype=torch.float64, experts_implementation="eager")


@pytest.mark.second
@pytest.mark.parametrize("name", ["next", "dense", "moe"])
def test_logits_in_fp32_and_64_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With less noise in the weights: a head's output may be small, and its norm enlarges the rounding of either side."""
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, **config, max_position_embeddings=512, initializer_range=0.05)
    assert_like_transformers(folder, LONG, experts_implementation="eager")


@pytest.mark.second
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_larger_one_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    config = MODELS["moe" if "moe" in kind else "dense"][1]
    folder = make_wrapped(tmp_path, kind, {**config, "max_position_embeddings": 512})
    assert_like_transformers(folder, LONG, dtype=torch.float64, experts_implementation="eager")


# --- config keys

USUAL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 4096,
}
TEXT_35B: dict[str, Any] = {
    "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "vocab_size": 248_320, "max_position_embeddings": 262_144, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "attention_bias": False,
    "attn_output_gate": True,
    "hidden_act": "silu", "mamba_ssm_dtype": "float32", "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "router_aux_loss_coef": 0.001, "output_router_logits": False, "eos_token_id": 248_044,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
    },
    "rms_norm_eps": 1e-6, "dtype": "bfloat16", "tie_word_embeddings": False, "use_cache": True,
}
"""text_config with the sizes and keys of the 35B-A3B."""


def test_all_keys_of_a_published_model_are_read_or_known_and_its_sizes_are_right() -> None:
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": TEXT_35B,
        "vision_config": {"depth": 27}, "image_token_id": 248_056, "video_token_id": 248_057, "vision_start_token_id": 248_053,
        "vision_end_token_id": 248_054, "tie_word_embeddings": False, "transformers_version": "5.2.0",
    }
    spec = read_spec(config, "config.json")
    assert spec.unread == ()
    assert (spec.eos_ids, spec.dtype, spec.max_len) == ((248_044,), "bfloat16", 262_144)
    assert (spec.rope.rotary_dim, spec.rope.theta) == (64, 1e7)
    assert kinds(spec) == "RRRA" * 10
    assert spec.weight_bytes(torch.bfloat16) == pytest.approx(69.3e9, rel=0.01)  # 34.7e9 weights
    assert num_multiplied(spec) == pytest.approx(2.9e9, rel=0.1)
    (delta, *_) = [layer.mixer for layer in spec.layers]
    assert isinstance(delta, GatedDeltaSpec)
    assert sum(own.nbytes for own in delta.row_tensors(torch.bfloat16, torch.float32, 3)[:1]) == 2 << 20


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rms_norm_eps": 1e-3, "tie_word_embeddings": True, "attention_bias": True},
        {"num_key_value_heads": 1, "head_dim": 40, "linear_num_value_heads": 16, "linear_conv_kernel_dim": 7},
        {"full_attention_interval": 3, "rope_theta": 500.0},
        {"partial_rotary_factor": 1.0, "linear_key_head_dim": 5, "linear_value_head_dim": 9},
        {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [3, 3, 2], "mrope_interleaved": True}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4}},
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
    ],
)
def test_usual_keys_and_defaults_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    values = {**USUAL, **changes}
    spec, made = read_spec({"model_type": family, **values}, "config.json"), made_by_transformers(family, values)
    assert (spec.rms_eps, spec.tie) == (made.rms_norm_eps, made.tie_word_embeddings)
    attention, delta = attentions(spec)[0], spec.layers[[*made.layer_types].index("linear_attention")].mixer
    assert (attention.num_heads, attention.num_kv_heads) == (made.num_attention_heads, made.num_key_value_heads)
    assert (attention.head_dim, attention.qkv_bias, attention.o_bias) == (made.head_dim, made.attention_bias, made.attention_bias)
    assert isinstance(delta, GatedDeltaSpec)
    assert (delta.num_key_heads, delta.key_dim) == (made.linear_num_key_heads, made.linear_key_head_dim)
    assert (delta.num_value_heads, delta.value_dim) == (made.linear_num_value_heads, made.linear_value_head_dim)
    assert (delta.conv_width, delta.interleaved) == (made.linear_conv_kernel_dim, family == "qwen3_next")
    types: dict[type, str] = {AttentionSpec: "full_attention", GatedDeltaSpec: "linear_attention"}
    assert [types[type(layer.mixer)] for layer in spec.layers] == made.layer_types
    assert_rope(spec, made)
    for layer in spec.layers:
        if isinstance(layer.mlp, MoeSpec):
            own, router, shared = layer.mlp.experts, layer.mlp.router, layer.mlp.shared
            assert (own.num_experts, router.top_k) == (made.num_experts, made.num_experts_per_tok)
            assert router.norm_topk == getattr(made, "norm_topk_prob", True)
            assert shared is not None
            assert (own.expert_size, shared.mlp.inner_size) == (made.moe_intermediate_size, made.shared_expert_intermediate_size)
        else:
            assert isinstance(layer.mlp, GatedMlpSpec)
            assert layer.mlp.inner_size == made.intermediate_size


def assert_rope(spec: ModelSpec, made: Any) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

    theirs: Any = (Qwen3NextRotaryEmbedding if spec.family == "qwen3_next" else Qwen3_5TextRotaryEmbedding)(made)
    torch.testing.assert_close(rope_frequencies(spec.rope, made.head_dim), theirs.inv_freq, rtol=1e-6, atol=0)
    assert spec.rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "no layer of the 4 has full_attention, which is not supported"),
        ("qwen3_5_text", {"full_attention_interval": 5}, "no layer of the 4 has full_attention"),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 3}, "layer_types: 3 for 4 layers"),
        ("qwen3_5_text", {"layer_types": ["mamba2"] * 4}, 'layer_types: ["mamba2"] not supported'),
        ("qwen3_5_text", {"linear_num_value_heads": 24}, "value_heads 24 is not a multiple of linear_num_key_heads 16"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0; it must be an integer in 1 .. 64"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=false"),
        ("qwen3_5_text", {"num_experts": 8}, "num_experts=8"),
        ("qwen3_5_text", {"sliding_window": 128}, "sliding_window=128 in a qwen3_5_text"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, 'hidden_act="gelu"'),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        ("qwen3_5_moe_text", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("qwen3_5_moe_text", {"num_experts_per_tok": 300}, "num_experts_per_tok 300 exceeds the 256 experts"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0; it must be an integer in"),
        ("qwen3_next", {"use_qk_norm": False}, "use_qk_norm=false"),
        ("qwen3_next", {"partial_rotary_factor": 0.001}, "rotates 0 of the 256 numbers of a head"),
        ("qwen3_next", {"architectures": ["Qwen3NextForTokenClassification"]}, "qwen3_next needs Qwen3NextForCausalLM"),
        ("llama", {"rope_parameters": {"mrope_section": [3, 3, 2]}}, "mrope_section=[3, 3, 2]"),
    ],
)
def test_what_is_not_built_is_refused_by_name(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec({"model_type": family, **USUAL, **changes}, "config.json")
    assert named in str(caught.value)


HOSTILE = (
    *USUAL, *LINEAR, *EXPERTS, "head_dim", "num_key_value_heads", "layer_types", "full_attention_interval", "attn_output_gate",
    "partial_rotary_factor", "rope_parameters", "rope_scaling", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob",
    "attention_bias", "rms_norm_eps",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_a_key_is_read_or_refused_in_one_line(family: str) -> None:
    for changes in ({key: value} for key in HOSTILE for value in ODD_VALUES):
        spec = ours({"model_type": family, **USUAL, **changes})
        assert spec is None or math.isfinite(spec.rms_eps)
        assert spec is None or rope_frequencies(spec.rope, attentions(spec)[0].head_dim).isfinite().all()
