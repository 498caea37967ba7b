"""Nemotron-H, Granite 4 H, Bamba and Falcon-H1, whose Mamba2 layers keep a state of a row: tensors, logits and keys of
transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec.batch.flat_batch import Tokens
from batchspec.checkpoint.files import LocalFiles
from batchspec.checkpoint.wrapped import plain_name
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.families.shapes import COMMON, SHAPES, shape_spec
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.base import Shard
from batchspec.model.layers.mamba2.block import PREFILL_SLOWDOWN, Mamba2Spec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.mlp.moe import MoeSpec
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.model.weights import expected_shapes, judge_model
from tests.helpers.models import make_checkpoint
from tests.model.test_target import Runner, assert_bf16_near_the_exact_logits, assert_like_transformers, load, oracle, prompts

MAMBA: dict[str, Any] = {"mamba_num_heads": 6, "mamba_head_dim": 10, "n_groups": 3, "ssm_state_size": 13, "head_dim": 20}
EXPERTS = {
    "n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "moe_shared_expert_intermediate_size": 18,
}
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def nemotron(pattern: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """transformers clamps dt at time_step_min, in prompts alone; engines do not. No dt is as small as this."""
    kinds = [KINDS[letter] for letter in pattern]
    return "nemotron_h", {"hidden_size": 52, **MAMBA, **EXPERTS, "layers_block_type": kinds, "time_step_min": 1e-30, **changes}


GRANITE: dict[str, Any] = {
    "hidden_size": 56, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 0,
    "mamba_n_heads": 8, "mamba_d_state": 11, "shared_intermediate_size": 70, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0,
}
BAMBA: dict[str, Any] = {
    "hidden_size": 56, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 11, "num_hidden_layers": 3,
    "intermediate_size": 44, "num_attention_heads": 2, "num_key_value_heads": 1,
}
FALCON: dict[str, Any] = {
    "hidden_size": 56, "head_dim": 10, "intermediate_size": 44, "mamba_d_ssm": 60, "mamba_n_heads": 6, "mamba_d_head": 10,
    "mamba_n_groups": 2, "mamba_d_state": 13, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.3, "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.375, 0.25, 0.4375, 0.5, 0.3125], "mlp_multipliers": [0.88, 0.58],
}
"""transformers keeps ssm_multipliers in fp32: these are exact there."""
BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": ("falcon_h1", FALCON),
    "falcon_h1, a norm, no factors": (
        "falcon_h1",
        {key: own for key, own in FALCON.items() if "multiplier" not in key}
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "falcon_h1, biases": (
        "falcon_h1",
        {
            **FALCON, **dict.fromkeys(BIASES, True), "attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0,
            "mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_n_heads": 8, "mamba_d_conv": 3, "mamba_conv_bias": False,
        },
    ),
    "experts": nemotron("ME*M", routed_scaling_factor=1.7),
    "narrow experts": nemotron("EM*E", routed_scaling_factor=1.7, moe_latent_size=20),
    "dense, the last layer attends": nemotron("M-M*"),
    "dense, the last layers keep nothing": nemotron("*M--", use_bias=True, use_conv_bias=False, mlp_bias=True, conv_kernel=3),
    "groups of experts, one of heads": nemotron("M*E", n_group=2, topk_group=1, n_routed_experts=8, n_groups=1, conv_kernel=1),
    "bamba": ("bamba", BAMBA),
    "bamba, biases, groups of heads": (
        "bamba", {**BAMBA, "mamba_n_groups": 4, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}
    ),
    "granite": ("granitemoehybrid", GRANITE),
    "granite, experts": (
        "granitemoehybrid", {**GRANITE, "intermediate_size": 22, "num_local_experts": 7, "num_experts_per_tok": 3}
    ),
    "granite, rotated, with biases": (
        "granitemoehybrid",
        {
            **GRANITE, "mamba_n_groups": 2, "position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_conv_bias": False,
            "mamba_d_conv": 3, "residual_multiplier": 1.0,
        },
    ),
}


def letters(spec: ModelSpec) -> str:
    """Of each block: M and * as in a pattern, - and E."""
    of: dict[type, str] = {Mamba2Spec: "M", AttentionSpec: "*", GatedMlpSpec: "-", MoeSpec: "E"}
    return "".join(of[type(block)] for layer in spec.layers for block in layer.blocks)


@pytest.mark.second
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_logits_over_several_chunks_and_64_greedy_tokens_equal_those_of_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, **config)
    assert_like_transformers(folder, (137, 5, 70), dtype=dtype, experts_implementation="eager")


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_those_that_transformers_saves(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, vocab=64, **config)
    saved = load_file(folder / "model.safetensors")
    assert family != "nemotron_h" or sum(key.startswith("backbone.") for key in saved) == len(saved) - 1
    spec = judge_model(LocalFiles(folder))
    assert (spec.family, spec.unread) == (family, ())
    found = {plain_name(key): tuple(tensor.shape) for key, tensor in saved.items()}
    wanted = {key: shape for key, shape in expected_shapes(spec).items() if not re.search(r"block_sparse_moe\.\d", key)}
    stacked = re.compile(r"block_sparse_moe\.(in|out)put_linear")  # of all experts of Granite; `judge_model` has compared them
    assert wanted == {key: shape for key, shape in found.items() if not stacked.search(key)}


def test_files_with_the_names_that_transformers_has_in_memory_and_with_mtp_layers_are_read_alike(tmp_path: Path) -> None:
    family, config = MODELS["experts"]
    folder, (ids,) = make_checkpoint(tmp_path, family, **config), prompts([9])
    before = Runner.start(load(folder), 1).feed([ids])[0][0]
    tensors = {key.replace("backbone.", "model."): own for key, own in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "mtp.layers.0.enorm.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Runner.start(load(folder), 1).feed([ids])[0][0], before)


def test_dt_is_not_clamped_at_time_step_min(tmp_path: Path) -> None:
    family, config = MODELS["dense, the last layer attends"]
    folder, (ids,) = make_checkpoint(tmp_path, family, **config), prompts([9])
    before = Runner.start(load(folder), 1).feed([ids])[0][0]
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "time_step_min": 0.5}))
    assert torch.equal(Runner.start(load(folder), 1).feed([ids])[0][0], before)
    with torch.inference_mode():
        assert not torch.allclose(oracle(folder)(torch.tensor([ids])).logits[0], before, atol=1e-3), "transformers clamps it"


@pytest.mark.second
@pytest.mark.parametrize("name", ["experts", "granite", "falcon_h1"])
def test_logits_in_bf16_are_as_near_to_the_exact_ones_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, dtype=torch.bfloat16, initializer_range=0.1, **config)
    assert_bf16_near_the_exact_logits(folder, experts_implementation="eager")


@pytest.mark.parametrize("known", ["outputs", "drafts"])
def test_steps_give_the_logits_of_chunks(known: Tokens, tmp_path: Path) -> None:
    family, config = MODELS["experts"]
    target, (ids,) = load(make_checkpoint(tmp_path, family, **config), torch.float64), prompts([90])
    whole = Runner.start(target, 1).feed([ids])[0][0]
    runner = Runner.start(target, 1)
    parts = [runner.feed([ids[:64]])[0][0], *(runner.feed([ids[at : at + 2]], known=known)[0][0] for at in range(64, 90, 2))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-10, rtol=0)


def test_one_group_of_heads_is_not_cut() -> None:
    with pytest.raises(ConfigError, match="number of groups of Mamba2 heads 1 cannot be cut into 2 equal parts; lower cluster"):
        shape_spec("granite4-h-micro").sharded(Shard(0, 2))


def test_what_a_layer_keeps_of_a_row() -> None:
    spec = shape_spec("nemotron3-nano-30b-a3b")
    state = spec.layer_states(torch.bfloat16, 16, draft_len=3)[0]
    assert [(own.shape, own.dtype) for own in state.row] == [
        ((64, 64, 128), torch.float32), ((8, 6144), torch.bfloat16), ((8, 5120), torch.bfloat16), ((8, 64), torch.bfloat16),
    ]
    assert (state.lags, state.chunk, state.pages) == (True, 64, None)
    assert spec.with_state_dtype(torch.bfloat16).layer_states(torch.bfloat16, 16, draft_len=3)[0].row[0].nbytes == 2**20
    kept = [own for own in spec.layer_states(torch.bfloat16, 16, draft_len=0) if own.row]
    assert (len(kept), sum(own.row[0].nbytes for own in kept)) == (23, 23 * 2**21)


def test_plan_says_what_rows_keep_and_rounds_move() -> None:
    spec = shape_spec("nemotron3-nano-30b-a3b")
    run = spec.computing(torch.bfloat16, 16, draft_len=3)
    about = [one for one in spec.about(run) if one.model]
    assert [(own.model[0][0], own.memory) for own in about] == [
        ("recurrent", (("states", "48.2 MB a row in float32, of 23 Mamba2 layers"),))
    ]
    mixer = spec.layers[0].mixer
    assert mixer is not None
    work = mixer.round_work(run, 1000.0, 4.0)
    assert (work.state_bytes, work.page_bytes) == (4 * 64 * 64 * 128, 0)
    assert 0 < work.token_bytes < 0.2 * 2 * work.state_bytes
    # Of each head: C B' and W X over a chunk of 64, C S' and the change of S.
    assert mixer.prompt_work(run, 1000.0, ends_only=False).flop == PREFILL_SLOWDOWN * 64 * (2 * 64 * (128 + 64) + 4 * 128 * 64)


NANO_30B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig", "AutoModel": "modeling_nemotron_h.NemotronHForCausalLM",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
    "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128,
    "hidden_dropout": 0.0, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "initializer_range": 0.02,
    "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_num_heads": 64, "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52,
    "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True, "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16",
    "transformers_version": "4.53.2", "use_bias": False, "use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True,
    "vocab_size": 131072,
}
"""The published config.json. Sizes of Nemotron Nano 9B v2 and of Granite 4 H Micro: `families/family_shapes.py`."""


def test_a_published_config_is_read_whole() -> None:
    spec = read_spec(NANO_30B, "config.json")
    assert (spec.unread, spec.tie, spec.rms_eps, spec.eos_ids, spec.max_len) == ((), False, 1e-5, (2,), 262144)
    assert letters(spec) == NANO_30B["hybrid_override_pattern"]
    assert spec.layers == shape_spec("nemotron3-nano-30b-a3b").layers
    assert spec.mtp is None
    assert letters(shape_spec("granite4-h-micro")).count("M-") == 36


def test_the_tensors_of_a_published_model() -> None:
    """Names and shapes in its files, of the first layer of each kind."""
    shapes = expected_shapes(read_spec(NANO_30B, "config.json"))
    wanted: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (131072, 2688), "backbone.norm_f.weight": (2688,), "lm_head.weight": (131072, 2688),
        "backbone.layers.0.norm.weight": (2688,), "backbone.layers.0.mixer.in_proj.weight": (10304, 2688),
        "backbone.layers.0.mixer.conv1d.weight": (6144, 1, 4), "backbone.layers.0.mixer.conv1d.bias": (6144,),
        "backbone.layers.0.mixer.A_log": (64,), "backbone.layers.0.mixer.D": (64,), "backbone.layers.0.mixer.dt_bias": (64,),
        "backbone.layers.0.mixer.norm.weight": (4096,), "backbone.layers.0.mixer.out_proj.weight": (2688, 4096),
        "backbone.layers.1.mixer.gate.weight": (128, 2688), "backbone.layers.1.mixer.gate.e_score_correction_bias": (128,),
        "backbone.layers.1.mixer.experts.7.up_proj.weight": (1856, 2688),
        "backbone.layers.1.mixer.experts.7.down_proj.weight": (2688, 1856),
        "backbone.layers.1.mixer.shared_experts.up_proj.weight": (3712, 2688),
        "backbone.layers.1.mixer.shared_experts.down_proj.weight": (2688, 3712),
        "backbone.layers.5.mixer.q_proj.weight": (4096, 2688), "backbone.layers.5.mixer.k_proj.weight": (256, 2688),
        "backbone.layers.5.mixer.v_proj.weight": (256, 2688), "backbone.layers.5.mixer.o_proj.weight": (2688, 4096),
    }
    assert {plain_name(name): shape for name, shape in wanted.items()}.items() <= shapes.items()
    assert len(shapes) == 3 + 52 + 23 * 8 + 6 * 4 + 23 * (2 + 2 + 2 * 128)


@pytest.mark.parametrize(
    ("keys", "has"),
    [
        ({}, True), ({"mtp_layers_block_type": ["full_attention", "moe"]}, True), ({"mtp_hybrid_override_pattern": "*E"}, True),
        ({"mtp_hybrid_override_pattern": "*-"}, False), ({"mtp_hybrid_override_pattern": "?"}, False),
        ({"mtp_layers_block_type": ["moe"], "mtp_hybrid_override_pattern": "*E"}, False),
        ({"num_nextn_predict_layers": 2}, False),
    ],
)
def test_the_mtp_layer_is_one_of_attention_and_one_of_experts(keys: dict[str, Any], has: bool) -> None:
    spec = read_spec({**NANO_30B, "num_nextn_predict_layers": 1, **keys}, "config.json")
    assert (spec.mtp is not None, spec.unread) == (has, ())


def test_the_tensors_of_a_published_mtp_layer() -> None:
    """Names and shapes in files of Nemotron 3 Super."""
    mtp = shape_spec("nemotron3-super-120b-a12b-nvfp4").mtp
    assert mtp is not None
    shapes, first, last = {tensor.name: tensor.shape for tensor in mtp.tensors()}, "mtp.layers.0.", "mtp.layers.1."
    wanted: dict[str, tuple[int, ...]] = {
        f"{first}enorm.weight": (4096,), f"{first}hnorm.weight": (4096,), f"{first}eh_proj.weight": (4096, 8192),
        f"{first}norm.weight": (4096,), f"{first}mixer.q_proj.weight": (4096, 4096), f"{first}mixer.k_proj.weight": (256, 4096),
        f"{first}mixer.v_proj.weight": (256, 4096), f"{first}mixer.o_proj.weight": (4096, 4096), f"{last}norm.weight": (4096,),
        f"{last}mixer.gate.weight": (512, 4096), f"{last}mixer.gate.e_score_correction_bias": (512,),
        f"{last}mixer.fc1_latent_proj.weight": (1024, 4096), f"{last}mixer.fc2_latent_proj.weight": (4096, 1024),
        f"{last}mixer.experts.511.up_proj.weight": (2688, 1024), f"{last}mixer.experts.511.down_proj.weight": (1024, 2688),
        f"{last}mixer.shared_experts.up_proj.weight": (5376, 4096),
        f"{last}mixer.shared_experts.down_proj.weight": (4096, 5376),
        f"{last}final_layernorm.weight": (4096,),
    }
    assert wanted.items() <= shapes.items()
    assert len(shapes) == len(wanted) + 2 * 511


def test_the_formats_of_nvidias_checkpoints_are_those_of_their_modules() -> None:
    spec = shape_spec("nemotron3-nano-30b-a3b-nvfp4")
    names = ("0.mixer.in_proj", "4.mixer.in_proj", "5.mixer.q_proj", "1.mixer.experts.0.up_proj")
    kept = [spec.formats.of(f"model.layers.{name}").kept for name in names]
    assert kept == ["NVFP4 weights", "", "", "NVFP4 weights"]
    assert spec.mtp is not None
    assert spec.mtp.formats.of("mtp.layers.1.mixer.experts.0.up_proj").kept == ""


NANO_9B = {**SHAPES["nemotron-nano-9b"], "rms_norm_eps": None, "max_position_embeddings": 131072}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hybrid_override_pattern": "MX"}, 'hybrid_override_pattern: ["X"] not supported; a letter of M*-E for each layer is'),
        ({"hybrid_override_pattern": "M*"}, "the pattern of layers: 2 for 56 layers; linear_attention and full_attention and"),
        ({"hybrid_override_pattern": "M" * 56}, "no layer of the 56 has full_attention, which is not supported"),
        ({"moe_latent_size": 1024, "mlp_bias": True}, "mlp_bias=true"),
        ({"mlp_hidden_act": "silu"}, 'mlp_hidden_act="silu"'),
        ({"mamba_hidden_act": "gelu"}, 'mamba_hidden_act="gelu"'),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"residual_in_fp32": True}, "residual_in_fp32=true"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias=true"),
        ({"time_step_limit": [0.0, 1.0]}, "time_step_limit=[0.0, 1.0]"),
        ({"n_groups": 3}, "mamba_num_heads 128 is not a multiple of n_groups 3; correct them"),
        ({"mamba_num_groups": 4}, "mamba_num_groups=4"),
        ({"mamba_n_groups": 4}, "mamba_n_groups=4"),
        ({"mamba_state_dim": 64}, "mamba_state_dim=64"),
        ({"norm_eps": 1e-3}, "norm_eps=0.001"),
        ({"attention_head_dim": 64}, "attention_head_dim=64"),
        ({"n_shared_experts": 0}, "n_shared_experts=0"),
        ({"sliding_window": 5}, "sliding_window=5 in a nemotron_h"),
        ({"conv_kernel": 17}, "conv_kernel is 17; it must be an integer in 1 .. 16"),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon is -1; it must be a number"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec({**NANO_9B, **changes}, "config.json")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_rms_norm=true with mamba_norm_before_gate=true"),
        ({"attention_bias": True, "attention_in_multiplier": 2.0}, "attention_bias=true with attention_in_multiplier=2.0"),
        ({"mamba_proj_bias": True, "projectors_bias": True}, "mamba_proj_bias=true with ssm_in_multiplier=1.25"),
        ({"projectors_bias": True}, "projectors_bias=true with mamba_proj_bias=false"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp=false"),
        ({"mamba_d_ssm": 1000}, "have mamba_d_ssm = 1000 values together; correct them"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit=[0.001, 0.1]"),
        ({"ssm_multipliers": [1.0, 1.0]}, "ssm_multipliers is [1.0, 1.0]; it must be a list of 5 numbers"),
        ({"key_multiplier": 0.0}, "key_multiplier is 0.0; it must be a number"),
        ({"sliding_window": 5}, "sliding_window=5 in a falcon_h1"),
    ],
)
def test_what_is_not_built_of_falcon_h1_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec({**COMMON, **SHAPES["falcon-h1-0.5b"], **changes}, "config.json")
    assert named in str(caught.value)


def test_plan_says_that_attention_and_mamba2_beside_each_other_keep_what_both_keep() -> None:
    spec = shape_spec("falcon-h1-0.5b")
    run = spec.computing(torch.bfloat16, 16, draft_len=3)
    (about,) = spec.about(run)
    assert "36 of the layers keep " in about.model[0][1]
    assert "of a row, however long, besides K and V" in about.model[0][1]
    mixer = spec.layers[0].mixer
    assert mixer is not None
    pages, state = (part.kept(run) for part in mixer.parts)
    kept, work = mixer.kept(run), mixer.round_work(run, 1000.0, 4.0)
    assert (kept.pages, kept.row, kept.lags, kept.chunk) == (pages.pages, state.row, True, 64)
    assert work.page_bytes == 1000 * 2 * 2 * 64 * 2
    assert work.state_bytes == 4 * 1536 * 128


@pytest.mark.parametrize("limit", [None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]])
def test_no_limit_of_dt_is_read_however_it_is_written(limit: Any) -> None:
    assert read_spec({**NANO_9B, "time_step_limit": limit, "mamba_num_groups": 8}, "config.json").num_layers == 56


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 131072}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("config", [NANO_9B, {**SHAPES["granite4-h-micro"], "max_position_embeddings": 131072}])
def test_where_attention_does_not_rotate_yarn_is_named_as_unread_and_lengthens_no_row(config: dict[str, Any], key: str) -> None:
    plain = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": None}
    spec = read_spec({**config, **plain}, "config.json")
    assert (spec.max_len, spec.unread, spec.rope.type) == (131072, (), "none")
    scaled = read_spec({**config, **plain, key: YARN}, "config.json")
    assert scaled.max_len == 131072
    assert [own.partition("=")[0] for own in scaled.unread] == [key]
    assert spec.rope.of_heads.type == "default"


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ("tree", "has recurrent layers, which keep one state of a row: only chains can be verified"),
        ("drafter", "has recurrent layers"),
        ("self_draft", "and the model itself cannot draft them"), ("padded_prefill", "has recurrent layers"),
    ],
)
def test_what_a_state_cannot_is_refused(use: Any, why: str) -> None:
    refused = shape_spec("nemotron-nano-9b").refuses(use)
    assert refused is not None
    assert why in refused
