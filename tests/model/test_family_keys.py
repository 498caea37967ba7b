"""Keys of config.json, in tiny models of every family: a missing key or another value gives the logits of transformers. Keys of
computations that only other models have are refused by name."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.errors import CheckpointError
from batchspec.model.families.registry import FAMILIES
from batchspec.model.fused import rms_norm
from batchspec.model.spec import ModelSpec, load_spec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import as_computed
from tests.helpers.attentions import windows
from tests.helpers.models import causal_models
from tests.model.test_target import Runner, prompts

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 32, "vocab_size": 61,
    "max_position_embeddings": 256, "pad_token_id": 0,
}
USUAL: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 12, "rms_norm_eps": 1e-3, "rope_theta": 500.0}
EXPERTS = {"num_local_experts": 9, "num_experts_per_tok": 2}
RECURRENT: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "full_attention_interval": 2, "linear_num_key_heads": 4,
    "linear_num_value_heads": 16, "linear_key_head_dim": 20, "linear_value_head_dim": 28, "linear_conv_kernel_dim": 3,
    "partial_rotary_factor": 0.5,
}
SHARED = {"num_experts": 11, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24}
CONV: dict[str, Any] = {
    "norm_eps": 1e-2, "tie_embedding": False, "conv_L_cache": 4, "conv_bias": True,
    "layer_types": ["conv", "full_attention", "conv"],
}
RECURRENT_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
FACTORS = {"embedding_multiplier": 2.5, "residual_multiplier": 0.6, "attention_multiplier": 0.3, "logits_scaling": 1.5}
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "mistral": {"sliding_window": 9},
    "qwen3_moe": {
        "num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1], "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "mixtral": {**EXPERTS, "sliding_window": 9},
    "minimax_m2": {**EXPERTS, "rotary_dim": 6},
    "gpt_oss": {**EXPERTS, "sliding_window": 7, "swiglu_alpha": 1.2, "swiglu_limit": 0.8, "attention_bias": False},
    "gemma3_text": {
        "sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20, "rope_local_base_freq": 50.0,
        "tie_word_embeddings": False,
    },
    "gemma4_text": {
        "head_dim": 12, "global_head_dim": 20, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"], "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": False, "final_logit_softcapping": 5.0,
    },
    "gemma4_unified_text": {
        "head_dim": 12, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "use_bidirectional_attention": "vision",
    },
    "phi3": {"sliding_window": 9, "partial_rotary_factor": 0.5},
    "olmo2": {},
    "glm4": {"partial_rotary_factor": 1.0},
    "glm_ocr_text": {"head_dim": 64},
    "glm4_moe": {
        "n_routed_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.5, "first_k_dense_replace": 2, "norm_topk_prob": False, "use_qk_norm": True,
        "partial_rotary_factor": 1.0,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 32, "head_dim": 6, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6, "v_head_dim": 14, "rope_interleave": False, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_routed_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": False, "first_k_dense_replace": 0,
    },
    "mistral4": {
        "num_key_value_heads": 32, "head_dim": 16, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6, "v_head_dim": 14, "rope_interleave": False, "first_k_dense_replace": 2,
        "n_routed_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2,
        "routed_scaling_factor": 1.5, "norm_topk_prob": False,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 100.0,
            "llama_4_scaling_beta": 0.4, "mscale_all_dim": 0.9,
        },
    },
    "deepseek_v3": {
        "num_key_value_heads": 32, "head_dim": 6, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6, "v_head_dim": 14, "rope_interleave": False, "first_k_dense_replace": 2,
        "n_routed_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": False,
    },
    "olmo3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "exaone4": {"sliding_window": 7, "sliding_window_pattern": 2},
    "seed_oss": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "smollm3": {"no_rope_layer_interval": 2, "no_rope_layers": [0, 1, 1], "tie_word_embeddings": False},
    "granite": FACTORS,
    "granitemoehybrid": {
        **FACTORS, "num_local_experts": 0, "shared_intermediate_size": 28, "position_embedding_type": "rope",
        "layer_types": ["attention", "linear_attention", "mamba"], "mamba_n_heads": 2, "mamba_n_groups": 2, "mamba_d_state": 14,
        "mamba_d_conv": 3, "mamba_expand": 1, "mamba_conv_bias": False, "mamba_proj_bias": True,
    },
    "bamba": {
        "attn_layer_indices": [0, 2], "mamba_n_heads": 2, "mamba_n_groups": 2, "mamba_d_state": 14, "mamba_d_conv": 3,
        "mamba_expand": 1, "mamba_conv_bias": False, "mamba_proj_bias": True, "mlp_bias": True,
    },
    "falcon_h1": {
        "mamba_d_ssm": 40, "mamba_n_heads": 4, "mamba_d_head": 10, "mamba_n_groups": 2, "mamba_d_state": 14, "mamba_d_conv": 3,
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mlp_bias": True, "embedding_multiplier": 2.5,
        "lm_head_multiplier": 0.3, "key_multiplier": 0.7, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.375, 0.25, 0.4375, 0.5, 0.3125], "mlp_multipliers": [0.88, 0.58],
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 100.0,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "qwen3_next": {**RECURRENT, **SHARED, "mlp_only_layers": [1], "decoder_sparse_step": 1, "norm_topk_prob": True},
    "qwen3_5_text": RECURRENT,
    "lfm2_moe": {
        **CONV, "num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_dense_layers": 1,
        "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.5,
    },
    "lfm2": {
        **CONV, "block_ff_dim": 50, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3, "block_auto_adjust_ff_dim": True,
    },
    "qwen3_5_moe_text": {**RECURRENT, **SHARED},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "num_hidden_layers": 4, "rms_norm_eps": None,
        "layer_norm_epsilon": 1e-3, "mamba_num_heads": 6, "mamba_head_dim": 10, "n_groups": 3, "ssm_state_size": 14,
        "conv_kernel": 3, "use_bias": True, "use_conv_bias": False, "n_routed_experts": 24, "num_experts_per_tok": 3,
        "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": False, "mlp_bias": True, "time_step_min": 1e-30,
        "partial_rotary_factor": 1.0,
    },
}
VALUES: list[dict[str, Any]] = [
    {"attention_bias": True},
    {"tie_word_embeddings": True},
    {"sliding_window": None},
    {"num_key_value_heads": 1},
    {"rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 5},
    {"decoder_sparse_step": 2, "norm_topk_prob": False},
    {"num_experts_per_tok": 1},
    {"partial_rotary_factor": 1.0},
]
REFUSED: dict[str, set[str]] = {
    "layer_types": {
        "llama", "qwen3_moe", "minimax_m2", "olmo2", "glm4", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "mistral4", "mixtral",
        "phi3", "seed_oss", "granite", "granitemoehybrid", "ministral3", "lfm2", "lfm2_moe", "nemotron_h", "bamba",
        "falcon_h1", "glm_ocr_text", *RECURRENT_FAMILIES,
    },
    "sliding_window": {"gpt_oss", "gemma3_text", "olmo3", *GEMMA4},
    "rope_parameters": {"gemma3_text", "olmo3", *GEMMA4},
    "yarn": {"gemma3_text", "phi3", "olmo3", *GEMMA4},
    "rope_scaling": {"phi3", *GEMMA4},
    "decoder_sparse_step": {"qwen3_5_moe_text"},
    "num_experts_per_tok": set(FAMILIES) - {
        "qwen3_moe", "mixtral", "minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe",
        "mistral4", "glm4_moe_lite",
        "granitemoehybrid", "lfm2_moe", "nemotron_h",
    },
    "no n_group": {"glm4_moe", "glm4_moe_lite", "nemotron_h"},
    "no mamba_n_heads": {"granitemoehybrid", "bamba", "falcon_h1"},
    "no mamba_d_ssm": {"falcon_h1"},
    "no mamba_norm_before_gate": {"falcon_h1"},
    "no attn_layer_indices": {"bamba"},
    "no mamba_num_heads": {"nemotron_h"},
    "no n_groups": {"nemotron_h"},
    "no layers_block_type": {"nemotron_h"},
    "attention_bias": {"nemotron_h", "glm_ocr_text"},
    "tie_word_embeddings": {"nemotron_h"},
    "num_key_value_heads": {"deepseek_v3", "glm4_moe_lite", "mistral4"},
    "no qk_rope_head_dim": {"deepseek_v3", "glm4_moe_lite", "mistral4"},
    "no qk_nope_head_dim": {"mistral4"},
    "no mlp_layer_types": {"glm4_moe_lite"},
    "no layer_types": {"granitemoehybrid", "lfm2_moe"},
    "no head_dim": {"phi3", "bamba", "glm_ocr_text"},
}
"""The families that refuse a config, by its title in `changed`."""
FAIL = {
    ("exaone4", "sliding_window"),
    *((name, title) for name in ("ministral3", "mistral4") for title in ("rope_scaling", "rope_parameters", "yarn")),
    ("nemotron_h", "no time_step_min"), ("deepseek_v3", "no num_key_value_heads"),
}
"""What transformers fails to read: no window and no layer_types; queries that grow by a null. And dt, which it clamps in prompts
alone (`kernels/mamba2/layout.py`). And fewer heads than the 128 of DeepSeek-V3."""


def logits_of_both(config: dict[str, Any], folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and those of transformers, each from the same config.json and the same random weights; fp32."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    spec, (model, theirs) = load_spec(folder), of_transformers(folder)
    # Prompts here are shorter than the default windows.
    assert set(windows(spec)) <= {None, getattr(model.config, "sliding_window", None)}
    return our_logits(folder, spec, model), theirs


IDS = prompts([37, 12], 60)


def of_transformers(folder: Path) -> tuple[Any, torch.Tensor]:
    """A model with random weights from the folder's config.json, and its logits for IDS."""
    from transformers import AutoConfig

    model: Any = causal_models().from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("bias"))]:
            tensor.copy_(torch.randn(tensor.shape, generator=noise) * 0.3 + float(name.endswith("norm.weight")))
        model.tie_weights()
        return model, torch.cat([model(torch.tensor([row])).logits[0] for row in IDS])


def our_logits(folder: Path, spec: ModelSpec, model: Any) -> torch.Tensor:
    """Ours for IDS, with the weights of a model of transformers; they are saved to the folder."""
    model.save_pretrained(folder / "saved")
    shutil.move(folder / "saved" / "model.safetensors", folder / "model.safetensors")
    target = Target.load(folder, spec, dtype=torch.float32, device=torch.device("cpu"))
    return torch.cat(Runner.start(target, 2).feed(IDS)[0])


def changed(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The config without each of its optional keys, and with other values."""
    found = [(f"no {key}", {name: value for name, value in config.items() if name != key}) for key in config if key not in SHAPE]
    found = [(title, own) for title, own in found if title != "no model_type"]
    for values in VALUES:
        own = "yarn" if "yarn" in str(values) else "layer_types" if "layer_types" in values else next(iter(values))
        found.append((own, {**config, **values}))
    return found


@pytest.mark.second
@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_and_other_values_mean_what_they_mean_to_transformers(family: str, tmp_path: Path) -> None:
    config = {"model_type": family, **SHAPE, **USUAL, **OWN[family]}
    refused = set()
    for i, (title, own) in enumerate([("unchanged", config), *changed(config)]):
        if (family, title) in FAIL:
            continue
        try:
            ours, theirs = logits_of_both(own, tmp_path / str(i))
        except CheckpointError:
            refused.add(title)
            continue
        assert torch.allclose(ours, theirs, atol=1e-3, rtol=1e-4), title
    assert refused == {title for title, families in REFUSED.items() if family in families}


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_in_bf16_are_rounded_as_those_of_transformers(family: str) -> None:
    name = family.removesuffix("_text")
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    (own,) = (kind for title, kind in vars(module).items() if title.endswith("RMSNorm"))
    theirs: Any = own(90, eps=1e-6).bfloat16()
    torch.nn.init.normal_(theirs.weight)
    spec = read_spec({"model_type": family, **SHAPE, **USUAL, **OWN[family], "hidden_size": 90}, "config.json")
    # Classes of their own: tests/kernels/test_gated_delta_layer.py, test_gated_group_norm.py.
    inside = ("linear_attn.norm.weight", "mixer.norm.weight", "mamba.norm.weight")
    norms = [tensor for tensor in spec.tensors() if tensor.role == "norm" and not tensor.name.endswith(inside)]
    assert {(norm.wide, norm.offset) for norm in norms} == {(norms[0].wide, norms[0].offset)}
    x, weight = torch.randn(200, 90).bfloat16(), as_computed(norms[0], theirs.weight.detach(), torch.bfloat16)
    assert (rms_norm(x, weight, 1e-6) != theirs(x)).float().mean() < 0.001  # a sum of squares in another order


# --- keys of other models

OF_OTHER_MODELS: dict[str, Any] = {
    "compression_config": {"a": 1}, "n_routed_experts": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "clip_qkv": 8.0, "attention_chunk_size": 8192, "dual_chunk_attention_config": {"chunk_size": 262_144},
    "no_rope_layers": [1, 0], "no_rope_layer_interval": 4, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "layer_block_types": ["mamba"], "block_configs": [{}], "vision_config": {"depth": 2}, "text_config": {"depth": 2},
    "alibi": True, "parallel_attn": True, "use_parallel_residual": True, "qk_layernorm": True, "use_mrope": True,
    "is_encoder_decoder": True, "logit_scale": 0.0625, "logits_scaling": 8.0, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "attention_multiplier": 0.0156, "scale_emb": 12, "scale_depth": 1.4, "rotary_pct": 0.25,
    "hidden_act": "relu", "rope_interleave": True, "attn_temperature_tuning": True, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5, "n_group": 8, "rope_ratio": 500, "use_mup": True,
    "hidden_activation": "gelu", "scoring_func": "sigmoid_of_another_kind",
}
OF_SOME_FAMILIES: dict[str, Any] = {
    "moe_intermediate_size": 8, "query_pre_attn_scalar": 256, "rope_local_base_freq": 1e4, "use_qk_norm": True,
    "num_experts": 9, "num_local_experts": 9, "num_experts_per_tok": 2, "partial_rotary_factor": 0.5,
}
OF_OTHER_MINIMAX: dict[str, Any] = {
    "scoring_func": "softmax", "use_routing_bias": False, "use_qk_norm": False, "qk_norm_type": "per_head",
    "shared_intermediate_size": 8, "layernorm_full_attention_alpha": 3.5,
    "layernorm_full_attention_beta": 2.0, "layernorm_mlp_alpha": 3.5, "layernorm_mlp_beta": 2.0, "sliding_window": 9,
    "attn_window_size": 9, "num_expert_group": 8, "topk_group": 4, "attn_type_list": [1, 0, 1],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_other_models_are_refused_by_name(family: str) -> None:
    config = {"model_type": family, **SHAPE, **USUAL, **OWN[family]}
    changes = OF_OTHER_MODELS | (OF_OTHER_MINIMAX if family == "minimax_m2" else {})
    changes |= OF_SOME_FAMILIES if family == "llama" else {}
    read = {*config} | ({"hidden_act"} if family in ("gemma3_text", *GEMMA4) else set())
    read |= {"final_logit_softcapping"} if family in GEMMA4 else set()
    changes = {key: value for key, value in changes.items() if key not in read}
    for key, value in changes.items():
        with pytest.raises(CheckpointError, match=f"not supported: {key}="):
            read_spec({**config, key: value}, "config.json")
