"""Combinations of config.json's keys, in tiny models of every family: the logits are those of transformers, or one line refuses.

transformers reads some keys only where others are missing, and tells a key that is null from one that is missing.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchspec.errors import CheckpointError
from batchspec.model.families.registry import FAMILIES
from batchspec.model.spec import load_spec, read_spec
from tests.helpers.models import needed
from tests.model.test_family_keys import EXPERTS, GEMMA4, RECURRENT_FAMILIES, SHAPE, USUAL, of_transformers, our_logits
from tests.model.test_family_keys import OWN as OWN_OF_FAMILIES

MISSING = "(missing)"
BASE: dict[str, Any] = {
    **SHAPE, **USUAL, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True},
    "mixtral": EXPERTS, "minimax_m2": {**EXPERTS, "rotary_dim": 6}, "gpt_oss": {**EXPERTS, "sliding_window": 7},
    "gemma3_text": {"sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20},
    **{family: OWN_OF_FAMILIES[family] for family in (*GEMMA4, *RECURRENT_FAMILIES)},
    "mistral": {"sliding_window": 9}, "phi3": {"sliding_window": 9, "partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5}, "glm_ocr_text": {"head_dim": 64},
    "exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},
    "granitemoehybrid": needed("granitemoehybrid", 3), "lfm2_moe": needed("lfm2_moe", 3),
    "nemotron_h": needed("nemotron_h", 3), "bamba": needed("bamba", 3),
    "falcon_h1": needed("falcon_h1", 3),
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4}},
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "glm4_moe_lite": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "q_lora_rank": 12, "kv_lora_rank": 20,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 4, "head_dim": MISSING,
    },
    "mistral4": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "q_lora_rank": 12, "kv_lora_rank": 20,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 4, "head_dim": MISSING,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4},
    },
    "deepseek_v3": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "q_lora_rank": 12, "kv_lora_rank": 20,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 4, "head_dim": MISSING,
        "n_group": 3, "topk_group": 2,
    },
}
LLAMA3: dict[str, Any] = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.5, 2.0, 3.0], "long_factor": [4.0] * 3}
KINDS = ("sliding_attention", "full_attention")
ROPES: tuple[Any, ...] = (
    None, {}, {"rope_theta": 30.0}, {"rope_theta": None}, {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "type": "default"}, {"rope_type": "default", "type": "linear", "factor": 3.0},
    {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": None}, {"rope_type": "default", "rope_theta": 30.0}, YARN, LLAMA3,
    {**YARN, "partial_rotary_factor": 0.5}, {**YARN, "attention_factor": None}, {**YARN, "factor": None},
    {**YARN, "original_max_position_embeddings": None}, {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, {**YARN, "mscale": 0.7},
    {**YARN, "truncate": None}, {**YARN, "beta_fast": None}, {**LLAMA3, "rope_theta": 77.0}, LONGROPE,
    {"rope_type": "longrope", "short_factor": [1.5] * 3, "long_factor": [4.0] * 3, "attention_factor": 1.3},
    {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, "sliding_attention": {"rope_theta": 100.0}},
    {"sliding_attention": {"rope_type": "linear", "factor": 4.0}},
)
GEMMA4_ROPES: tuple[Any, ...] = (
    {"full_attention": {"rope_type": "proportional", "rope_theta": 90.0}, "sliding_attention": {"rope_theta": 30.0}},
    {
        "full_attention": {"rope_type": "proportional", "rope_theta": 90.0, "partial_rotary_factor": 0.6, "factor": 3.0},
        "sliding_attention": {"rope_type": "linear", "rope_theta": 30.0, "factor": 2.0},
    },
    {"full_attention": {"rope_type": "default", "rope_theta": 90.0}},
)
GEMMA4_KEYS: dict[str, tuple[Any, ...]] = {
    "global_head_dim": (8, 14, MISSING), "num_global_key_value_heads": (None, 1, 4), "attention_k_eq_v": (None, True, False),
    "per_layer_config": (None, {}, {"1": {"head_dim": 8}}, {"2": {"num_key_value_heads": 1, "head_dim": 6}}),
    "final_logit_softcapping": (None, 2.0), "use_bidirectional_attention": (None, "vision", "all"),
    "rope_parameters": (None, *GEMMA4_ROPES),
}
KEYS: dict[str, tuple[Any, ...]] = {
    "head_dim": (None, 8, 10), "num_key_value_heads": (None, 1, 4), "rms_norm_eps": (None, 1e-2), "rope_theta": (None, 50.0),
    "rope_parameters": ROPES, "rope_scaling": ROPES, "tie_word_embeddings": (None, True, False),
    "attention_bias": (None, True, False), "mlp_bias": (True,), "sliding_window": (None, 5, 0),
    "layer_types": (None, [*KINDS, KINDS[0]], [KINDS[1]] * 3), "use_sliding_window": (True, False), "max_window_layers": (0, 1),
    "partial_rotary_factor": (None, 0.5, 1.0, 0.4, 0.6, 1), "rotary_dim": (None, 6, 4, 12, 5),
    "original_max_position_embeddings": (None, 64, 32), "hidden_act": ("silu", "swish", "gelu_pytorch_tanh"),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "embedding_multiplier": (2.5, 1), "residual_multiplier": (0.6,), "attention_multiplier": (0.3, None),
    "logits_scaling": (1.5,),
}
RECURRENT_KEYS: dict[str, tuple[Any, ...]] = {
    "layer_types": (None, ["linear_attention", KINDS[1]] * 2, [KINDS[1]] * 4, ["linear_attention"] * 4),
    "full_attention_interval": (None, 1, 3, 5), "linear_num_key_heads": (None, 2, 16), "linear_num_value_heads": (8, 6),
    "linear_key_head_dim": (8,), "linear_value_head_dim": (12,), "linear_conv_kernel_dim": (None, 1, 4),
    "attn_output_gate": (False,),
}
COUNTS: dict[str, tuple[Any, ...]] = {
    "num_local_experts": (None, 5, 4), "num_experts": (None, 5, 4), "num_experts_per_tok": (1, 5),
}
MIXTURE: dict[str, tuple[Any, ...]] = {
    **COUNTS, "norm_topk_prob": (None, True, False), "shared_expert_intermediate_size": (16, 0),
}
OWN_KEYS: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3_moe": {
        **COUNTS, "norm_topk_prob": (True, False), "decoder_sparse_step": (1, 2), "mlp_only_layers": (None, [], [0], [0, 1, 2]),
    },
    "mixtral": COUNTS,
    "minimax_m2": COUNTS,
    "exaone4": {"sliding_window_pattern": (1, 3)},
    "seed_oss": {"attention_out_bias": (True, False)},
    "smollm3": {"no_rope_layers": (None, [1, 0, 0], [0, 1]), "no_rope_layer_interval": (1, 2, 3)},
    "granite": FACTORS,
    "granitemoehybrid": {
        **FACTORS, "position_embedding_type": ("rope", None), "shared_intermediate_size": (20,), "num_experts_per_tok": (0, 2, 5),
        "num_local_experts": (0, 4),
        "layer_types": (None, [KINDS[1]] * 3, ["attention"] * 3, ["mamba", "attention", "attention"]),
        "mamba_n_heads": (2, 6), "mamba_d_head": ("auto", 8), "mamba_d_state": (10,), "mamba_n_groups": (2,),
    },
    "bamba": {
        "attn_layer_indices": (None, [1], [3]), "mamba_n_heads": (2, 6), "mamba_d_head": ("auto", 8), "mamba_d_state": (10,),
        "mamba_n_groups": (2,), "mlp_bias": (True,), "partial_rotary_factor": (0.25,),
    },
    "falcon_h1": {
        "mamba_d_ssm": (None, 24, 50), "mamba_n_heads": (2, 6), "mamba_d_head": ("auto", 12), "mamba_d_state": (10,),
        "mamba_n_groups": (2,), "mamba_rms_norm": (True, False), "mamba_norm_before_gate": (True, False),
        "attention_bias": (True,), "mamba_proj_bias": (True,), "projectors_bias": (True,), "attention_in_multiplier": (1.5,),
        "ssm_in_multiplier": (0.7,), "ssm_multipliers": (None, [0.5, 0.25, 1.5, 0.75, 2.0]),
        "mlp_multipliers": (None, [0.4, 1.3]), "key_multiplier": (0.4,), "lm_head_multiplier": (0.2,),
    },
    "nemotron_h": {
        "layers_block_type": (None, ["moe", KINDS[1], "mlp"], ["linear_attention"] * 3, ["mamba", "attention", "mlp"]),
        "hybrid_override_pattern": ("M*-", "MM*", "M*"), "mamba_num_heads": (2, 3), "n_groups": (1, 2), "ssm_state_size": (10,),
        "layer_norm_epsilon": (None, 1e-2), "use_bias": (True,), "mlp_hidden_act": ("relu2", "silu"), "n_routed_experts": (6,),
        "moe_latent_size": (None, 8), "n_shared_experts": (0, 2), "time_step_limit": (None, [0.0, 1.0]),
    },
    "glm4_moe": {
        "n_routed_experts": (None, 4), "num_local_experts": (None, 8), "num_experts_per_tok": (1, 5), "n_group": (2, 3, 5),
        "topk_group": (2,), "routed_scaling_factor": (1.7,), "norm_topk_prob": (True, False), "use_qk_norm": (True, False),
        "first_k_dense_replace": (0, 3), "n_shared_experts": (2, 0), "num_nextn_predict_layers": (None, 0, 2),
        "scoring_func": ("sigmoid", "softmax"),
    },
    "glm4_moe_lite": {
        "n_routed_experts": (4,), "num_experts_per_tok": (1, 5), "q_lora_rank": (None,), "rope_interleave": (True, False),
        "qk_rope_head_dim": (10, 5), "v_head_dim": (12,), "first_k_dense_replace": (0, 1), "attention_bias": (True,),
        "mlp_layer_types": (None, ["dense"] * 3, ["sparse", "dense", "sparse"], ["dense"]), "topk_method": ("noaux_tc", "greedy"),
    },
    "deepseek_v3": {
        "n_routed_experts": (12,), "num_experts_per_tok": (1, 4, 5), "q_lora_rank": (None,), "rope_interleave": (True, False),
        "qk_rope_head_dim": (10, 5), "v_head_dim": (12,), "first_k_dense_replace": (0, 1), "attention_bias": (True,),
        "n_group": (1, 2, 4), "topk_group": (1,), "topk_method": ("noaux_tc", "greedy"), "norm_topk_prob": (True, False),
    },
    "gpt_oss": {**COUNTS, "experts_per_token": (1, 2), "swiglu_alpha": (1.2,), "swiglu_limit": (0.8,)},
    "gemma3_text": {
        "sliding_window_pattern": (1, 3), "query_pre_attn_scalar": (7,), "rope_local_base_freq": (50.0,),
        "hidden_activation": ("gelu_pytorch_tanh", "silu"),
    },
    **dict.fromkeys(GEMMA4, GEMMA4_KEYS),
    "qwen3_next": {**RECURRENT_KEYS, **MIXTURE, "decoder_sparse_step": (1, 2), "mlp_only_layers": (None, [], [0])},
    "qwen3_5_text": RECURRENT_KEYS,
    "qwen3_5_moe_text": {**RECURRENT_KEYS, **MIXTURE},
}


def check(config: dict[str, Any], folder: Path) -> str:
    """What happened; the logits are compared if both read the config."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    try:
        spec = load_spec(folder)
    except CheckpointError as error:
        return str(error)
    try:
        model, theirs = of_transformers(folder)
    except Exception:  # whatever it raises, it does not read the config
        return "transformers fails"
    try:
        ours = our_logits(folder, spec, model)
    except CheckpointError as error:
        return str(error)
    # Rounding alone makes logits of up to 14, as with Gemma 3's default head_dim of 256, differ by 2e-4, logits of up to 11 after
    # recurrent layers by 3.5e-4, and logits of up to 7 after latent attention by 5e-4: in float64 both sides agree, and each
    # differs by 1e-4 to 4e-4 from its own in float64.
    parts = {**dict.fromkeys(RECURRENT_FAMILIES, 2), **dict.fromkeys(("glm4_moe_lite", "deepseek_v3", "mistral4"), 1)}
    part = parts.get(config["model_type"], 4)
    torch.testing.assert_close(ours, theirs, atol=1e-4 * max(1.0, float(theirs.abs().max()) / part), rtol=1e-4)
    return "equal"


def changes_of(family: str) -> st.SearchStrategy[dict[str, Any]]:
    """Up to four keys with other values, or none."""
    keys = {**KEYS, **OWN_KEYS.get(family, {})}
    names = st.lists(st.sampled_from(sorted(keys)), min_size=1, max_size=4, unique=True)
    return names.flatmap(lambda own: st.fixed_dictionaries({key: st.sampled_from((MISSING, *keys[key])) for key in own}))


def changed(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = {"model_type": family, **BASE, **OWN.get(family, {}), **changes}
    return {key: value for key, value in config.items() if value is not MISSING}


@pytest.mark.second
@pytest.mark.parametrize("family", FAMILIES)
def test_any_combination_is_read_as_transformers_reads_it_or_refused(family: str, tmp_path: Path) -> None:
    outcomes = Counter[str]()

    @settings(max_examples=20)
    @given(changes_of(family))
    @example({})
    @example({"rms_norm_eps": 1e-2})
    def check_combination(changes: dict[str, Any]) -> None:
        said = check(changed(family, changes), tmp_path / "model")
        assert said.isprintable()
        outcomes[said] += 1

    check_combination()
    assert outcomes["equal"] >= 2, "the two examples; how many of the others are read depends on what is drawn"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_any_key_is_read_as_transformers_reads_it_or_refused(family: str, tmp_path: Path) -> None:
    keys = {**KEYS, **OWN_KEYS.get(family, {})}
    for key, value in ((key, value) for key, values in keys.items() for value in (MISSING, *values)):
        assert check(changed(family, {key: value}), tmp_path / "model").isprintable()


def test_the_length_of_the_pretraining_beside_the_rotary_embedding_overrides_the_one_in_it(tmp_path: Path) -> None:
    """Ministral's q grows from that length on, and yarn's frequencies depend on it."""
    changes: tuple[dict[str, Any], ...] = ({}, {"original_max_position_embeddings": 5}, {"original_max_position_embeddings": 64})
    specs = []
    for one in changes:
        assert check(changed("ministral3", one), tmp_path / "model") == "equal"
        specs.append(load_spec(tmp_path / "model"))
    assert [spec.rope.original_max_len for spec in specs] == [16, 5, 64]


@pytest.mark.second
def test_how_much_of_a_head_a_minimax_rotates_depends_on_three_keys(tmp_path: Path) -> None:
    """A null partial_rotary_factor is none to a reader that asks for its value, and one to a reader that asks for its key."""
    found = {}
    values = {"rotary_dim": (MISSING, None, 6), "partial_rotary_factor": (MISSING, None, 0.5, 1.0), "rope": (MISSING, None, 0.5)}
    for rotary, partial, rope in product(*values.values()):
        ropes = MISSING if rope is MISSING else {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": rope}
        changes = {"rotary_dim": rotary, "partial_rotary_factor": partial, "rope_parameters": ropes}
        found[rotary, partial, rope] = check(changed("minimax_m2", changes), tmp_path / "model")
    assert {key for key, said in found.items() if said == "transformers fails"} == set()
    refused = {key: said for key, said in found.items() if said != "equal"}
    nulls = {key for key in found if key[2] is None}
    assert set(refused) == {(6, None, MISSING)} | nulls
    said = "rotary_dim=6 and partial_rotary_factor=null contradict each other: transformers rotates whole heads"
    assert said in refused[6, None, MISSING]
    assert all("rope_parameters.partial_rotary_factor is null" in refused[key] for key in nulls)


NULLS: tuple[dict[str, Any], ...] = (
    {"rms_norm_eps": None}, {"rope_theta": None}, {"rope_scaling": {"rope_theta": None}},
    {"rope_scaling": {**YARN, "original_max_position_embeddings": None}},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": None},
)


@pytest.mark.parametrize("changes", NULLS)
def test_a_null_that_no_model_can_compute_with_is_refused(changes: dict[str, Any]) -> None:
    """transformers fails; a default in its place may be another number than the one that the weights were trained with."""
    with pytest.raises(CheckpointError, match=r"is null; it must be an? (number|integer) in"):
        read_spec(changed("llama", changes), "config.json")


def test_a_rope_whose_type_is_null_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"rope_type 'null' \(supported: default, linear"):
        read_spec(changed("llama", {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}}), "config.json")


def test_a_null_that_another_value_replaces_is_read(tmp_path: Path) -> None:
    assert check(changed("llama", {"rope_theta": None, "rope_parameters": {"rope_theta": 30.0}}), tmp_path / "model") == "equal"
